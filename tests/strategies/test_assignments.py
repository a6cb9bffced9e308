"""Parts of batches are assigned once, in order and within the staleness bound."""

from __future__ import annotations

import random

import pytest

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


def granted(
    queue: AssignmentQueue, worker: int, wish: AssignmentRequest | None = None
) -> dict[int, Assignment]:
    """Request an assignment, and return all assignments that this makes possible, by worker."""
    queue.request(worker, wish or request())
    return dict(queue.grant())


def assigned(
    queue: AssignmentQueue, worker: int, wish: AssignmentRequest | None = None
) -> Assignment:
    """Request an assignment that does not have to wait."""
    (assignment,) = granted(queue, worker, wish).values()
    return assignment


def parts(assignments: list[Assignment]) -> list[tuple[int, int]]:
    return [(assignment.iteration, assignment.part) for assignment in assignments]


def test_idle_worker_gets_the_next_part() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    slow = assigned(queue, 0)
    fast = [assigned(queue, 1) for _ in range(4)]
    assert parts([slow, *fast]) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [assignment.ahead for assignment in fast] == [0, 1, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_all_parts_are_assigned_exactly_once_before_the_end(seed: int) -> None:
    """Workers complete their parts in random order."""
    queue, order = AssignmentQueue(workers=3, staleness=1), random.Random(seed)
    busy, assignments, ends = set(range(3)), [], 0
    while busy:
        worker = order.choice(sorted(busy))
        busy.remove(worker)
        for other, assignment in granted(queue, worker, request(total=20)).items():
            if assignment.action == "train":
                busy.add(other)
                assignments.append(assignment)
            else:
                ends += 1
    assert sorted(parts(assignments)) == [(batch, part) for batch in range(20) for part in range(3)]
    assert max(assignment.ahead for assignment in assignments) <= 1
    assert ends == 3


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_bound_limits_the_lead_of_a_worker(staleness: int) -> None:
    """One worker holds the first batch; the other gets parts up to the bound, then waits."""
    queue = AssignmentQueue(workers=2, staleness=staleness)
    assigned(queue, 0)
    allowed = [assigned(queue, 1) for _ in range(2 * staleness + 1)]
    assert allowed[-1].ahead == staleness
    assert granted(queue, 1) == {}
    queue.done(0)
    ((worker, waiting),) = queue.grant()
    assert (worker, waiting.iteration) == (1, staleness + 1)
    assert waiting.waited_seconds > 0


def test_resumed_run_continues_at_its_iteration() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    assert parts([assigned(queue, 0, request(first=7))]) == [(7, 0)]


def test_all_workers_get_a_due_checkpoint_before_the_next_batch() -> None:
    """Each worker gets one part of the batch after all earlier batches are complete."""
    queue, wish = AssignmentQueue(workers=2, staleness=None), request(total=6, checkpoint_every=2)
    calls: list[list[tuple[str, int]]] = [[], []]
    busy = {0, 1}
    while busy:
        # Worker 0 is fast: it requests parts until it has to wait.
        worker = min(busy)
        busy.remove(worker)
        for other, assignment in granted(queue, worker, wish).items():
            calls[other].append((assignment.action, assignment.iteration))
            if assignment.action != "end":
                busy.add(other)
    for mine in calls:
        assert [call for call in mine if call[0] == "checkpoint"] == [
            ("checkpoint", 2),
            ("checkpoint", 4),
        ]


def test_all_workers_stop_after_a_complete_batch() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    assigned(queue, 0)
    assert parts([assigned(queue, 0, request(stop=True))]) == [(0, 1)]
    assert granted(queue, 1) == {}
    results = granted(queue, 0)
    assert {worker: each.action for worker, each in results.items()} == {0: "stop", 1: "stop"}
    assert results[1].iteration == 1


def check_all_get(
    queue: AssignmentQueue,
    first: AssignmentRequest,
    last: AssignmentRequest,
    expected: tuple[str, int],
) -> None:
    """Worker 1 requests first and waits for the request of worker 0; both get this action."""
    assert granted(queue, 1, first) == {}
    results = granted(queue, 0, last)
    assert {worker: (each.action, each.iteration) for worker, each in results.items()} == {
        0: expected,
        1: expected,
    }


def started(parts: int) -> AssignmentQueue:
    """A queue of two workers that have computed parts in turn."""
    queue = AssignmentQueue(workers=2, staleness=None)
    for number in range(parts):
        assigned(queue, number % 2)
        queue.done(number % 2)
    return queue


def test_finishing_worker_ends_the_run_after_the_others_complete() -> None:
    queue = AssignmentQueue(workers=2, staleness=None)
    assert parts([assigned(queue, 0), assigned(queue, 1)]) == [(0, 0), (0, 1)]
    assert granted(queue, 0, request(finish=True)) == {}
    results = granted(queue, 1)
    assert {worker: each.action for worker, each in results.items()} == {0: "end", 1: "end"}


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
    assert granted(queue, 0, request(finish=True)) == {}
    results = granted(queue, 1)
    assert [(each.action, each.iteration, each.part) for each in results.values()] == [
        ("end", 2, 1)
    ] * 2
