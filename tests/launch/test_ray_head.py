"""When Ray's head is held to be lost, and what a command then does without it; with no Ray."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.ray.cluster import HeadLostError, HeadMonitor, ask_all
from paceline.launch.ray.machines import ResourceRequest, reserve_nodes


def test_a_head_that_is_silent_for_a_moment_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.ray.cluster.POLL_SECONDS", 0.01)
    message = iter([None, "no route to host", "timed out", None])
    monkeypatch.setattr(
        "paceline.launch.ray.cluster.connection_error", lambda _: next(message, None)
    )
    with contextlib.closing(HeadMonitor("10.0.0.1:6379")) as head:
        assert head.answers()


def test_a_head_that_was_never_reached_is_not_lost() -> None:
    """Where a proxy stands between."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with contextlib.closing(HeadMonitor(address)) as head:
        assert head.answers()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """What stands for a head that answers, until it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def head(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeadMonitor]:
    """Lost soon after it falls silent."""
    monkeypatch.setattr("paceline.launch.ray.cluster.POLL_SECONDS", 0.01)
    monkeypatch.setattr("paceline.launch.ray.cluster.SILENCE_SECONDS", 0.1)
    with contextlib.closing(HeadMonitor(f"127.0.0.1:{server.getsockname()[1]}")) as head:
        yield head


def test_a_head_that_stays_silent_is_lost(server: socket.socket, head: HeadMonitor) -> None:
    server.close()
    assert not head.answers()
    assert head.is_lost


class StandIn:
    """As much of Ray as claiming machines asks for; `asked` has what would hang without a head."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.asked: list[str] = []
        group = SimpleNamespace(wait=lambda timeout_seconds: is_ready())
        method = SimpleNamespace(remote=lambda: ("node", "10.0.0.1"))
        actor = SimpleNamespace(remote=lambda: SimpleNamespace(node_info=method))
        self.ray = SimpleNamespace(
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node"),
            nodes=list,
            remote=lambda _: SimpleNamespace(options=lambda **_: actor),
            get=lambda answers, timeout: answers,
            kill=lambda _: self.asked.append("kill"),
            exceptions=SimpleNamespace(GetTimeoutError=TimeoutError, RayError=RuntimeError),
        )
        self.util = SimpleNamespace(
            placement_group=lambda bundles, strategy: group,
            remove_placement_group=lambda _: self.asked.append("remove"),
        )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], StandIn]:
    def install(is_ready: Callable[[], bool]) -> StandIn:
        made = StandIn(is_ready)
        strategies: Any = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None)
        modules = {"": made.ray, ".util": made.util, ".util.scheduling_strategies": strategies}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"ray{name}", module)
        return made

    return install


WANTED = ResourceRequest(2, 1, 0)


def say_nothing(text: str) -> None: ...


@pytest.mark.parametrize(("is_silent", "asked"), [(False, ["kill", "kill", "remove"]), (True, [])])
def test_reservations_are_released_only_if_the_head_answers(
    is_silent: bool, asked: list[str], server: socket.socket, head: HeadMonitor, stand_in: Any
) -> None:
    """A head that has just fallen silent is not lost yet, but calls to it would hang."""
    ray = stand_in(lambda: True)
    with reserve_nodes(WANTED, head, 60.0, say_nothing) as machines:
        assert [machine.address for machine in machines] == ["10.0.0.1"] * 2
        if is_silent:
            server.close()
    assert ray.asked == asked


def test_a_head_lost_while_waiting_for_machines_is_reported(
    server: socket.socket, head: HeadMonitor, stand_in: Any
) -> None:
    def is_ready() -> bool:
        server.close()
        return False

    stand_in(is_ready)
    message = (
        f"^lost Ray's head at {head.address}: was waiting for 2 machines with 1 free CPU each$"
    )
    with (
        pytest.raises(HeadLostError, match=message),
        reserve_nodes(WANTED, head, 60.0, say_nothing),
    ):
        pass


def test_a_head_lost_during_a_call_to_actors_is_reported(
    server: socket.socket, head: HeadMonitor, stand_in: Any
) -> None:
    def get(answers: Any, timeout: float) -> Any:
        server.close()
        raise TimeoutError

    stand_in(lambda: True).ray.get = get
    with pytest.raises(HeadLostError, match="an actor of Ray does not answer"):
        ask_all(["answer"], head, 60.0)


PROGRAM = """
import atexit, socket, sys, time
from types import SimpleNamespace
from paceline import errors
from paceline.launch.ray import cluster

atexit.register(time.sleep, 100)  # as Ray would hang, which registers its own end
cluster.POLL_SECONDS, cluster.SILENCE_SECONDS = 0.01, 0.1
ray = SimpleNamespace(shutdown=lambda: time.sleep(100))
server = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{server.getsockname()[1]}"
try:
    with cluster._disconnecting(ray, cluster.HeadMonitor(address)) as connection:
        server.close()
        exec(sys.argv[1])
except errors.PacelineError:
    pass
"""
"""A command that loses Ray's head and then ends in the given way."""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("connection.exit_code = 0", 0),
        ("connection.exit_code = 130", 130),
        ("raise errors.UsageError('too few')", 2),
    ],
)
def test_a_command_that_lost_rays_head_exits_at_once_with_its_exit_code(
    end: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, end], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, "")
