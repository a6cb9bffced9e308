"""The profile of scripts that know nothing of paceline: right steps and phases, same results."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.trace import read_step
from paceline.cli import main
from paceline.records import read_json
from paceline.report.build import write_report
from tests.support.perfetto import trace_processor

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
TRAINING = ("forward", "backward", "exchange", "wait", "update")
"""Phases that the DDP example enters only in steps, once it has begun the second one."""


@contextmanager
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def profile(out: Path, *command: str, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """The result of an example, which exits with 0 and gets a page."""
    words = ["profile", "--quiet", "--out", str(out), "--name", "run", *flags, "--", *command]
    with one_thread():
        assert main(words) == 0
    assert "forward" in write_report(out / "run").page.read_text()
    result = read_json(out / "run" / "result.json")
    assert (result["kind"], result["status"], result["warnings"]) == ("profile", "finished", [])
    assert [worker["rank"] for worker in result["workers"]] == [0, 1]
    for worker in result["workers"]:
        assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"], rel=0.01)
        for phase in ("input", "forward", "backward", "exchange", "update", "evaluate"):
            assert worker["phases"][phase] > 0, phase
    return result


def phase_seconds(trace: dict[str, Any], since: float = 0.0) -> Counter[str]:
    """By phase, the time of a rank's trace from a time in microseconds."""
    seconds: Counter[str] = Counter()
    for event in trace["traceEvents"]:
        if event.get("cat") == "phase" and event["ts"] >= since:
            seconds[event["name"]] += event["dur"] / 1e6
    return seconds


def ddp_command(folder: Path) -> list[str]:
    folder.mkdir()
    return [*TORCHRUN, str(EXAMPLES / "plain_ddp.py"), "--checkpoint", str(folder / "weights.pt")]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a profile of the DDP example, with its trace."""
    out = tmp_path_factory.mktemp("ddp")
    profile(out, *ddp_command(out / "saved"), flags=("--trace",))
    return out / "run"


def test_steps_samples_and_bytes_of_a_ddp_script_are_counted(traced: Path) -> None:
    result = read_json(traced / "result.json")
    # 2048 samples in batches of 32 for each of two workers, twice.
    assert result["iterations"] == 64
    assert [worker["samples"] for worker in result["workers"]] == [2048, 2048]
    saves, no_saves = (worker["phases"]["checkpoint"] for worker in result["workers"])
    assert saves > 0 == no_saves
    assert result["checkpoints"]["count"] == 2
    parameters = 8 * 10 + 16 * 73 + 128 * 1025 + 4 * 129
    for worker in result["workers"]:
        # Two ranks of a ring send half of the gradients twice.
        assert worker["traffic"]["gradients"]["bytes_sent"] == 64 * parameters * 4


def test_ddp_script_saves_the_same_file_without_the_profiler(traced: Path, tmp_path: Path) -> None:
    with one_thread():
        subprocess.run(ddp_command(tmp_path / "saved"), check=True, timeout=100)
    alone = (tmp_path / "saved" / "weights.pt").read_bytes()
    assert (traced.parent / "saved" / "weights.pt").read_bytes() == alone


def test_trace_adds_up_to_the_phases_of_training(traced: Path) -> None:
    workers = read_json(traced / "result.json")["workers"]
    for worker in workers:
        trace = read_json(traced / f"trace-{worker['rank']}.json")
        assert [each["iteration"] for each in trace["iterations"]] == list(range(64))
        first = trace["iterations"][0]
        seconds = phase_seconds(trace, first["ts"] + first["dur"])
        for phase in TRAINING:
            # The result is rounded.
            expected = worker["after_first"]["phases"][phase]
            assert seconds[phase] == pytest.approx(expected, abs=1e-4), phase
        reductions = [each for each in trace["traceEvents"] if each["name"] == "all_reduce"]
        in_steps = worker["traffic"]["gradients"]["bytes_sent"]
        kinds = [each for each in reductions if each["args"]["kind"] == "gradients"]
        assert sum(each["args"]["bytes_sent"] for each in kinds) == in_steps
    step = read_step(traced / "trace-1.json", 10)
    assert step is not None
    assert step.transfers


@pytest.mark.browser
@pytest.mark.perfetto
@pytest.mark.timeout(300)
def test_perfetto_reads_all_ranks_on_one_clock(traced: Path, tmp_path: Path) -> None:
    slices = (
        " from slice join thread_track on slice.track_id = thread_track.id"
        " join thread using (utid) join process using (upid)"
    )
    with trace_processor(traced / "trace.json", tmp_path / "profile") as query:
        lost = query("select name from stats where severity in ('error', 'data_loss') and value")
        phases = query(
            f"select process.name, slice.name, sum(dur) / 1e9 {slices}"
            " where thread.name = 'phases' group by 1, 2"
        )
        steps = query(
            f"select count(*), max(slice.ts) < min(slice.ts + slice.dur) {slices}"
            " where thread.name = 'steps' group by slice.name"
        )
    assert lost == []
    # No rank ends a synchronous step before every rank has begun it.
    assert steps == [[2, 1]] * 64
    for rank in range(2):
        seconds = {str(row[1]): float(row[2]) for row in phases if row[0] == f"rank {rank}"}
        trace = read_json(traced / f"trace-{rank}.json")
        assert seconds == pytest.approx(phase_seconds(trace), abs=1e-8)


@pytest.mark.accelerate
def test_accumulated_steps_of_an_accelerate_script_are_counted_once(tmp_path: Path) -> None:
    result = profile(tmp_path, *LAUNCH, str(EXAMPLES / "plain_accelerate.py"))
    # 4096 samples in batches of 32 for each of two workers, two batches to a step, twice.
    assert result["iterations"] == 64
    assert [worker["samples"] for worker in result["workers"]] == [4096, 4096]


@pytest.mark.lightning
def test_workers_that_lightning_starts_are_profiled(tmp_path: Path) -> None:
    script = str(EXAMPLES / "plain_lightning.py")
    result = profile(tmp_path, sys.executable, script, "--root", str(tmp_path / "logs"))
    # 4096 samples in batches of 64 for each of two workers, twice.
    assert result["iterations"] == 64
    assert [worker["samples"] for worker in result["workers"]] == [4096, 4096]
    assert result["checkpoints"]["count"] == 2
