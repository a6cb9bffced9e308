"""A client of the store of an elastic run that never hangs, and that sends heartbeats.

torch's client blocks forever if the machine that serves the store falls silent. Here a thread makes
the calls, and a caller that gets no answer in time gets a LostContactError. The same thread sends
heartbeats, however busy the node is.
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
"""How long the store may not answer before it counts as lost."""
HEARTBEAT_SECONDS = 0.5
CLOSING_SECONDS = 1.0


class LostContactError(RunError):
    """The first node, which serves the store, does not answer."""


class StoreClient:
    """JSON values in the store; close it when the node leaves the run."""

    def __init__(self, store: Store, endpoint: str) -> None:
        self._store = store
        self._endpoint = endpoint
        self._is_lost = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="store client", daemon=True)
        self._number: int | None = None
        """This node's number, once it is registered."""
        self._thread.start()

    def register(self) -> int:
        """Start heartbeats; returns this node's number, in the order of registration."""
        number = self.ask(lambda store: store.add("nodes", 1)) - 1
        self._number = number
        return number

    def heartbeats(self) -> list[int]:
        """The number of heartbeats of each registered node."""

        def count(store: Store) -> list[int]:
            return [store.add(f"beat/{number}", 0) for number in range(store.add("nodes", 0))]

        return self.ask(count)

    def get(self, key: str) -> Any:
        """The value of a key, or None if it is not set."""

        def look(store: Store) -> Any:
            return decode(store.get(key), f"value of {key}") if store.check([key]) else None

        return self.ask(look)

    def set(self, key: str, value: Any) -> None:
        self.ask(lambda store: store.set(key, json.dumps(value)))

    def set_once(self, key: str, value: Any) -> None:
        """Set a key unless another node has set it before."""
        self.ask(lambda store: store.compare_set(key, "", json.dumps(value)))

    def send_parts(self, parts: Iterable[tuple[str, bytes]]) -> None:
        """Set large values part by part, with a heartbeat after each.

        The answer to the count arrives after the part, so no heartbeat waits behind several parts.
        """

        def set_part(store: Store, key: str, part: bytes) -> None:
            store.set(key, part)  # type: ignore[arg-type]  # it takes both
            store.add(f"parts/{self._number}", 1)
            self._send_heartbeat()

        for key, part in parts:
            self.ask(partial(set_part, key=key, part=part))

    def parts_sent(self, nodes: Iterable[int]) -> int:
        """The total number of parts that these nodes have sent."""
        return self.ask(lambda store: sum(store.add(f"parts/{node}", 0) for node in nodes))

    def ask(self, action: Callable[[Store], T], limit_seconds: float = ANSWER_SECONDS) -> T:
        """Run an action with the store and return its result; the action must not block.

        Raises what the action raises, and LostContactError if the store fails or does not answer.
        """
        if self._is_lost:
            raise self._lost()
        answers: SimpleQueue[tuple[T] | Exception] = SimpleQueue()

        def call() -> None:
            try:
                answers.put((action(self._store),))
            except Exception as error:  # noqa: BLE001 - raised to the caller
                answers.put(error)

        self._calls.put(call)
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
            f"lost contact with the first node at {self._endpoint}, and the run cannot continue"
            " without it: restart it with --resume, and the others as before"
        )

    def _work(self) -> None:
        due = monotonic()
        while True:
            with contextlib.suppress(Empty):
                call = self._calls.get(timeout=max(0.0, due - monotonic()))
                if call is None:
                    return
                call()
            if monotonic() >= due:
                due = monotonic() + HEARTBEAT_SECONDS
                self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        # The next call reports what is wrong.
        if self._number is not None:
            with contextlib.suppress(RuntimeError):
                self._store.add(f"beat/{self._number}", 1)

    def close(self) -> None:
        """Stop heartbeats."""
        self._calls.put(None)
        self._thread.join(CLOSING_SECONDS)
