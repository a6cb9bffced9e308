"""A program that runs PyTorch's own tests of torch.distributed on a backend of our choice.

    WORLD_SIZE=2 python -m torch_distributed_tests paceline results.json [NAME ...]

The tests are part of the torch package. They choose what to skip by the environment variable
BACKEND, so that is gloo here whichever backend they run on. Each rank of each test is a fork of
this process, which has imported everything and computed nothing.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ALWAYS_SKIPPED = {
    "skip_if_lt_x_gpu": "there is no GPU here",
    "skip_if_no_gpu": "there is no GPU here",
    "skip_if_small_worldsize": "needs eight ranks",
}
"""PyTorch's decorators whose tests end in every rank before they begin: their processes need not be
started."""
FEWEST_RANKS_OF_LARGE = 8

POLL_SECONDS = 0.005
"""Instead of PyTorch's 0.1, which is most of the time that its tests take."""
BARRIER_SECONDS = 60
TEST_SECONDS = 90


def run(backend: str, results: Path, names: Sequence[str]) -> None:
    """Run the tests named, by default all of them, and write `{name: [outcome, reason]}` as JSON.

    Outcomes: `passed`, `failed`, `skipped` (whichever the backend), `left` (skipped by a rank).
    """
    assert int(os.environ["WORLD_SIZE"]) < FEWEST_RANKS_OF_LARGE
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "BACKEND": "gloo",
            "CUDA_VISIBLE_DEVICES": "",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS),
            "GLOO_SOCKET_IFNAME": "lo",
            "INIT_METHOD": f"file://{folder}/store",
        }
        tempfile.tempdir = folder  # they leave files behind
        cases = _cases(backend)
        outcomes = {name: _outcome(cases(name)) for name in names or _names(cases)}
    results.write_text(json.dumps(outcomes))


def _names(cases: type[unittest.TestCase]) -> list[str]:
    return unittest.TestLoader().getTestCaseNames(cases)  # type: ignore[return-value]


def _cases(backend: str) -> type[unittest.TestCase]:
    import torch
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed import distributed_test

    import paceline.torch_backend.process_group  # noqa: F401 - so that forks need not import it

    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    initialize, monitored_barrier = (
        distributed_c10d.init_process_group,
        distributed_c10d.monitored_barrier,
    )

    def initialize_chosen(*call: Any, **named: Any) -> None:
        assert named["backend"] == "gloo"
        initialize(*call, **{**named, "backend": backend})

    def monitored_barrier_of_any(*call: Any, **named: Any) -> None:
        """PyTorch's function refuses every backend but the one named gloo; groups do not."""
        with mock.patch.object(distributed_c10d, "get_backend", return_value="gloo"):
            monitored_barrier(*call, **named)

    torch.distributed.init_process_group = initialize_chosen
    torch.distributed.monitored_barrier = monitored_barrier_of_any

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(multiprocessing.get_context("fork").Process)

        def _barrier(self, wait_for: int | None = None, timeout: float = 0) -> None:
            with _quick_polling():
                seconds = max(timeout, BARRIER_SECONDS)
                super()._barrier(wait_for, seconds)  # type: ignore[no-untyped-call]

        def _join_processes(self, function: Callable[[], None]) -> None:
            with _quick_polling():
                super()._join_processes(function)

    return Cases


@contextmanager
def _quick_polling() -> Iterator[None]:
    sleep = time.sleep

    def sleep_less(_: float) -> None:
        sleep(POLL_SECONDS)

    with mock.patch.object(time, "sleep", sleep_less):
        yield


def _outcome(case: Any) -> tuple[str, str]:
    for decorator in _decorators(getattr(type(case), case._testMethodName)):
        if decorator in ALWAYS_SKIPPED:
            return "skipped", ALWAYS_SKIPPED[decorator]
    result = unittest.TestResult()
    unittest.TestSuite([case]).run(result)
    for _, text in [*result.errors, *result.failures]:
        return "failed", text
    for _, reason in result.skipped:
        return "left" if hasattr(case, "pid_to_pipe") else "skipped", reason
    return "passed", ""


def _decorators(function: Any) -> Iterator[str]:
    """The names of those that a test was made with."""
    while function is not None:
        yield function.__code__.co_qualname.partition(".")[0]
        function = getattr(function, "__wrapped__", None)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
