"""A node's line to the store of an elastic run: it shows that the node lives, and never hangs.

The store's own client would wait for ever for a machine that has fallen silent. So a thread asks in
our place, and whoever gets no answer in time is told that the first node is lost. The same thread
beats, however busy the node is otherwise.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

from paceline.errors import RunError
from paceline.launch.messages import decode

T = TypeVar("T")

ANSWER_SECONDS = 15.0
"""How long the first node may be silent before it counts as lost."""
BEAT_SECONDS = 0.5
CLOSING_SECONDS = 1.0


class LostContactError(RunError):
    """The first node, which serves the store, is gone."""


class StoreClient:
    """To be closed when the node leaves the run."""

    def __init__(self, store: Store, place: str) -> None:
        self._store = store
        self._place = place
        self._is_lost = False
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="contact", daemon=True)
        self._number: int | None = None
        """Of this node, once it beats."""
        self._thread.start()

    def register(self) -> int:
        """From now on this node beats; its number, in the order in which nodes came."""
        number = self.ask(lambda store: store.add("nodes", 1)) - 1
        self._number = number
        return number

    def heartbeats(self) -> list[int]:
        """How often each of the nodes that came has beaten."""

        def count(store: Store) -> list[int]:
            return [store.add(f"beat/{number}", 0) for number in range(store.add("nodes", 0))]

        return self.ask(count)

    def get(self, key: str) -> Any:
        """None where nobody has told it."""

        def look(store: Store) -> Any:
            return decode(store.get(key), f"value of {key}") if store.check([key]) else None

        return self.ask(look)

    def set(self, key: str, value: Any) -> None:
        self.ask(lambda store: store.set(key, json.dumps(value)))

    def set_once(self, key: str, value: Any) -> None:
        """Unless another one was quicker."""
        self.ask(lambda store: store.compare_set(key, "", json.dumps(value)))

    def hand_in(self, parts: Iterable[tuple[str, bytes]]) -> None:
        """Set something large, part by part; the node beats after each, so none may be too large.

        The answer to the count comes when the part has arrived: no beat waits behind several.
        """

        def set_part(store: Store, key: str, part: bytes) -> None:
            store.set(key, part)  # type: ignore[arg-type]  # it takes both
            store.add(f"parts/{self._number}", 1)
            self._beat()

        for key, part in parts:
            self.ask(partial(set_part, key=key, part=part))

    def parts_handed_in(self, nodes: Iterable[int]) -> int:
        """How many parts have come from these nodes, all together."""
        return self.ask(lambda store: sum(store.add(f"parts/{node}", 0) for node in nodes))

    def ask(self, action: Callable[[Store], T], limit_seconds: float = ANSWER_SECONDS) -> T:
        """What the store answers to an action, which must not wait for anybody.

        What the action raises is raised here; where the store fails it, contact is lost.
        """
        if self._is_lost:
            raise self._lost()
        answers: SimpleQueue[tuple[T] | Exception] = SimpleQueue()

        def question() -> None:
            try:
                answers.put((action(self._store),))
            except Exception as error:  # noqa: BLE001 - raised to who asked
                answers.put(error)

        self._questions.put(question)
        try:
            answer = answers.get(timeout=limit_seconds)
        except Empty:
            raise self._lost() from None
        if isinstance(answer, RuntimeError):
            raise self._lost() from answer
        if isinstance(answer, Exception):
            raise answer
        return answer[0]

    def _lost(self) -> LostContactError:
        self._is_lost = True
        return LostContactError(
            f"lost contact with the first node at {self._place}, and the run cannot go on without"
            " it: start it again with --resume, and the others as before"
        )

    def _work(self) -> None:
        due = monotonic()
        while True:
            with contextlib.suppress(Empty):
                question = self._questions.get(timeout=max(0.0, due - monotonic()))
                if question is None:
                    return
                question()
            if monotonic() >= due:
                due = monotonic() + BEAT_SECONDS
                self._beat()

    def _beat(self) -> None:
        # What is wrong is told to whoever asks next.
        if self._number is not None:
            with contextlib.suppress(RuntimeError):
                self._store.add(f"beat/{self._number}", 1)

    def close(self) -> None:
        """The node beats no more."""
        self._questions.put(None)
        self._thread.join(CLOSING_SECONDS)
