"""Parts of batches are assigned once, in order and within the staleness bound."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import sleep

import pytest

from paceline.errors import PeerError
from paceline.strategies.parameter_server.assignments import AssignmentQueue
from paceline.strategies.strategy import Assignment, AssignmentRequest


def request(
    total: int = 10,
    first: int = 0,
    checkpoint_every: int = 0,
    stop: bool = False,
    finish: bool = False,
) -> AssignmentRequest:
    return AssignmentRequest(first, total, checkpoint_every, stop, finish)


def parts(assignments: list[Assignment]) -> list[tuple[int, int]]:
    return [(assignment.iteration, assignment.part) for assignment in assignments]


def test_idle_worker_gets_the_next_part() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    slow = queue.next_assignment(0, request())
    fast = [queue.next_assignment(1, request()) for _ in range(4)]
    assert parts([slow, *fast]) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [assignment.ahead for assignment in fast] == [0, 1, 1, 2]


def test_all_parts_are_assigned_exactly_once_before_the_end() -> None:
    queue = AssignmentQueue(workers=3, staleness=1)

    def work(worker: int) -> list[Assignment]:
        assignments = []
        while (assignment := queue.next_assignment(worker, request(total=20))).action == "train":
            assignments.append(assignment)
            sleep(0.001 * worker)
        return assignments

    with ThreadPoolExecutor(3) as pool:
        assignments = [assignment for some in pool.map(work, range(3)) for assignment in some]
    assert sorted(parts(assignments)) == [(batch, part) for batch in range(20) for part in range(3)]
    assert max(assignment.ahead for assignment in assignments) <= 1


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_bound_limits_the_lead_of_a_worker(staleness: int) -> None:
    """One worker holds the first batch; the other gets parts up to the bound, then waits."""
    queue = AssignmentQueue(workers=2, staleness=staleness)
    queue.next_assignment(0, request())
    allowed = [queue.next_assignment(1, request()) for _ in range(2 * staleness + 1)]
    assert allowed[-1].ahead == staleness
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.next_assignment, 1, request())
        sleep(0.05)
        assert not waiting.done()
        queue.done(0)
        assert waiting.result(10).iteration == staleness + 1


def test_resumed_run_continues_at_its_iteration() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    assert parts([queue.next_assignment(0, request(first=7))]) == [(7, 0)]


def test_all_workers_get_a_due_checkpoint_before_the_next_batch() -> None:
    """Each worker gets one part of the batch after all earlier batches are complete."""
    queue = AssignmentQueue(workers=2, staleness=None)
    everyone_is_here = Barrier(2)
    calls: list[list[tuple[str, int]]] = [[], []]

    def work(worker: int) -> None:
        for _ in range(100):
            assignment = queue.next_assignment(worker, request(total=6, checkpoint_every=2))
            calls[worker].append((assignment.action, assignment.iteration))
            if assignment.action == "end":
                return
            if assignment.action == "checkpoint":
                everyone_is_here.wait(10)
            sleep(0.002 * worker)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    for mine in calls:
        assert [call for call in mine if call[0] == "checkpoint"] == [
            ("checkpoint", 2),
            ("checkpoint", 4),
        ]


def test_all_workers_stop_after_a_complete_batch() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    queue.next_assignment(0, request())
    with ThreadPoolExecutor(1) as pool:
        rest = queue.next_assignment(0, request(stop=True))
        assert parts([rest]) == [(0, 1)]
        stopping = pool.submit(queue.next_assignment, 1, request())
        sleep(0.05)
        assert not stopping.done()
        assert queue.next_assignment(0, request()).action == "stop"
        assert stopping.result(10).action == "stop"
        assert stopping.result().iteration == 1


def check_all_get(
    queue: AssignmentQueue,
    first: AssignmentRequest,
    last: AssignmentRequest,
    expected: tuple[str, int],
) -> None:
    """Worker 1 requests first and waits for the request of worker 0; both get this action."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.next_assignment, 1, first)
        sleep(0.05)
        assert not waiting.done()
        results = [queue.next_assignment(0, last), waiting.result(10)]
    assert [(result.action, result.iteration) for result in results] == [expected] * 2


def started(parts: int) -> AssignmentQueue:
    """A queue of two workers that have computed parts in turn."""
    queue = AssignmentQueue(workers=2, staleness=None)
    for number in range(parts):
        queue.next_assignment(number % 2, request())
        queue.done(number % 2)
    return queue


def test_finishing_worker_ends_the_run_after_the_others_complete() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    assert parts([queue.next_assignment(0, request()), queue.next_assignment(1, request())]) == [
        (0, 0),
        (0, 1),
    ]
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(queue.next_assignment, 0, request(finish=True))
        sleep(0.05)
        assert not finishing.done()
        assert queue.next_assignment(1, request()).action == "end"
        assert finishing.result(10).action == "end"


def test_reaching_the_target_precedes_a_checkpoint_that_others_wait_for() -> None:
    check_all_get(
        started(4),
        request(checkpoint_every=2),
        request(checkpoint_every=2, finish=True),
        ("end", 2),
    )


def test_reaching_the_target_precedes_a_stop_that_others_wait_for() -> None:
    check_all_get(started(4), request(stop=True), request(finish=True), ("end", 2))


def test_stop_precedes_a_checkpoint_that_others_wait_for() -> None:
    check_all_get(
        started(4), request(checkpoint_every=2), request(checkpoint_every=2, stop=True), ("stop", 2)
    )


def test_the_end_of_the_iterations_precedes_a_stop() -> None:
    check_all_get(started(4), request(total=2), request(total=2, stop=True), ("end", 2))


def test_partial_batch_is_dropped_when_a_worker_finishes() -> None:
    queue = started(5)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(queue.next_assignment, 0, request(finish=True))
        sleep(0.05)
        assert not finishing.done()
        results = [queue.next_assignment(1, request()), finishing.result(10)]
    assert [(result.action, result.iteration, result.part) for result in results] == [
        ("end", 2, 1)
    ] * 2


def test_lost_worker_fails_the_waiting_workers() -> None:
    queue = AssignmentQueue(workers=2, staleness=0)
    queue.next_assignment(0, request())
    queue.next_assignment(1, request())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.next_assignment, 1, request())
        queue.abort()
        with pytest.raises(PeerError):
            waiting.result(10)
