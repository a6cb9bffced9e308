"""Several nodes, each started by its own command; here all are this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.config import from_mapping
from paceline.errors import RunError, UsageError
from paceline.launch.node import NodeCoordinator
from paceline.records import read_json
from paceline.training.checkpoint import iterations
from tests.support.commands import (
    ENDLESS,
    SLOW,
    Ended,
    are_gone,
    free_port,
    is_training,
    launch,
    names_in,
    node,
    run_nodes,
    wait_until,
    workers_of,
)


def records_of(nodes: int) -> set[str]:
    """What is left of a run of one worker on each."""
    return {"config.json", "result.json", "checkpoints"} | {
        f"{kind}-{number}.jsonl" for kind in ("events", "resources") for number in range(nodes)
    }


def test_two_commands_do_what_one_command_does(
    tmp_path: Path, talkative_run: tuple[Path, Ended]
) -> None:
    """Both write to the same folder."""
    ended = run_nodes([tmp_path] * 2)
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 2
    result = read_json(tmp_path / "run" / "result.json")
    one_command = read_json(talkative_run[0] / "result.json")
    assert result["weights_sha256"] == one_command["weights_sha256"]
    assert [worker["node"] for worker in result["workers"]] == [0, 1]
    assert names_in(tmp_path / "run") == records_of(2)


def test_the_first_of_three_nodes_gets_all_records_and_waits_for_a_late_one(tmp_path: Path) -> None:
    outs = [tmp_path / f"disk-{number}" for number in range(3)]
    ended = run_nodes(outs, late_seconds=1.0, trace=2)
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 3
    traces = {"trace.json"} | {f"trace-{rank}.json" for rank in range(3)}
    assert names_in(outs[0] / "run") == records_of(3) | traces
    own = {"config.json", "events-2.jsonl", "resources-2.jsonl", "trace-2.json"}
    assert names_in(outs[2] / "run") == own
    result = read_json(outs[0] / "run" / "result.json")
    assert [worker["node"] for worker in result["workers"]] == [0, 1, 2]
    assert [each["node"] for each in result["nodes"]] == [0, 1, 2]
    assert all(each["rss_bytes_peak"] for each in result["nodes"])


def test_different_settings_of_a_node_are_rejected_on_all_nodes(tmp_path: Path) -> None:
    port = free_port()
    with (
        node(tmp_path, 0, port, nnodes=2, lr=0.1) as one,
        node(tmp_path, 1, port, nnodes=2, lr=0.2) as other,
    ):
        ended = [one.end(), other.end()]
    problem = "--lr: node 1 was started with 0.2, node 0 with 0.1: use the same value for all"
    line = f"paceline: error: {problem}\n"
    assert [(each.code, each.err) for each in ended] == [(2, line)] * 2
    assert not names_in(tmp_path)


def test_a_failure_on_one_node_is_reported_on_all(tmp_path: Path) -> None:
    outs = [tmp_path / "disk-0", tmp_path / "disk-1"]
    ended = run_nodes(outs, model="user_code:Breaking", iterations=100_000)
    cause = f"ValueError: the model broke (traceback in {outs[1]}/run/traceback.txt)"
    assert [(each.code, each.err) for each in ended] == [(1, f"paceline: error: {cause}\n")] * 2
    result = read_json(outs[0] / "run" / "result.json")
    assert (result["status"], result["cause"]) == ("failed", cause)
    assert len(result["workers"]) == 2, "the records of the node that failed must arrive"


@pytest.mark.parametrize("second", ["killed", "raises"])
def test_the_root_cause_does_not_depend_on_clocks(second: str, tmp_path: Path) -> None:
    outs, port = [tmp_path / "disk-0", tmp_path / "disk-1"], free_port()
    variables = {"OWN_NOTES": str(tmp_path), "OWN_SECOND": second}
    settings = {"nnodes": 2, "model": "user_code:FailingTwice", "iterations": 100_000}
    with (
        node(outs[0], 0, port, variables, **settings) as one,
        node(outs[1], 1, port, variables, **settings) as other,
    ):
        ended = [one.end(), other.end()]
    cause = f"ValueError: the first error (traceback in {outs[0]}/run/traceback.txt)"
    assert [(each.code, each.err) for each in ended] == [(1, f"paceline: error: {cause}\n")] * 2
    assert read_json(outs[0] / "run" / "result.json")["cause"] == cause


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_node_ends_the_others(victim: int, tmp_path: Path) -> None:
    outs, port = [tmp_path / "disk-0", tmp_path / "disk-1"], free_port()
    with contextlib.ExitStack() as stack:
        commands = [
            stack.enter_context(node(out, rank, port, SLOW, nnodes=2, **ENDLESS))
            for rank, out in enumerate(outs)
        ]
        wait_until(lambda: is_training(outs[0] / "run", [0]), "the first node trains")
        wait_until(lambda: is_training(outs[1] / "run", [1]), "the second node trains")
        process = commands[victim].process
        workers = list(workers_of(process.pid).values())
        process.kill()
        survivor = commands[1 - victim].end()
        wait_until(lambda: are_gone(workers), "the workers of the killed launcher are gone")
        assert commands[victim].end().code == -signal.SIGKILL
    assert survivor.code == 1
    assert survivor.err.count("\n") == 1, survivor.err
    if victim == 1:
        assert survivor.err.startswith("paceline: error: lost contact with node 1")
        result = read_json(outs[0] / "run" / "result.json")
        assert result["status"] == "failed"
        assert result["cause"] in survivor.err
    else:
        assert survivor.err == "paceline: error: lost contact with the first node at 127.0.0.1\n"


def test_ctrl_c_on_any_node_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    outs, port = [tmp_path / "disk-0", tmp_path / "disk-1"], free_port()
    settings: dict[str, Any] = {**ENDLESS, "nnodes": 2, "checkpoint_every": 100_000}
    with (
        node(outs[0], 0, port, SLOW, **settings) as first,
        node(outs[1], 1, port, SLOW, **settings) as second,
    ):
        wait_until(lambda: is_training(outs[1] / "run", [1]), "the second node trains")
        second.process.send_signal(signal.SIGINT)
        ended = [first.end(), second.end()]
    result = read_json(outs[0] / "run" / "result.json")
    done = result["iterations"]
    line = f"paceline: stopped by SIGINT after iteration {done}"
    assert [(each.code, each.err.splitlines()[0]) for each in ended] == [(130, line)] * 2
    assert result["status"] == "stopped"
    assert iterations(outs[0] / "run" / "checkpoints") == [done]


def two_nodes(out: Path, **settings: Any) -> None:
    launch(out, nnodes=2, rendezvous_seconds=0.5, **settings)


def test_a_node_that_does_not_join_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"node 1 did not join 127\.0\.0\.1:\d+ within 0\.5 s"):
        two_nodes(tmp_path, master_port=free_port())
    assert not names_in(tmp_path)


def test_a_first_node_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no response from .*--master-addr and --master-port"):
        two_nodes(tmp_path, node_rank=1, master_port=free_port())
    assert not names_in(tmp_path)


def test_a_port_in_use_is_rejected(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} .* in use: choose another"):
            two_nodes(tmp_path, master_port=port)
    assert not names_in(tmp_path)


def test_on_one_machine_a_port_in_use_is_no_hindrance() -> None:
    """The launcher serves its store on another port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nodes = NodeCoordinator(from_mapping({"nproc_per_node": 2, "master_port": port}))
    assert nodes.port != port


def test_the_port_of_a_run_on_one_machine_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program binds each port as soon as it is released."""
    plain, taken = socket.socket, []

    class Watched(socket.socket):
        def close(self) -> None:
            port = self.getsockname()[1] if self.fileno() >= 0 else 0
            super().close()
            if port:
                taken.append(plain())
                taken[-1].bind(("127.0.0.1", port))
                taken[-1].listen()

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Watched)
        try:
            nodes = NodeCoordinator(from_mapping({"nproc_per_node": 2}))
        finally:
            for each in taken:
                each.close()
    assert nodes.port
