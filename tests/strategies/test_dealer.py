"""Dealing parts of batches: each once, in order, within the bound, and with meetings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import sleep

import pytest

from paceline.errors import PeerError
from paceline.strategies.parameter_server.assignments import AssignmentQueue, QueuedAssignment
from paceline.strategies.strategy import AssignmentRequest


def terms(
    total: int = 10,
    first: int = 0,
    checkpoint_every: int = 0,
    stop: bool = False,
    finish: bool = False,
) -> AssignmentRequest:
    return AssignmentRequest(first, total, checkpoint_every, stop, finish)


def parts(deals: list[QueuedAssignment]) -> list[tuple[int, int]]:
    return [(deal.turn.iteration, deal.turn.part) for deal in deals]


def test_whoever_is_free_gets_the_next_part() -> None:
    dealer = AssignmentQueue(workers=2, staleness=None)
    slow = dealer.next_assignment(0, terms())
    fast = [dealer.next_assignment(1, terms()) for _ in range(4)]
    assert parts([slow, *fast]) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [deal.ahead for deal in fast] == [0, 1, 1, 2]


def test_all_parts_are_dealt_exactly_once_and_then_it_is_the_end() -> None:
    dealer = AssignmentQueue(workers=3, staleness=1)

    def work(worker: int) -> list[QueuedAssignment]:
        deals = []
        while (deal := dealer.next_assignment(worker, terms(total=20))).turn.action == "train":
            deals.append(deal)
            sleep(0.001 * worker)
        return deals

    with ThreadPoolExecutor(3) as pool:
        deals = [deal for some in pool.map(work, range(3)) for deal in some]
    assert sorted(parts(deals)) == [(batch, part) for batch in range(20) for part in range(3)]
    assert max(deal.ahead for deal in deals) <= 1


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nobody_gets_further_ahead_than_the_bound(staleness: int) -> None:
    """One worker holds the first batch; the other gets what the bound allows, and then waits."""
    dealer = AssignmentQueue(workers=2, staleness=staleness)
    dealer.next_assignment(0, terms())
    allowed = [dealer.next_assignment(1, terms()) for _ in range(2 * staleness + 1)]
    assert allowed[-1].ahead == staleness
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dealer.next_assignment, 1, terms())
        sleep(0.05)
        assert not waiting.done()
        dealer.done(0)
        assert waiting.result(10).turn.iteration == staleness + 1


def test_a_resumed_run_is_dealt_on_from_its_iteration() -> None:
    dealer = AssignmentQueue(workers=2, staleness=None)
    assert parts([dealer.next_assignment(0, terms(first=7))]) == [(7, 0)]


def test_all_meet_before_a_batch_when_one_is_due() -> None:
    """Everyone gets one part of the batch, when the batches before it are done, not sooner."""
    dealer = AssignmentQueue(workers=2, staleness=None)
    everyone_is_here = Barrier(2)
    calls: list[list[tuple[str, int]]] = [[], []]

    def work(worker: int) -> None:
        for _ in range(100):
            deal = dealer.next_assignment(worker, terms(total=6, checkpoint_every=2))
            calls[worker].append((deal.turn.action, deal.turn.iteration))
            if deal.turn.action == "end":
                return
            if deal.turn.action == "checkpoint":
                everyone_is_here.wait(10)
            sleep(0.002 * worker)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    for mine in calls:
        assert [call for call in mine if call[0] == "checkpoint"] == [
            ("checkpoint", 2),
            ("checkpoint", 4),
        ]


def test_a_stop_comes_to_all_after_a_whole_batch() -> None:
    dealer = AssignmentQueue(workers=2, staleness=None)
    dealer.next_assignment(0, terms())
    with ThreadPoolExecutor(1) as pool:
        rest = dealer.next_assignment(0, terms(stop=True))
        assert parts([rest]) == [(0, 1)]
        stopping = pool.submit(dealer.next_assignment, 1, terms())
        sleep(0.05)
        assert not stopping.done()
        assert dealer.next_assignment(0, terms()).turn.action == "stop"
        assert stopping.result(10).turn.action == "stop"
        assert stopping.result().turn.iteration == 1


def check_all_get(
    dealer: AssignmentQueue,
    first: AssignmentRequest,
    last: AssignmentRequest,
    expected: tuple[str, int],
) -> None:
    """Worker 1 asks first and is not answered before worker 0 has asked; both get one answer."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dealer.next_assignment, 1, first)
        sleep(0.05)
        assert not waiting.done()
        turns = [dealer.next_assignment(0, last).turn, waiting.result(10).turn]
    assert [(turn.action, turn.iteration) for turn in turns] == [expected] * 2


def started(parts: int) -> AssignmentQueue:
    """Of two workers, which have computed so many parts in turn."""
    dealer = AssignmentQueue(workers=2, staleness=None)
    for number in range(parts):
        dealer.next_assignment(number % 2, terms())
        dealer.done(number % 2)
    return dealer


def test_a_worker_that_finishes_ends_the_run_once_the_others_are_done() -> None:
    dealer = AssignmentQueue(workers=2, staleness=None)
    assert parts([dealer.next_assignment(0, terms()), dealer.next_assignment(1, terms())]) == [
        (0, 0),
        (0, 1),
    ]
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(dealer.next_assignment, 0, terms(finish=True))
        sleep(0.05)
        assert not finishing.done()
        assert dealer.next_assignment(1, terms()).turn.action == "end"
        assert finishing.result(10).turn.action == "end"


def test_reaching_the_target_precedes_a_checkpoint_that_others_wait_for() -> None:
    check_all_get(
        started(4), terms(checkpoint_every=2), terms(checkpoint_every=2, finish=True), ("end", 2)
    )


def test_reaching_the_target_precedes_a_stop_that_others_wait_for() -> None:
    check_all_get(started(4), terms(stop=True), terms(finish=True), ("end", 2))


def test_a_stop_precedes_a_checkpoint_that_others_wait_for() -> None:
    check_all_get(
        started(4), terms(checkpoint_every=2), terms(checkpoint_every=2, stop=True), ("stop", 2)
    )


def test_the_end_of_the_iterations_precedes_a_stop() -> None:
    check_all_get(started(4), terms(total=2), terms(total=2, stop=True), ("end", 2))


def test_a_batch_that_was_begun_is_not_completed_when_a_worker_finishes() -> None:
    dealer = started(5)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(dealer.next_assignment, 0, terms(finish=True))
        sleep(0.05)
        assert not finishing.done()
        turns = [dealer.next_assignment(1, terms()).turn, finishing.result(10).turn]
    assert [(turn.action, turn.iteration, turn.part) for turn in turns] == [("end", 2, 1)] * 2


def test_nobody_waits_for_one_who_is_gone() -> None:
    dealer = AssignmentQueue(workers=2, staleness=0)
    dealer.next_assignment(0, terms())
    dealer.next_assignment(1, terms())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dealer.next_assignment, 1, terms())
        dealer.abort()
        with pytest.raises(PeerError):
            waiting.result(10)
