"""The outcome of an elastic run on other machines, by how their processes ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig, RunSettings, from_mapping
from paceline.launch.remote import machines
from paceline.launch.remote import run as remote
from paceline.launch.remote.control_channel import NodeExit
from paceline.launch.result import RunOutcome, assemble
from paceline.launch.signals import SignalMonitor
from paceline.records import Result, RunFolder
from tests.launch.test_fleet import LocalFleet

KILLED_EARLY = NodeExit(2, -9, has_started=True, ended=60.0)
DIVERGED = "the loss is nan at iteration 70"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return from_mapping(
        {"out": str(tmp_path), "name": "run", "elastic": "2:3", "hosts": ["a", "b", "c"]}
    )


def result_of(config: RunConfig, folder: RunFolder, status: str, cause: str | None) -> Result:
    return {**assemble(RunSettings.of(config), folder, []), "status": status, "cause": cause}


def run(
    monkeypatch: pytest.MonkeyPatch,
    config: RunConfig,
    resumed: RunFolder | None,
    happen: Callable[[], list[NodeExit]],
    lost: set[int],
) -> RunOutcome:
    """With nodes of which only their ends are seen; the run went on without the lost ones."""

    class Seen:
        lost_nodes = lost

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> Seen:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, *_: Any) -> list[NodeExit]:
            return happen()

    monkeypatch.setattr(machines, "NodeSupervisor", Seen)
    monkeypatch.setattr(remote, "upload", lambda *_: None)
    return remote.run_on(LocalFleet(), config, resumed, True, SignalMonitor())


@pytest.mark.parametrize(
    ("status", "code", "exit_code"), [("diverged", 1, 1), ("stopped", 130, 130)]
)
def test_a_loss_that_the_run_got_over_is_not_the_cause_of_a_later_end(
    status: str, code: int, exit_code: int, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def happen() -> list[NodeExit]:
        folder = RunFolder.create(config)
        folder.events_file(0).write_text("")
        folder.write_result(result_of(config, folder, status, DIVERGED))
        news = {"identity": folder.identity()}
        first = NodeExit(0, code, DIVERGED, has_started=True, status=news, ended=90.0)
        return [first, NodeExit(1, code, DIVERGED, has_started=True, ended=91.0), KILLED_EARLY]

    outcome = run(monkeypatch, config, None, happen, lost={2})
    assert outcome.result is not None
    assert (outcome.result["status"], outcome.result["cause"]) == (status, DIVERGED)
    assert outcome.exit_code == exit_code
    assert outcome.folder.read_result() == outcome.result


@pytest.mark.parametrize("is_resumed", [False, True])
def test_without_the_first_node_the_records_of_the_others_are_fetched(
    is_resumed: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run already has a result, of its earlier part."""
    folder = RunFolder(Path(config.out) / "run")
    if is_resumed:
        folder = RunFolder.create(config)
        folder.write_result(result_of(config, folder, "stopped", "stopped by SIGINT"))
    asked: list[int] = []

    def download(_: Any, node: int, *__: Any, **___: Any) -> bool:
        asked.append(node)
        if not folder.path.exists():
            RunFolder.create(config)
        folder.events_file(node).write_text("")
        return True

    monkeypatch.setattr(remote, "download", download)
    ends = [NodeExit(0, -9, has_started=True, ended=60.0)]
    ends += [NodeExit(node, 1, "lost client", has_started=True, ended=75.0) for node in (1, 2)]
    outcome = run(monkeypatch, config, folder if is_resumed else None, lambda: ends, lost=set())
    assert asked == [0, 1, 2]
    assert outcome.result is not None
    assert outcome.result["cause"] == "node 0 (a) was killed by SIGKILL"
