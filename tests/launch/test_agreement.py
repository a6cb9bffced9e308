"""Errors before training are raised on all ranks; the root cause is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.config import from_mapping
from paceline.errors import LONGEST_LINE, DataError, RunError, StoppedError, UsageError
from paceline.launch.consistency import NODE_FIELDS, agree_on_config, run_collectively
from paceline.launch.termination import Termination, root_cause


def refusals(workers: int, work: Callable[[Communicator], object]) -> list[str]:
    """The error of each worker, if any."""

    def one(communicator: Communicator) -> str:
        try:
            work(communicator)
        except UsageError as error:
            return str(error)
        return ""

    return in_process.run(workers, one)


def test_different_settings_are_rejected_on_all_ranks_with_their_name() -> None:
    def work(communicator: Communicator) -> None:
        lr = 0.2 if communicator.rank == 2 else 0.1
        agree_on_config(from_mapping({"lr": lr, "nproc_per_node": 3}), communicator)

    line = "--lr: rank 2 was started with 0.2, rank 0 with 0.1: use the same value for all"
    assert refusals(3, work) == [line] * 3


def test_what_belongs_to_one_machine_may_differ() -> None:
    values = {"node_rank": (0, 1), "out": ("a", "b"), "name": ("c", "d"), "data_dir": ("e", "f"),
              "threads": (1, 2)}  # fmt: skip
    assert set(values) == set(NODE_FIELDS)

    def work(communicator: Communicator) -> None:
        own = {name: pair[communicator.rank] for name, pair in values.items()}
        agree_on_config(from_mapping({**own, "nnodes": 2}), communicator)

    assert refusals(2, work) == ["", ""]


def test_a_usage_error_on_one_rank_is_raised_on_all() -> None:
    def work(communicator: Communicator) -> None:
        def load() -> None:
            if communicator.rank == 1:
                raise DataError("the disk of rank 1 is empty")

        run_collectively(communicator, load)

    assert refusals(3, work) == ["the disk of rank 1 is empty"] * 3


def test_each_rank_keeps_its_own_result_if_all_succeed() -> None:
    def work(communicator: Communicator) -> int:
        return run_collectively(communicator, lambda: communicator.rank * 10)

    assert in_process.run(3, work) == [0, 10, 20]


def test_an_echo_is_never_the_first_cause_though_it_came_first() -> None:
    echo = Termination("the connection was closed", is_secondary=True, ended=1.0)
    late, later = Termination("out of memory", ended=2.0), Termination("killed", ended=3.0)
    assert root_cause([later, echo, late]) == late
    assert root_cause([echo]) == echo
    assert root_cause([]) is None


def test_a_failure_of_unknown_order_is_not_the_root_cause() -> None:
    uncounted = Termination("noticed while the store was gone", ended=1.0)
    later = Termination("the second failure", ended=2.0, order=2)
    first = Termination("the first failure", ended=3.0, order=1)
    assert root_cause([uncounted, later, first]) == first
    assert root_cause([uncounted, later]) == later
    assert root_cause([uncounted]) == uncounted


@pytest.mark.parametrize(("code", "lines"), [(1, 1), (2, 20), (130, 1)])
def test_an_ending_of_another_process_has_a_bounded_number_of_lines(code: int, lines: int) -> None:
    message = dataclasses.asdict(Termination("line\n" * 500_000, code))
    error = Termination.of_message(message, "termination").error()
    assert len(str(error).splitlines()) == lines
    assert len(str(error)) <= LONGEST_LINE


@pytest.mark.parametrize(("code", "kind"), [(1, RunError), (2, UsageError), (130, StoppedError)])
def test_an_ending_keeps_its_exit_code_as_an_error(code: int, kind: type[Exception]) -> None:
    error = Termination("why", code).error()
    assert isinstance(error, kind)
    assert (str(error), error.exit_code) == ("why", code)
