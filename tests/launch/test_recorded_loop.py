"""The run folder of a user's own loop, alone, with two workers and after failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.analysis.collection import collect
from paceline.analysis.run import open_run
from paceline.cli import main
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.errors import RecordsError, RunError, UsageError
from paceline.records import PHASES, RESULT_KEYS, RunFolder
from paceline.training.run_logger import RunLogger
from tests.support.commands import HERE, LIMIT_SECONDS, free_port
from tests.support.warm import PrewarmedStarter

FILES = {"config.json", "events-0.jsonl", "resources-0.jsonl", "result.json", "tensorboard"}


def run_workers(starter: PrewarmedStarter, outs: list[Path], how: str) -> list[tuple[int, str]]:
    """One worker per folder, as torchrun starts them; different folders are different machines."""
    port, nodes = free_port(), len(set(outs))
    local = len(outs) // nodes
    processes = []
    for rank, out in enumerate(outs):
        rank_info = replace(
            SINGLE_PROCESS,
            rank=rank,
            world_size=len(outs),
            local_rank=rank % local,
            local_world_size=local,
            node_rank=rank // local,
            nnodes=nodes,
            master_port=port,
        )
        processes.append(
            starter.start(
                ["-m", "own_loop", str(out), how],
                env={**os.environ, **rank_info.to_environment()},
                cwd=HERE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    ended = [process.communicate(timeout=LIMIT_SECONDS) for process in processes]
    return [(process.returncode, err) for process, (_, err) in zip(processes, ended, strict=True)]


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def linear_loop(
    out: Path | None, name: str = "loop", *, steps: int = 3, fails: BaseException | None = None
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join("allreduce", out=out, name=name) as team:
        trained, _, batches = team.prepare(model, optimizer, [(torch.ones(4, 2),)] * steps)
        for (batch,) in batches:
            team.backward(trained(batch).pow(2).mean())
            team.step()
        if fails is not None:
            raise fails


def test_two_workers_leave_the_folder_that_train_leaves(
    starter: PrewarmedStarter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_workers(starter, [tmp_path, tmp_path], "dataset")
    assert [code for code, _ in ended] == [0, 0], ended
    folder = tmp_path / "dataset"
    # Only rank 0 says where the records are.
    assert [err.splitlines() for _, err in ended] == [[f"paceline: records in {folder}"], []]
    files = {file.name for file in folder.iterdir()}
    assert files - {".lock"} == {*FILES, "events-1.jsonl"}
    result = result_of(folder)
    assert result.keys() >= set(RESULT_KEYS)
    assert (result["kind"], result["status"]) == ("join", "finished")
    assert (result["iterations"], result["samples"]) == (16, 4 * 48)
    known = {"strategy": "allreduce", "options": {}, "communicator": "torch", "world_size": 2}
    assert result["config"] == {**known, "nnodes": 1, "command": result["config"]["command"]}
    assert [worker["rank"] for worker in result["workers"]] == [0, 1]
    for worker in result["workers"]:
        assert tuple(worker["phases"]) == PHASES
        assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"])
        assert worker["phases"]["evaluate"] > 0
    assert [entry["epoch"] for entry in result["history"]] == [1, 2, 3, 4]
    assert result["metrics"].keys() == {"accuracy", "largest_score"}
    assert 0 < result["final"]["test_accuracy"] <= 1
    assert result["final"]["train_loss"] > 0

    assert main(["report", str(folder)]) == 0
    assert not collect(folder).skipped
    assert "allreduce" in (folder / "report.md").read_text()
    assert "accuracy" in capsys.readouterr().out


def test_a_loader_trains_the_weights_of_the_dataset_it_reads(
    starter: PrewarmedStarter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for how in ("dataset", "loader"):
        assert [code for code, _ in run_workers(starter, [tmp_path] * 2, how)] == [0, 0]
    one, two = (result_of(tmp_path / how) for how in ("dataset", "loader"))
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["samples"] == two["samples"]
    assert one["workers"][0]["noise_scale"]["reason"] == "no step was measured"
    # Beside a run of `paceline train`, as a user would compare them.
    trained = paceline.train(
        data="user_code:data", model="user_code:Plain", iterations=3, batch_size=12,
        sample_seconds=0, out=str(tmp_path), name="trained",
    )  # fmt: skip
    assert trained["kind"] == "train"
    paths = [str(tmp_path / name) for name in ("trained", "dataset", "loader")]
    capsys.readouterr()
    assert main(["compare", *paths]) == 0
    output = capsys.readouterr().out
    assert [line.split()[1:] for line in output.splitlines() if line.startswith("kind")] == [
        ["train", "join", "join"]
    ]


def test_records_of_other_machines_are_collected(starter: PrewarmedStarter, tmp_path: Path) -> None:
    disks = [tmp_path / "one", tmp_path / "two"]
    ended = run_workers(starter, disks, "dataset")
    assert [code for code, _ in ended] == [0, 0], ended
    folder = disks[0] / "dataset"
    expected = {*FILES, "events-1.jsonl", "resources-1.jsonl"}
    assert {file.name for file in folder.iterdir()} >= expected
    assert [worker["node"] for worker in result_of(folder)["workers"]] == [0, 1]
    assert [node["node"] for node in result_of(folder)["nodes"]] == [0, 1]


def test_an_exception_of_one_worker_is_the_cause_in_the_records(
    starter: PrewarmedStarter, tmp_path: Path
) -> None:
    ended = run_workers(starter, [tmp_path, tmp_path], "raise")
    assert all(code for code, _ in ended)
    assert "ValueError: a damaged sample" in ended[1][1]
    result = result_of(tmp_path / "raise")
    assert result["status"] == "failed"
    assert result["cause"].startswith("ValueError: a damaged sample")
    assert [worker["rank"] for worker in result["workers"]] == [0, 1]
    assert result["iterations"] == 8


def test_alone_a_loop_is_recorded_with_its_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear_loop(tmp_path)
    assert capsys.readouterr().err == f"paceline: records in {tmp_path / 'loop'}\n"
    run = open_run(tmp_path / "loop")
    assert (run.is_finished, run.iterations, run.settings.workers) == (True, 3, 1)
    assert run.timing is not None
    assert len(run.timing.loss) == 3
    assert run.result is not None
    assert run.result["samples"] == 12
    assert list((tmp_path / "loop" / "tensorboard").iterdir())


def test_a_default_name_has_script_and_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/home/you/my_program.py", "--fast"])
    monkeypatch.chdir(tmp_path)
    with paceline.join("allreduce") as team:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        team.prepare(model, optimizer, [(torch.ones(4, 2),)])
        path = team.path
    assert path is not None
    assert path.resolve().parent == tmp_path / "runs"
    assert path.name.endswith("-my_program-allreduce")
    assert open_run(path).settings.get("command") == ["/home/you/my_program.py", "--fast"]


def test_without_out_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    linear_loop(None)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (ValueError("no such file"), "failed", "ValueError: no such file"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (SystemExit(0), "stopped", "the program ended inside the block of paceline.join"),
    ],
    ids=repr,
)
def test_what_ends_a_loop_is_recorded_and_raised(
    tmp_path: Path, error: BaseException, status: str, cause: str
) -> None:
    with pytest.raises(type(error)) as raised:
        linear_loop(tmp_path, fails=error)
    assert raised.value is error
    result = result_of(tmp_path / "loop")
    assert (result["status"], result["iterations"]) == (status, 3)
    assert result["cause"].startswith(cause)


def test_a_termination_signal_is_recorded_and_ends_the_process(
    starter: PrewarmedStarter, tmp_path: Path
) -> None:
    ((code, _),) = run_workers(starter, [tmp_path], "terminate")
    assert code == -signal.SIGTERM
    result = result_of(tmp_path / "terminate")
    assert (result["status"], result["cause"]) == ("stopped", "stopped by SIGTERM")


def test_a_loop_that_never_trains_leaves_nothing(tmp_path: Path) -> None:
    with paceline.join("allreduce", out=tmp_path, name="loop"):
        pass
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(UsageError, match="batch_size: missing"),
        paceline.join("allreduce", out=tmp_path, name="loop") as team,
    ):
        team.prepare(model, optimizer, (torch.ones(4, 2),))
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_taken_is_rejected(tmp_path: Path) -> None:
    linear_loop(tmp_path)
    with pytest.raises(RecordsError, match="exists already: choose another name"):
        linear_loop(tmp_path)


def test_by_default_a_loop_that_cannot_be_recorded_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join("allreduce") as team:
        trained, _, batches = team.prepare(model, optimizer, [(torch.ones(4, 2),)] * 3)
        for (batch,) in batches:
            team.backward(trained(batch).pow(2).mean())
            team.step()
    assert not torch.equal(model.weight, before)
    line = "paceline: the loop is not recorded: out='runs': runs is not a folder\n"
    assert capsys.readouterr().err == line


def test_a_named_loop_that_cannot_be_recorded_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    line = "^out='runs': runs is not a folder; give another out, or out=None to train without"
    with pytest.raises(UsageError, match=line), paceline.join("allreduce", name="mine"):
        pass


@pytest.mark.parametrize(
    ("out", "reason"), [("a-file", "a-file is not a folder"), ("/proc/none", "cannot write to")]
)
def test_a_chosen_folder_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    with pytest.raises(RecordsError, match=f"^out='{out}': {reason}"):
        linear_loop(Path(out))


def test_a_full_disk_ends_the_records_but_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RunError("cannot write: No space left on device")

    monkeypatch.setattr(RunLogger, "iteration", full)
    linear_loop(tmp_path)
    (warning,) = result_of(tmp_path / "loop")["warnings"]
    assert warning == "the records of rank 0 end early: cannot write: No space left on device"
    monkeypatch.setattr(RunFolder, "write_result", full)
    linear_loop(tmp_path, "unwritten")
    assert "paceline: the records are incomplete: cannot write" in capsys.readouterr().err
