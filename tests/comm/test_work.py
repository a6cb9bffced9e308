"""Work handles: waits, errors and callbacks."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from paceline.comm.work import CombinedWork, Work
from paceline.measure.timeline import Moment

LIMIT_SECONDS = 30.0


class Interrupted(Work):
    def _block(self) -> None:
        raise KeyboardInterrupt

    def _poll(self) -> bool:
        return True


def test_second_wait_raises_the_error_of_an_interrupted_wait() -> None:
    work = Interrupted()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.wait()


class Controlled(Work):
    """Completes when the test calls it, on the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self._finished = Event()

    def finish(self) -> None:
        self._finished.set()
        self._complete()

    def _block(self) -> None:
        assert self._finished.wait(LIMIT_SECONDS)

    def _poll(self) -> bool:
        return self._finished.is_set()


@pytest.mark.parametrize("is_combined", [False, True])
def test_callback_can_wait_for_another_thread_that_uses_the_work(is_combined: bool) -> None:
    part = Controlled()
    work = CombinedWork([part]) if is_combined else part
    answers: list[bool] = []

    def callback(_: Moment) -> None:
        added = Event()
        register = lambda: work.add_done_callback(lambda _: added.set())  # noqa: E731
        Thread(target=register, daemon=True).start()
        answers.append(added.wait(2.0))

    work.add_done_callback(callback)
    part.finish()
    assert answers == [True]


def test_wait_returns_after_all_callbacks() -> None:
    work, may_end, has_begun = Controlled(), Event(), Event()
    has_run: list[bool] = []

    def callback(_: Moment) -> None:
        has_begun.set()
        assert may_end.wait(LIMIT_SECONDS)
        has_run.append(True)

    work.add_done_callback(callback)
    completing = Thread(target=work.finish)
    completing.start()
    assert has_begun.wait(LIMIT_SECONDS)
    release = Thread(target=may_end.set)
    release.start()
    work.wait()
    assert has_run == [True]
    completing.join()
    release.join()


def test_callback_can_wait_for_its_own_work() -> None:
    work = Controlled()
    results: list[str] = []

    def callback(_: Moment) -> None:
        work.wait()
        results.append("returned")

    work.add_done_callback(callback)
    completing = Thread(target=work.finish, daemon=True)
    completing.start()
    completing.join(LIMIT_SECONDS)
    assert results == ["returned"]
