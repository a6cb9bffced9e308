"""Whatever befalls the workers of one machine: a quick end, one cause, no traces but the records.

tests/support/leaks.py checks after every test that no process, shared memory or socket is left.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from paceline import cli
from paceline.config import from_mapping
from paceline.errors import RunError, StoppedError
from paceline.launch.node import NodeCoordinator, supervise
from paceline.launch.node_workers import NodeWorkers
from paceline.launch.record_collection import parse_report, write_report
from paceline.launch.result import RunOutcome
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import FailureBoard, Termination, write_failure
from paceline.records import RunFolder, read_json
from tests.launch.test_reports import report_of
from tests.support.commands import (
    ENDLESS,
    SLOW,
    TINY,
    are_gone,
    launch,
    names_in,
    sabotage,
    train,
    wait_until,
    workers_of,
)

TWO: dict[str, Any] = {**ENDLESS, "nproc_per_node": 2}
PASSING = ("launch-", "report-", "failure-")
"""Prefixes of files that exist only during a run."""


def check_failed(outcome: RunOutcome, cause: str, gone: tuple[str, ...]) -> None:
    assert outcome.exit_code == 1
    result = read_json(outcome.folder.result_file)
    assert result == outcome.result
    assert (result["status"], result["cause"]) == ("failed", cause)
    assert not [name for name in names_in(outcome.folder.path) if name.startswith(gone)]


@pytest.mark.parametrize("while_training", [False, True], ids=["at its start", "in training"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_the_run(
    rank: int, while_training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.01")
    with sabotage(tmp_path / "run", rank, signal.SIGKILL, while_training):
        outcome = launch(tmp_path, **TWO)
    # Gloo complains to the file of output of a peer that is killed while it connects.
    expected = ("output-",) if while_training else ()
    check_failed(outcome, f"rank {rank} was killed by SIGKILL", PASSING + expected)
    assert outcome.result is not None
    assert outcome.result["is_loss"], "another attempt may survive"


def test_a_worker_that_raises_ends_the_run_with_one_line(tmp_path: Path) -> None:
    with train(tmp_path, **{**TWO, "model": "user_code:Breaking"}) as command:
        ended = command.end()
    traceback = tmp_path / "run" / "traceback.txt"
    cause = f"ValueError: the model broke (traceback in {traceback})"
    assert (ended.code, ended.err) == (1, f"paceline: error: {cause}\n")
    assert "in forward" in traceback.read_text()
    result = read_json(tmp_path / "run" / "result.json")
    assert (result["status"], result["cause"]) == ("failed", cause)


def test_a_worker_that_stalls_ends_the_run(tmp_path: Path) -> None:
    with sabotage(tmp_path / "run", 1, signal.SIGSTOP, while_training=True):
        outcome = launch(tmp_path, **{**TWO, "timeout_seconds": 5})
    silent = "rank 0: all_reduce with rank 1: no response within the timeout of 5 s"
    busy = f"{silent}; rank 1 was still busy"
    check_failed(outcome, busy, (*PASSING, "output-"))


@pytest.mark.parametrize(
    ("at_start", "more"),
    [(True, {}), (False, {}), (False, {"elastic": "1:1", "checkpoint_every": 1000})],
)
def test_workers_end_with_their_launcher(
    at_start: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    with train(tmp_path, SLOW, **TWO, **more) as command:
        launcher = command.process
        wait_until(lambda: len(workers_of(launcher.pid)) == 2, "both workers run")
        workers = list(workers_of(launcher.pid).values())
        events = tmp_path / "run" / "events-1.jsonl"
        wait_until(lambda: at_start or events.exists(), "the run has begun")
        launcher.kill()
        wait_until(lambda: are_gone(workers), "the workers are gone")


def test_ctrl_c_at_the_start_leaves_nothing(tmp_path: Path) -> None:
    with train(tmp_path, **TWO) as command:
        wait_until(lambda: len(workers_of(command.process.pid)) == 2, "both workers run")
        command.process.send_signal(signal.SIGINT)
        ended = command.end()
    line = "paceline: stopped by SIGINT before training began\n"
    assert (ended.code, ended.err) == (130, line)
    assert not names_in(tmp_path)


def test_ctrl_c_does_not_wait_for_a_worker_that_waits_for_a_stopped_one(tmp_path: Path) -> None:
    """Deep in the library that connects them, where it would hear no signal for a long time."""
    config = from_mapping({**TINY, "out": str(tmp_path), "name": "run", "nproc_per_node": 2})
    folder, signals = RunFolder.create(config), SignalMonitor()
    workers = NodeWorkers(config, folder, port=0, resumed=False, quiet=True)
    line = "stopped by SIGINT before training began"
    write_failure(folder, 0, Termination(line, StoppedError.exit_code, "stopped"))
    processes = workers._processes._processes
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(80)"
    for rank, program in enumerate(["raise SystemExit(130)", deaf]):
        processes[rank] = subprocess.Popen([sys.executable, "-I", "-S", "-c", program])
    processes[0].wait()
    signals.received.append(signal.SIGINT)
    termination = supervise(workers, NodeCoordinator(from_mapping({})), signals)
    assert processes[1].poll() == -signal.SIGKILL
    assert termination is not None
    assert (termination.cause, termination.exit_code) == (line, 130)


def test_the_worker_that_was_killed_first_is_named(tmp_path: Path) -> None:
    config = from_mapping({**TINY, "out": str(tmp_path), "name": "run", "nproc_per_node": 2})
    workers = NodeWorkers(config, RunFolder.create(config), port=0, resumed=False, quiet=True)
    for rank in range(2):
        workers._processes._processes[rank] = subprocess.Popen(["sleep", "80"])
    for rank in (1, 0):
        workers._processes._processes[rank].kill()
        workers._processes._processes[rank].wait()
        codes = workers.codes()
    termination = workers.termination(codes, SignalMonitor())
    assert termination is not None
    assert termination.cause == "rank 1 was killed by SIGKILL"


def test_only_reports_of_this_node_get_an_order_in_a_shared_folder(tmp_path: Path) -> None:
    """Those of other nodes have no order here, and clocks differ."""

    values = {**TINY, "out": str(tmp_path), "name": "run", "nnodes": 2, "node_rank": 1}
    config = from_mapping(values)
    folder = RunFolder.create(config)
    store = HashStore()
    board = FailureBoard(lambda action: action(store))
    workers = NodeWorkers(config, folder, port=0, resumed=False, quiet=True, board=board)
    workers._processes._processes[1] = subprocess.Popen(["false"])
    workers._processes._processes[1].wait()
    for rank, ended in enumerate([1.0, 2.0]):
        message = {**report_of(rank), "status": "failed", "exit_code": 1, "ended": ended}
        write_report(
            folder, rank, parse_report({**message, "cause": f"rank {rank} failed"}, "report", rank)
        )
    termination = workers.termination(workers.codes(), SignalMonitor())
    assert termination is not None
    assert (termination.cause, termination.order) == ("rank 1 failed", 1)


def test_a_process_that_cannot_be_started_is_no_write_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    config = from_mapping({**TINY, "out": str(tmp_path), "name": "run", "nproc_per_node": 2})
    workers = NodeWorkers(config, RunFolder.create(config), port=0, resumed=False, quiet=True)
    monkeypatch.setattr("paceline.launch.processes.start_python", start)
    line = "cannot start a worker process: Resource temporarily unavailable"
    with pytest.raises(RunError, match=f"^{line}$"), workers:
        pass


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "resnet"], "unknown model 'resnet': did you mean"),
        (["--model", "user_code:Absent"], "module user_code has no Absent"),
        (["--data", "minst"], "unknown data 'minst': did you mean"),
        (["-o", "bucket=3"], "-o bucket: strategy allreduce has no such option"),
        (["--strategy", "single"], "--strategy single: trains 1 worker, not 2"),
        (["--data", "mnist", "--data-dir", "nowhere"], "fetch it with `paceline data fetch mnist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_mend_is_one_line(
    words: list[str], expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_refused(words, expected, tmp_path, capfd)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--strategy parameter_server --precision fp16", "--precision fp16: not supported by"),
        (
            "--strategy parameter_server -o mode=async --sync-bn",
            "--sync-bn: not supported with",
        ),
        (
            "--strategy parameter_server -o mode=bounded --sync-bn",
            "--sync-bn: not supported with",
        ),
        ("--strategy local_sgd --precision fp16", "--precision fp16: not supported by"),
        ("--strategy fsdp --compile", "--compile: not supported by"),
        ("--strategy ddp --communicator hierarchical", "strategy ddp requires torch"),
        ("--strategy fsdp --communicator hierarchical", "strategy fsdp requires torch"),
    ],
)
def test_unsupported_settings_are_rejected_before_any_process_starts(
    words: str,
    expected: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen.__init__", start)
    check_refused(words.split(), expected, tmp_path, capfd)


def check_refused(
    words: list[str], expected: str, out_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--strategy", "allreduce", "--nproc-per-node", "2", "--out", str(out_folder)]
    assert cli.main(["train", *fixed, *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("paceline: error: ")
    assert expected in err
    assert err.count("\n") == 1
    assert not names_in(out_folder)
