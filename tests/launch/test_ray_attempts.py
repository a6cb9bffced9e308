"""The restart loop on a Ray cluster, with scripted attempts instead of Ray."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import RunConfig, from_mapping
from paceline.errors import ConfigError, PacelineError, RunError, StoppedError, UsageError
from paceline.launch.ray import cluster, run
from paceline.launch.ray.cluster import HeadLostError, LostError
from paceline.launch.ray.machines import ResourceRequest, TooFewError
from paceline.launch.result import RunOutcome
from paceline.launch.signals import SignalMonitor
from paceline.records import SCHEMA, RunFolder, read_json


@dataclass
class Script:
    """The outcome of each attempt, and what it was started with."""

    ends: list[Any]
    """Results, errors of the run, or TooFewError."""
    lost: bool = False
    """Whether the actors of a failed attempt are gone."""
    headless: bool = False
    """Whether Ray's head is lost meanwhile."""
    resumed: list[bool] = field(default_factory=list)
    firsts: list[str | None] = field(default_factory=list)
    aside: list[tuple[Path, str]] = field(default_factory=list)


class FakeFleet:
    def __init__(self, script: Script) -> None:
        self.first_node_id = "machine-7"
        self.lost = [1] if script.lost else []
        self._script = script

    def free_port(self) -> int:
        if isinstance(self._script.ends[0], LostError):
            raise self._script.ends.pop(0)
        return 1234

    def set_aside(self, path: Path, name: str) -> None:
        self._script.aside.append((path, name))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a script; each attempt writes its result, and a checkpoint where that is wanted."""

    def play(script: Script, **settings: Any) -> RunOutcome:
        @contextlib.contextmanager
        def fleet(*arguments: Any) -> Iterator[FakeFleet]:
            if isinstance(script.ends[0], TooFewError):
                raise script.ends.pop(0)
            script.firsts.append(arguments[4])
            yield FakeFleet(script)

        def attempt(_: Any, config: RunConfig, resumed: RunFolder | None, *__: Any) -> RunOutcome:
            script.resumed.append(resumed is not None)
            end = script.ends.pop(0)
            if isinstance(end, PacelineError):
                raise end
            folder = resumed or RunFolder.create(config)
            if config.checkpoint_every != "never":
                folder.checkpoints.mkdir(exist_ok=True)
                (folder.checkpoints / "iteration-00000007.pt").touch()
            script.lost = script.lost and end["status"] != "finished"
            folder.write_result(end)
            return RunOutcome(folder, end, 0 if end["status"] == "finished" else 1)

        monkeypatch.setattr(run, "ray_machines", fleet)
        monkeypatch.setattr(run, "run_on", attempt)
        monkeypatch.setattr(run, "has_gpus", lambda *_: False)
        config = from_mapping({"out": str(tmp_path), "name": "run", "nnodes": 2, **settings})
        with SignalMonitor() as signals:
            head: Any = SimpleNamespace(
                address="head:6379", is_lost=script.headless, answers=lambda: not script.headless
            )
            return run.RestartLoop(config, head, False, signals).run(None)

    return play


FINISHED = {"schema": SCHEMA, "status": "finished", "cause": None}
KILLED = {
    "schema": SCHEMA,
    "status": "failed",
    "cause": "rank 1 was killed by SIGKILL",
    "is_loss": True,
}
STOPPED = {
    "schema": SCHEMA,
    "status": "stopped",
    "cause": "stopped by SIGTERM after iteration 5",
    "iterations": 5,
    "is_loss": False,
}
RAISED = {
    "schema": SCHEMA,
    "status": "failed",
    "cause": "ValueError: the model broke",
    "is_loss": False,
}


def test_a_restart_prefers_the_machine_that_has_the_folder(
    play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script([KILLED, FINISHED])
    outcome = play(script, checkpoint_every=7)
    assert outcome.exit_code == 0
    assert script.resumed == [False, True]
    assert script.firsts == [None, "machine-7"]
    message = "paceline: rank 1 was killed by SIGKILL: restart 1 of 3 after iteration 7\n"
    assert capsys.readouterr().err == message
    assert [each["iteration"] for each in read_json(outcome.folder.result_file)["restarts"]] == [7]


def test_without_checkpoints_a_run_restarts_from_the_beginning_and_reports_it(
    play: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = Script([KILLED, FINISHED])
    assert play(script).exit_code == 0
    assert script.resumed == [False, False]
    assert script.aside == [(tmp_path / "run", "run~lost-1")], "on the machines as well"
    assert (tmp_path / "run~lost-1" / "result.json").is_file()
    expected = capsys.readouterr().err
    assert expected.endswith(
        "restart 1 of 3 from the beginning, because --checkpoint-every is not set\n"
    )


def test_an_error_of_a_worker_is_not_retried(play: Any) -> None:
    script = Script([RAISED])
    outcome = play(script, checkpoint_every=7)
    assert outcome.result["cause"] == "ValueError: the model broke"
    assert script.resumed == [False]


def test_actors_that_are_lost_before_training_are_tried_again(play: Any) -> None:
    script = Script([RunError("lost node 1 (b): its Ray actor was killed"), FINISHED], lost=True)
    assert play(script).exit_code == 0
    assert script.resumed == [False, False]


def test_an_attempt_that_is_lost_at_its_start_does_not_lose_the_checkpoint(play: Any) -> None:
    script = Script([KILLED, LostError("an actor of Ray does not answer"), FINISHED])
    assert play(script, checkpoint_every=7).exit_code == 0
    assert script.resumed == [False, True]


@pytest.mark.parametrize(
    ("end", "situation"),
    [
        (KILLED, "rank 1 was killed by SIGKILL"),
        (STOPPED, "stopped after iteration 5"),
    ],
)
def test_a_run_ends_with_an_error_when_rays_head_is_lost(
    play: Any, end: Any, situation: str
) -> None:
    """Workers that still answer are stopped by us; no restart is tried, as Ray would hang."""
    script = Script([end], headless=True)
    outcome = play(script, checkpoint_every=7)
    cause = f"lost Ray's head at head:6379: {situation}"
    assert (outcome.exit_code, outcome.result["cause"]) == (1, cause)
    assert outcome.result["status"] == "failed"


def test_missing_records_are_reported_when_rays_head_is_lost(play: Any) -> None:
    """Its workers were stopped because of that, not by the user."""
    stopped = StoppedError("b: stopped by SIGTERM after iteration 5")
    with pytest.raises(RunError, match=rf"^lost Ray's head at head:6379: {stopped}$"):
        play(Script([stopped], headless=True))


def test_a_head_that_was_lost_before_training_is_named_once(play: Any) -> None:
    head: Any = SimpleNamespace(address="head:6379")
    script = Script([HeadLostError(head, "was waiting for 2 machines")], headless=True)
    with pytest.raises(
        RunError, match=r"^lost Ray's head at head:6379: was waiting for 2 machines$"
    ):
        play(script)


def test_restarts_are_used_up(play: Any) -> None:
    outcome = play(Script([KILLED] * 3), checkpoint_every=7, max_restarts=2)
    cause = "rank 1 was killed by SIGKILL (--max-restarts 2 are used up)"
    assert (outcome.exit_code, outcome.result["cause"]) == (1, cause)
    assert outcome.folder.path.joinpath("result.json").read_text().count(cause) == 1


def test_machines_that_are_lost_for_good_end_the_run_with_the_first_cause(
    play: Any, tmp_path: Path
) -> None:
    outcome = play(Script([KILLED, TooFewError("needs 2 machines; there is 1")]))
    cause = "rank 1 was killed by SIGKILL; a restart needs 2 machines; there is 1"
    assert (outcome.exit_code, outcome.result["cause"]) == (1, cause)
    assert (tmp_path / "run" / "result.json").is_file(), "its records have their name again"


def test_too_few_machines_at_the_start_are_rejected(play: Any) -> None:
    with pytest.raises(UsageError, match="--launcher ray: needs 2 machines; there is 1: reduce"):
        play(Script([TooFewError("needs 2 machines; there is 1")]))


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (ResourceRequest(1, 1, 0), "1 machine with 1 free CPU"),
        (ResourceRequest(3, 2, 0), "3 machines with 2 free CPUs each"),
        (ResourceRequest(2, 1, 1), "2 machines with 1 free CPU and 1 free GPU each"),
    ],
)
def test_what_is_needed_reads_well(wanted: ResourceRequest, text: str) -> None:
    assert str(wanted) == text


@pytest.mark.parametrize(
    "settings", [{"hosts": "a,b"}, {"cluster": "nodes=2"}, {"elastic": "1:2", "nnodes": 2}]
)
def test_other_machine_flags_are_rejected_with_ray(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with --launcher ray"):
        run.run(from_mapping({"launcher": "ray", **settings}), None, quiet=True)


def test_a_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"^--launcher ray: Ray is not installed: pip install"):
        run.run(from_mapping({"launcher": "ray"}), None, quiet=True)


@pytest.mark.ray
def test_an_unreachable_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    message = rf"at 127\.0\.0\.1:{port} \(Connection refused\)"
    with pytest.raises(UsageError, match=message), cluster.connected(1, lambda _: None):
        pass
