"""Operations on a thread of their own."""

from __future__ import annotations

from functools import partial
from threading import Event

import pytest

from paceline.comm.background import Background
from paceline.comm.communicator import Communicator
from paceline.comm.in_process import Hub, run
from paceline.errors import PeerError


def note(done: list[int], number: int, _: Communicator) -> None:
    done.append(number)


def test_operations_run_in_the_order_of_submission() -> None:
    done: list[int] = []
    with Hub(1) as hub:
        background = Background(hub.communicators[0])
        works = [background.submit(partial(note, done, i)) for i in range(5)]
        works[4].wait()
        background.close()
    assert done == [0, 1, 2, 3, 4]


def pass_gate(gate: Event) -> None:
    gate.wait(20)


def test_the_caller_does_not_wait() -> None:
    gate = Event()
    with Hub(1) as hub:
        background = Background(hub.communicators[0])
        work = background.submit(lambda _: pass_gate(gate))
        was_done = work.is_done()
        gate.set()
        work.wait()
        background.close()
    assert not was_done
    assert work.is_done()


def test_after_a_failure_nothing_more_is_sent() -> None:
    sent: list[int] = []

    def fail(_: Communicator) -> None:
        raise PeerError("rank 0: recv from rank 1: the connection was closed")

    with Hub(1) as hub:
        background = Background(hub.communicators[0])
        works = [background.submit(fail), background.submit(lambda _: sent.append(1))]
        for work in works:
            with pytest.raises(PeerError, match="recv from rank 1"):
                work.wait()
        background.close()
    assert sent == []


def test_of_workers_in_threads_the_first_failure_is_told_and_not_its_echoes() -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise ZeroDivisionError("the cause")
        communicator.barrier().wait()

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run(3, work)
