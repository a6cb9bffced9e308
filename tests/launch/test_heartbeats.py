"""Parameter servers and workers that are slow, stopped or killed: slow is not dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.comm.communicator import timeout_message
from tests.support.commands import ENDLESS, alongside, is_training, launch, sabotage, wait_until

TIMEOUT_SECONDS = 4
SLEEP_SECONDS = 7
"""Longer than the timeout plus the two heartbeat intervals within which silence is noticed."""
TWO: dict[str, Any] = {
    "nproc_per_node": 2,
    "strategy": "parameter_server",
    "timeout_seconds": TIMEOUT_SECONDS,
}


@contextmanager
def signaled_server(folder: Path, number: signal.Signals) -> Iterator[None]:
    """Send a signal to the server of the run that this process launches inside the block."""

    def strike() -> None:
        wait_until(lambda: is_training(folder), "both workers train")
        children = psutil.Process(os.getpid()).children()
        (server,) = [child for child in children if child.name().startswith("server")]
        server.send_signal(number)

    with alongside(strike):
        yield


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_may_take_longer_than_the_timeout_for_an_update(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", str(SLEEP_SECONDS))
    settings = {**TWO, "strategy": "user_code:SlowServers", "options": {"mode": mode}}
    outcome = launch(tmp_path, **settings, iterations=1)
    assert outcome.result is not None
    assert outcome.result["cause"] is None
    assert outcome.result["status"] == "finished"


@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_a_worker_may_take_longer_than_the_timeout_for_a_step(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", str(SLEEP_SECONDS))
    settings = {**TWO, "model": "user_code:SlowOnRankOne", "options": {"mode": mode}}
    outcome = launch(tmp_path, **settings, iterations=2, checkpoint_every=1)
    assert outcome.result is not None
    assert outcome.result["cause"] is None
    assert outcome.result["status"] == "finished"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_stopped_server_ends_the_run(mode: str, tmp_path: Path) -> None:
    with signaled_server(tmp_path / "run", signal.SIGSTOP):
        outcome = launch(tmp_path, **ENDLESS, **TWO, options={"mode": mode})
    assert outcome.exit_code == 1
    assert outcome.result is not None
    rank, _, cause = str(outcome.result["cause"]).partition(": ")
    assert rank in ("rank 0", "rank 1")
    assert cause.startswith(f"server 0: {timeout_message(TIMEOUT_SECONDS)}")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_stopped_worker_ends_the_run(mode: str, tmp_path: Path) -> None:
    with sabotage(tmp_path / "run", 1, signal.SIGSTOP, while_training=True):
        outcome = launch(tmp_path, **ENDLESS, **TWO, options={"mode": mode})
    assert outcome.exit_code == 1
    assert outcome.result is not None
    # Synchronous workers also wait for each other about once a second, without the server.
    seen_by = ["server 0:"] if mode == "async" else ["server 0:", "rank 0: all_reduce with"]
    silence = f"rank 1: {timeout_message(TIMEOUT_SECONDS)}; rank 1 was still busy"
    assert outcome.result["cause"] in [f"{who} {silence}" for who in seen_by]
