"""Forged and malformed values in the store at which nodes meet."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists none of these
    PrefixStore,
    Store,
    TCPStore,
)

from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import RunSettings, from_mapping
from paceline.errors import PacelineError, RunError
from paceline.launch import consistency, record_collection
from paceline.launch import node as node_module
from paceline.launch.elastic import run as elastic
from paceline.launch.elastic.rendezvous import ElasticRendezvous, RoundLeader
from paceline.launch.elastic.store_client import StoreClient
from paceline.launch.node import NodeCoordinator
from paceline.launch.record_collection import PART_BYTES
from paceline.launch.remote.control_channel import STATUS_MARK, NodeExit, NodeProcess, popen_piped
from paceline.launch.remote.folder_transfer import download
from paceline.launch.result import assemble
from paceline.launch.signals import SignalMonitor
from paceline.records import RunFolder, read_json
from tests.support.commands import ENDLESS, SLOW, free_port, is_training, names_in, node, wait_until

ENDED = {
    "cause": "the model broke",
    "exit_code": 1,
    "status": "failed",
    "is_secondary": False,
    "ended": 5.0,
    "is_loss": False,
    "order": 1,
}


@pytest.fixture(autouse=True)
def short_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rendezvous:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def join(self) -> Store:
            return store

    monkeypatch.setattr(node_module, "Rendezvous", Rendezvous)
    monkeypatch.setattr(node_module, "EXCHANGE_SECONDS", 0.2)


def settings(out: Path, rank: int) -> dict[str, Any]:
    return {
        "out": str(out),
        "name": "run",
        "nnodes": 2,
        "node_rank": rank,
        "rendezvous_seconds": 2,
        "timeout_seconds": 2,
    }


def joined(store: Store, out: Path, rank: int = 0) -> NodeCoordinator:
    """One of two nodes, once the other has set its configuration."""
    other = from_mapping(settings(out, 1 - rank))
    store.set(f"config/{1 - rank}", json.dumps(other.to_dict()))
    return NodeCoordinator(from_mapping(settings(out, rank)))


def one_line(error: pytest.ExceptionInfo[PacelineError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_forged_alarm_does_not_make_a_run_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    outs, port = [tmp_path / "disk-0", tmp_path / "disk-1"], free_port()
    with (
        node(outs[0], 0, port, SLOW, nnodes=2, **ENDLESS) as first,
        node(outs[1], 1, port, SLOW, nnodes=2, **ENDLESS) as second,
    ):
        wait_until(lambda: is_training(outs[1] / "run", [1]), "the second node trains")
        forger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        PrefixStore("nodes", forger).set("alarm", "true")
        ended = [first.end(), second.end()]
    assert [each.code for each in ended] == [1, 1]
    line = "paceline: error: another node reported a failure without a cause"
    assert [each.err.startswith(line) for each in ended] == [True, True], ended
    assert read_json(outs[0] / "run" / "result.json")["status"] == "failed"


def test_a_result_without_the_report_of_rank_0_is_not_finished(tmp_path: Path) -> None:
    config = from_mapping({"out": str(tmp_path), "name": "run", "nproc_per_node": 2})
    folder = RunFolder.create(config)
    result = assemble(RunSettings.of(config), folder, [], None)
    assert result["status"] == "failed"
    assert result["cause"] == "rank 0 ended without a report"


@pytest.mark.parametrize("name", ["../up", "/tmp/absolute", "a/b", "..", ".hidden", "", 5, None])
def test_a_run_name_with_a_path_is_rejected(name: object, store: Store, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    store.set("folder", json.dumps({"id": name, "identity": [1, 2, "3"]}))
    other = joined(store, out, rank=1)
    with pytest.raises(RunError, match="malformed run name") as error:
        other.agree_on_folder(None)
    one_line(error)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("message", ["5", "[]", "{}", "null", "{", '{"id": "run"}'])
def test_a_malformed_folder_is_one_line(message: str, store: Store, tmp_path: Path) -> None:
    store.set("folder", message)
    with pytest.raises(RunError, match="malformed") as error:
        joined(store, tmp_path / "out", rank=1).agree_on_folder(None)
    one_line(error)
    assert not any(tmp_path.iterdir())


def test_a_run_name_from_the_first_worker_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts them, where names travel by gloo."""
    config = from_mapping({"out": str(tmp_path / "deep" / "out")})

    class Second:
        rank = 1

    monkeypatch.setattr(consistency, "broadcast_json", lambda *_: "../../up")
    monkeypatch.setattr(consistency, "run_collectively", lambda _, action: action())
    with pytest.raises(RunError, match="malformed run name"):
        consistency.agree_on_folder(
            cast("Communicator", Second()),
            ExitStack(),
            lambda: RunFolder.create(config),
            lambda name: RunFolder.open_or_create(config, name),
        )
    assert not any(tmp_path.iterdir())


def test_a_run_name_of_an_elastic_run_is_checked_as_well(
    client: StoreClient, tmp_path: Path
) -> None:
    config = from_mapping({"elastic": "1:2", "out": str(tmp_path / "deep" / "out")})
    given = elastic._Setup(config, client, 1, None, True, SignalMonitor())
    message = {"id": "../../up", "mark": "launch-0.json", "config": config.to_dict()}
    client.set("run", message)
    with pytest.raises(RunError, match="malformed run name"):
        elastic._OtherNode(given, elastic._await_run(given)).joined().__enter__()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("message", ["5", "[]", '{"lr": 3}', "{", "[" * 100_000])
def test_malformed_settings_are_one_line(message: str, store: Store, tmp_path: Path) -> None:
    store.set("config/1", message)
    with pytest.raises(RunError, match="malformed") as error:
        NodeCoordinator(from_mapping(settings(tmp_path, 0)))
    one_line(error)


@pytest.mark.parametrize(
    "message",
    [
        "5",
        "[]",
        "{",
        '{"cause": "x"}',
        json.dumps({**ENDED, "cause": 5}),
        json.dumps({**ENDED, "status": "finished"}),
        json.dumps({**ENDED, "exit_code": "1"}),
        json.dumps({**ENDED, "exit_code": 0}),
        json.dumps({**ENDED, "ended": float("nan")}),
        json.dumps({**ENDED, "extra": 1}),
    ],
)
def test_a_malformed_ending_of_another_node_is_a_failure_in_one_line(
    message: str, store: Store, tmp_path: Path
) -> None:
    here = joined(store, tmp_path)
    folder = here.agree_on_folder(RunFolder.create(from_mapping(settings(tmp_path, 0))))
    store.set("ended/1", message)
    termination = here.exchange_terminations(None, folder, [])
    assert termination is not None
    assert (termination.status, termination.exit_code) == ("failed", 1)
    assert "malformed" in termination.cause
    assert "\n" not in termination.cause


def collected(store: Store, out: Path) -> RunFolder:
    """The folder of the first node once it has what the second one handed in."""
    here = joined(store, out)
    folder = here.agree_on_folder(RunFolder.create(from_mapping(settings(out, 0))))
    store.set("ended/1", "null")
    here.exchange_terminations(None, folder, [])
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "result.json",
        "events-0.jsonl",
        "resources-0.jsonl",
        "report-0.json",
        "trace-2.json",
        "notes.txt",
        "events-1.jsonl.py",
    ],
)
def test_only_files_of_the_node_itself_are_taken(
    name: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.set("files/1", json.dumps({name: 1, "events-1.jsonl": 1}))
    store.set(f"file/1/{name}/0", "forged")
    store.set("file/1/events-1.jsonl/0", "good")
    with caplog.at_level(logging.WARNING, "paceline"):
        folder = collected(store, tmp_path)
    assert names_in(folder.path) == {"config.json", "events-1.jsonl"}
    assert (folder.path / "events-1.jsonl").read_text() == "good"
    assert "forged" not in folder.config_file.read_text()
    assert name in caplog.text


@pytest.mark.parametrize(
    "listed",
    [
        "5",
        "[]",
        "{",
        '{"events-1.jsonl": "2"}',
        '{"events-1.jsonl": -1}',
        '{"events-1.jsonl": true}',
        '{"events-1.jsonl": 2}',
        '{"events-1.jsonl": 1000000000000000000}',
        json.dumps({f"events-{number}.jsonl": 1 for number in range(10_000)}),
    ],
)
def test_a_malformed_list_of_files_takes_nothing_and_is_one_warning(
    listed: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.set("files/1", listed)
    store.set("file/1/events-1.jsonl/0", "good")
    with caplog.at_level(logging.WARNING, "paceline"):
        folder = collected(store, tmp_path)
    assert names_in(folder.path) == {"config.json"}
    [record] = [each for each in caplog.records if each.name == "paceline"]
    assert "node 1" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_part_that_is_too_large_is_not_taken(store: Store, tmp_path: Path) -> None:
    store.set("files/1", '{"events-1.jsonl": 1}')
    store.set("file/1/events-1.jsonl/0", "x" * (PART_BYTES + 1))
    assert names_in(collected(store, tmp_path).path) == {"config.json"}


@pytest.mark.parametrize("report", ["5", "{", '{"schema": 1}', '{"schema": 1, "status": "x"}'])
def test_a_malformed_report_is_not_taken(
    report: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.set("files/1", '{"report-1.json": 1}')
    store.set("file/1/report-1.json/0", report)
    with caplog.at_level(logging.WARNING, "paceline"):
        folder = collected(store, tmp_path)
    assert record_collection.read_reports(folder, range(2)) == []
    assert "report-1.json" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "events-0.jsonl", "result.json", ["a"]])
def test_workers_send_only_their_own_files(
    name: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(from_mapping({"out": str(tmp_path), "name": "run"}))
    before = folder.config_file.read_bytes()
    monkeypatch.setattr(record_collection, "gather_json", lambda *_: [None, name])
    monkeypatch.setattr(
        record_collection, "gather_bytes", lambda _, payload, __: [payload, payload]
    )
    record_collection._collect_files(
        folder, SINGLE_PROCESS, cast("Communicator", None), shares_folder=False
    )
    assert names_in(folder.path) == {"config.json"}
    assert folder.config_file.read_bytes() == before


@pytest.mark.parametrize("message", ['{"number": "x"}', "5", "{", '{"number": 1, "cause": {}}'])
def test_a_malformed_join_request_is_one_line(
    message: str, store: Store, client: StoreClient
) -> None:
    config = from_mapping({"elastic": "1:2"})
    leader = RoundLeader(config, client, lambda: None)
    client.register()
    store.set("application/0", message)
    with pytest.raises(RunError, match="malformed") as error:
        leader.try_form_round()
    one_line(error)


@pytest.mark.parametrize("key", ["round", "regroup", "end"])
@pytest.mark.parametrize("message", ["5", "{", '{"number": "x", "nodes": [0], "iteration": null}'])
def test_a_malformed_round_is_one_line(
    key: str, message: str, store: Store, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = ElasticRendezvous(client, 0, "127.0.0.1", 1)
    store.set("round", '{"number": 0, "nodes": [0], "iteration": null}')
    if key != "round":
        rounds.next_rendezvous()
    store.set(key, message)
    rounds._checked_at = -1000.0
    with pytest.raises(RunError, match="malformed") as error:
        rounds.next_rendezvous() if key == "round" else rounds.num_nodes_waiting()
    one_line(error)


class Chatty:
    """A machine whose shell prints a greeting on standard output."""

    addresses = ("host",)
    cluster_file = None
    python = sys.executable

    def start(self, node: int, argv: Sequence[str], request: bytes) -> subprocess.Popen[bytes]:
        return popen_piped(["sh", "-c", "echo Welcome; cat > /dev/null"], request)

    def explain(self, end: NodeExit) -> PacelineError:
        raise AssertionError(end)


def test_an_answer_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="host: unexpected answer 'Welcome'") as error:
        download(Chatty(), 0, "runs/run", RunFolder(tmp_path / "run"))
    one_line(error)


@pytest.mark.parametrize("news", ["[1]", "5", "null", "{"])
def test_malformed_news_of_a_node_are_ignored(news: str) -> None:
    with popen_piped(["cat"], b"") as process:
        node_process = NodeProcess(0, process, "")
        node_process._take_err(f"{STATUS_MARK}{news}\n".encode())
        node_process.close()
    assert node_process.end.status == {}
