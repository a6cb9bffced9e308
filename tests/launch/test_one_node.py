"""`paceline train --nproc-per-node 2` on one machine, when nothing goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.measure.machine import cores_usable
from paceline.measure.startup import STARTUP_PARTS
from paceline.records import read_json, read_lines
from paceline.training.checkpoint import newest_checkpoint
from tests.support.commands import TINY, Command, Ended, launch, names_in

Run = tuple[Path, Ended]


def test_the_command_ends_well(talkative_run: Run) -> None:
    folder, ended = talkative_run
    assert (ended.code, ended.err) == (0, "")
    assert read_json(folder / "result.json")["status"] == "finished"


def test_the_result_has_both_workers_and_their_seconds_add_up(talkative_run: Run) -> None:
    workers = read_json(talkative_run[0] / "result.json")["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert [worker["samples"] for worker in workers] == [12 * 6, 12 * 6]
    for worker in workers:
        assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"], rel=0.01)


def test_each_worker_has_the_parts_of_its_start_up(talkative_run: Run) -> None:
    for worker in read_json(talkative_run[0] / "result.json")["workers"]:
        startup = worker["startup_seconds"]
        assert set(startup) == set(STARTUP_PARTS)
        assert min(startup["rendezvous"], startup["data"], startup["model"]) > 0
        in_wall_time = startup["rendezvous"] + startup["data"] + startup["model"]
        assert in_wall_time < worker["wall_seconds"] - worker["phases"]["forward"]


def test_phases_after_the_first_iteration_are_within_its_time(talkative_run: Run) -> None:
    for worker in read_json(talkative_run[0] / "result.json")["workers"]:
        later = worker["after_first"]
        assert later["iterations"] == 12 - 1
        timed = worker["iteration_seconds"]["mean"] * later["iterations"]
        assert 0 < sum(later["phases"].values()) <= timed * (1 + 1e-6)
        # What waits are moved out of exchange must be those of the same iterations.
        assert min(later["phases"].values()) > -1e-6


@pytest.mark.parametrize("rank", [0, 1])
def test_each_worker_has_its_events(rank: int, talkative_run: Run) -> None:
    events = list(read_lines(talkative_run[0] / f"events-{rank}.jsonl"))
    assert (events[0]["event"], events[-1]["event"]) == ("start", "end")
    assert sum(len(e["seconds"]) for e in events if e["event"] == "iterations") == 12


def test_only_records_and_output_remain(talkative_run: Run) -> None:
    assert names_in(talkative_run[0]) == {
        "config.json", "result.json", "events-0.jsonl", "events-1.jsonl", "resources-0.jsonl",
        "checkpoints", "output-0.txt", "output-1.txt",
    }  # fmt: skip


def test_only_the_first_worker_is_seen(talkative_run: Run) -> None:
    folder, ended = talkative_run
    assert "hello from 0" in ended.out
    assert "hello from 1" not in ended.out
    assert ended.out.count("test loss") == 1
    assert (folder / "output-0.txt").read_text() == "a warning of 0\n"
    # Which of the two streams is flushed first is Python's affair.
    lines = (folder / "output-1.txt").read_text().splitlines()
    assert sorted(lines) == ["a warning of 1", "hello from 1"]


def test_the_cores_are_shared_out_among_the_workers(talkative_run: Run) -> None:
    notes = [talkative_run[0].parent / f"threads-{rank}" for rank in (0, 1)]
    fair = max(1, cores_usable() // 2)
    assert [int(note.read_text()) for note in notes] == [fair, fair]


def test_two_workers_learn_what_one_learns(talkative_run: Run, tmp_path: Path) -> None:
    launch(tmp_path, strategy="single", checkpoint_every=12)
    one = newest_checkpoint(tmp_path / "run" / "checkpoints")
    two = newest_checkpoint(talkative_run[0] / "checkpoints")
    assert one is not None
    assert two is not None
    for name, weights in one.state["model"].items():
        torch.testing.assert_close(two.state["model"][name], weights, rtol=1e-5, atol=1e-6)


def test_a_plain_script_gets_the_result_of_two_workers(tmp_path: Path) -> None:
    """Without the `__main__` guard that multiprocessing needs: the script is not imported again."""
    settings = {**TINY, "nproc_per_node": 2, "out": str(tmp_path), "name": "run"}
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, paceline\n"
        f"result = paceline.train(**json.loads({json.dumps(settings)!r}))\n"
        'sys.stdout.write(json.dumps([result["status"], len(result["workers"])]))\n'
    )
    with Command([str(script)]) as command:
        ended = command.end()
    assert json.loads(ended.out) == ["finished", 2]


def test_torchrun_starts_the_workers_as_well(tmp_path: Path, talkative_run: Run) -> None:
    words = ["--data", "user_code:data", "--model", "user_code:Plain", "--strategy", "allreduce",
             "--batch-size", "12", "--iterations", "12", "--no-tensorboard", "--quiet",
             "--out", str(tmp_path), "--name", "run"]  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Command([*torchrun, "-m", "paceline", "train", *words]) as command:
        ended = command.end()
    assert ended.code == 0, ended.err
    assert names_in(tmp_path / "run") == {
        "config.json", "result.json", "events-0.jsonl", "events-1.jsonl", "resources-0.jsonl",
        "checkpoints",
    }  # fmt: skip
    result, ours = (
        read_json(path / "result.json") for path in (tmp_path / "run", talkative_run[0])
    )
    assert len(result["workers"]) == 2
    assert result["weights_sha256"] == ours["weights_sha256"]
