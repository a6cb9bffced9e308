"""Elastic runs survive killed workers and nodes, and compute what uninterrupted runs compute.

Several commands on this machine stand for nodes. That no process, shared memory or socket is left
is checked after every test (tests/support/leaks.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from paceline import cli
from paceline.launch import launcher
from paceline.records import Result, RunFolder, read_json, read_lines
from paceline.training.checkpoint import iterations
from tests.support.commands import (
    Command,
    Ended,
    alongside,
    are_gone,
    free_port,
    is_training,
    launch,
    node,
    wait_until,
    warm_commands,
    workers_of,
)
from tests.support.warm import PrewarmedStarter

pytestmark = pytest.mark.timeout(300)

SAMPLES, BATCH = 96, 12
"""Of user_code.data, and of TINY."""
ITERATIONS = 600
LOST = "node 1 lost (no heartbeat for 6 s)"
SETTINGS: dict[str, Any] = {
    "model": "user_code:Recording",
    "iterations": ITERATIONS,
    "eval_every": 100,
    "checkpoint_every": 10,
    "checkpoint_keep": 3,
    "threads": 1,
}


@dataclass(frozen=True)
class Story:
    """An elastic run of which a worker was killed, then a node, which came back later."""

    result: Result
    ends: dict[str, Ended]
    notes: Path
    folder: Path
    undisturbed: Path


def newest(folder: Path) -> int:
    return next(iter(iterations(folder / "checkpoints")), 0)


def await_progress(folder: Path) -> None:
    """Wait for new checkpoints."""
    before = newest(folder)
    wait_until(lambda: newest(folder) >= before + 11, "the run goes on")


def kill_node(command: Command) -> None:
    """As a power failure does."""
    processes = [psutil.Process(command.process.pid), *workers_of(command.process.pid).values()]
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, starter: PrewarmedStarter) -> Iterator[Story]:
    base = tmp_path_factory.mktemp("story")
    with warm_commands(starter) as patch, contextlib.ExitStack() as stack:
        patch.setenv("OWN_NOTES", str(base))
        undisturbed = launch(base / "alone", **{**SETTINGS, "strategy": "single"}).folder.path
        for note in ("slow", "record"):
            (base / note).touch()
        folder, port = base / "out" / "run", free_port()

        def begin(out: str) -> Command:
            return stack.enter_context(
                node(base / out, 0, port, elastic="1:2", max_restarts=2, **SETTINGS)
            )

        # Each of them has its own disk.
        first = begin("out")
        wait_until(lambda: newest(folder) > 0, "the first node trains")
        second = begin("second")
        wait_until(lambda: is_training(base / "second" / "run", [1]), "the second trains as well")
        await_progress(folder)
        next(iter(workers_of(second.process.pid).values())).kill()
        await_progress(folder)
        kill_node(second)
        await_progress(folder)
        again = begin("second")
        wait_until(lambda: workers_of(again.process.pid), "the second node has joined")
        await_progress(folder)
        (base / "slow").unlink()
        ends = {"first": first.end(), "second": again.end()}
        result = RunFolder(folder).read_result() or {}
        yield Story(result, ends, base, folder, undisturbed)


def test_all_nodes_that_are_left_finish(story: Story) -> None:
    assert {name: end.code for name, end in story.ends.items()} == dict.fromkeys(story.ends, 0)
    assert (story.result["status"], story.result["iterations"]) == ("finished", ITERATIONS)
    assert story.result["samples"] == ITERATIONS * BATCH


def test_each_restart_is_one_line_on_the_first_node(story: Story) -> None:
    worlds = story.result["worlds"]
    begins = [f"from iteration {world['iteration']}" for world in worlds]
    assert story.ends["first"].err.splitlines() == [
        f"paceline: a node joined: resuming {begins[1]} with 2 workers",
        "paceline: worker lost on node 1 (rank 1 was killed by SIGKILL): restart 1 of 2"
        f" {begins[2]} with 2 workers",
        f"paceline: {LOST}: restart 2 of 2 {begins[3]} with 1 worker",
        f"paceline: a node joined: resuming {begins[4]} with 2 workers",
    ]
    assert story.ends["second"].err == ""


def test_the_result_lists_the_worlds(story: Story) -> None:
    worlds = story.result["worlds"]
    causes = [restart["cause"] for restart in story.result["restarts"]]
    assert causes == ["worker lost on node 1 (rank 1 was killed by SIGKILL)", LOST]
    assert [world["workers"] for world in worlds] == [1, 2, 2, 1, 2]
    assert len(story.result["workers"]) == story.result["config"]["nnodes"] == 2
    assert all(one["iteration"] < other["iteration"] for one, other in pairwise(worlds))
    assert all(one["seconds"] < other["seconds"] for one, other in pairwise(worlds))


def test_records_are_kept_and_gathered(story: Story) -> None:
    begun = {
        rank: [
            event["iteration"]
            for event in read_lines(story.folder / f"events-{rank}.jsonl")
            if event["event"] == "start"
        ]
        for rank in range(2)
    }
    begins = [world["iteration"] for world in story.result["worlds"]]
    # What the second node wrote before it was lost was on its own disk, where it still is.
    assert begun == {0: begins, 1: [begins[1], begins[2], begins[4]]}
    names = {path.name for path in story.folder.iterdir()}
    assert not [name for name in names if name.startswith(("launch-", "report-", "failure-"))]


def test_every_epoch_has_each_sample_once(story: Story) -> None:
    """Counted are the iterations of each attempt that the next one went on from."""
    begins = [*(world["iteration"] for world in story.result["worlds"]), ITERATIONS]
    batches: list[list[str]] = []
    for attempt, (begin, end) in enumerate(pairwise(begins)):
        files = story.notes.glob(f"seen-{attempt}-*")
        parts = [file.read_text().splitlines()[: end - begin] for file in files]
        batches += [" ".join(lines).split() for lines in zip(*parts, strict=True)]
    assert [len(batch) for batch in batches] == [BATCH] * ITERATIONS
    per_epoch = SAMPLES // BATCH
    epochs: list[set[str]] = [
        set().union(*batches[begin : begin + per_epoch])
        for begin in range(0, ITERATIONS, per_epoch)
    ]
    assert all(len(epoch) == SAMPLES for epoch in epochs)
    assert all(epoch == epochs[0] for epoch in epochs)


def test_the_weights_are_those_of_an_uninterrupted_run(story: Story) -> None:
    begin, end = weights(story.undisturbed, 0), weights(story.undisturbed, -1)
    assert distance(begin, end) > 1e-4, "the last iterations change too little to tell"
    assert distance(weights(story.folder, -1), end) < 1e-5


def weights(folder: Path, which: int) -> Tensor:
    """At the oldest (0) or the newest (-1) checkpoint that is kept."""
    chosen = sorted((folder / "checkpoints").glob("*.pt"))[which]
    state = torch.load(chosen, weights_only=True)["model"]
    return torch.cat([weight.flatten() for weight in state.values()])


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_restarted_workers_have_the_weights_of_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node, two workers, of which the first is killed in the middle."""
    monkeypatch.setenv("OWN_NOTES", str(tmp_path))
    settings = {**SETTINGS, "iterations": 100, "nproc_per_node": 2}
    undisturbed = launch(tmp_path / "undisturbed", **settings).result
    for note in ("slow", "record"):
        (tmp_path / note).touch()

    def strike() -> None:
        wait_until(lambda: newest(tmp_path / "run") >= 20, "there are checkpoints")
        workers_of(os.getpid())[0].kill()
        (tmp_path / "slow").unlink()

    with alongside(strike):
        result = launch(tmp_path, elastic="1:1", **settings).result
    assert undisturbed is not None
    assert result is not None
    assert (result["status"], len(result["restarts"]), result["samples"]) == ("finished", 1, 1200)
    assert result["weights_sha256"] == undisturbed["weights_sha256"]


def test_the_root_cause_is_reported_when_no_restarts_are_left(tmp_path: Path) -> None:
    settings = {"model": "user_code:Breaking", "nproc_per_node": 2, "checkpoint_every": 2}
    outcome = launch(tmp_path, elastic="1:1", max_restarts=1, **settings)
    traceback = f"traceback in {tmp_path / 'run' / 'traceback.txt'}"
    lost = f"worker lost on node 0 (ValueError: the model broke ({traceback}))"
    assert outcome.exit_code == 1
    result = read_json(tmp_path / "run" / "result.json")
    assert (result["status"], len(result["restarts"])) == ("failed", 1)
    assert result["cause"] == f"{lost} (--max-restarts 1 are used up)"
    begun = [world["iteration"] for world in result["worlds"]]
    assert begun == [0, 4], "the fifth pass of an attempt fails, and every second is kept"
    assert result["iterations"] == 4 + 4, "of the attempts, up to the pass that fails"


def test_the_loss_of_the_first_node_ends_the_others_and_can_be_resumed(
    tmp_path: Path,
) -> None:
    port = free_port()
    settings = {**SETTINGS, "model": "user_code:Slow", "iterations": 100_000, "elastic": "1:2"}
    with contextlib.ExitStack() as stack:
        variables = {"OWN_SLEEP_SECONDS": "0.05"}
        first = stack.enter_context(node(tmp_path, 0, port, variables, **settings))
        wait_until(lambda: (tmp_path / "run").exists(), "the first node leads")
        second = stack.enter_context(node(tmp_path, 0, port, variables, **settings))
        wait_until(lambda: is_training(tmp_path / "run"), "two workers train")
        wait_until(lambda: newest(tmp_path / "run") > 0, "there is a checkpoint")
        workers = list(workers_of(second.process.pid).values())
        kill_node(first)
        ended = second.end()
        assert are_gone(workers)
    lost = f"paceline: error: lost contact with the first node at 127.0.0.1:{port}, and the run"
    assert (ended.code, ended.err) == (1, f"{lost} {WITHOUT_IT}\n")
    more = {"elastic": "1:1", "iterations": newest(tmp_path / "run") + 10}
    result = launcher.resume(str(tmp_path / "run"), more, quiet=True).result
    assert result is not None
    assert (result["status"], result["iterations"]) == ("finished", more["iterations"])


WITHOUT_IT = "cannot continue without it: restart it with --resume, and the others as before"


def test_ctrl_c_on_one_node_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    port = free_port()
    settings = {**SETTINGS, "model": "user_code:Slow", "iterations": 100_000, "elastic": "2:2"}
    settings |= {"checkpoint_every": 100_000}
    with contextlib.ExitStack() as stack:
        variables = {"OWN_SLEEP_SECONDS": "0.05"}
        first, second = (
            stack.enter_context(node(tmp_path, 0, port, variables, **settings)) for _ in range(2)
        )
        wait_until(lambda: is_training(tmp_path / "run"), "two workers train")
        second.process.send_signal(signal.SIGINT)
        codes = {first.end().code, second.end().code}
    result = read_json(tmp_path / "run" / "result.json")
    assert codes == {130}
    assert (result["status"], result["restarts"]) == ("stopped", [])
    assert result["cause"] == f"stopped by SIGINT after iteration {result['iterations']}"
    assert newest(tmp_path / "run") == result["iterations"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--batch-per-worker 4 --checkpoint-every 5", "--batch-per-worker: an elastic run keeps"),
        ("--batch-size 12", "add --checkpoint-every, such as --checkpoint-every 50"),
        ("--batch-size 3 --checkpoint-every 5", "--batch-size: must be at least 4"),
        ("--batch-size 8 --checkpoint-every 5 --shares 1", "--shares: numbers need a fixed"),
        ("--batch-size 8 --checkpoint-every 5 --slow 0=2", "--slow: ranks change"),
        ("--batch-size 8 --checkpoint-every 5 --strategy single", "--strategy single: trains 1"),
        ("--checkpoint-every 5 --strategy parameter_server", "its servers need a fixed set"),
        ("--checkpoint-every 5 --strategy fsdp --compile", "--compile: not supported by strategy"),
        ("--checkpoint-every 5 --elastic 3:2", "--elastic: must be min:max such as 2:4"),
    ],
)
def test_settings_that_cannot_be_elastic_are_rejected_in_one_line(
    words: str, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--elastic", "2:4", "--strategy", "allreduce", "--out", str(tmp_path)]
    assert cli.main(["train", *fixed, *words.split()]) == 2
    _, err = capfd.readouterr()
    assert expected in err
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())
