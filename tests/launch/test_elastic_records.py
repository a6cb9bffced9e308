"""The records of an elastic run's nodes on their way to the first one, by a store in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import from_mapping
from paceline.launch import record_collection
from paceline.launch.elastic import run as runs
from paceline.launch.elastic import store_client as contacts
from paceline.launch.elastic.rendezvous import RoundLeader
from paceline.launch.elastic.store_client import StoreClient
from paceline.launch.node_workers import NodeWorkers
from paceline.launch.record_collection import PART_BYTES, parts_of, receive_files, send_files
from paceline.launch.signals import SignalMonitor
from paceline.records import RunFolder

OUTSIDE = ["../up", "/up", "checkpoints/1.pt", ".hidden", "a\nb", ""]


def given(client: StoreClient) -> runs._Setup:
    config = from_mapping({"elastic": "1:2", "nproc_per_node": 1})
    return runs._Setup(config, client, 1, None, True, SignalMonitor())


def received(store: Store, node: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    receive_files(store, node, files.__setitem__, expected={"events-1.jsonl"})
    return files


def test_an_error_in_the_store_client_reaches_the_caller(
    client: StoreClient, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        client.ask(lambda _: (tmp_path / "gone").read_bytes())
    client.set("key", 5)
    assert client.get("key") == 5, "the line holds"


def test_a_node_beats_after_each_part_that_it_hands_in(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contacts, "HEARTBEAT_SECONDS", 1000.0)
    node = client.register()
    client.send_parts((f"part/{number}", b"x") for number in range(5))
    assert client.heartbeats()[node] >= 5
    assert client.parts_sent([node]) == 5


def test_a_file_of_several_parts_arrives_whole(
    store: Store, client: StoreClient, tmp_path: Path
) -> None:
    contents = bytes(range(256)) * (PART_BYTES // 256) + b"rest"
    (tmp_path / "events-1.jsonl").write_bytes(contents)
    client.send_parts(parts_of(1, tmp_path, ["events-1.jsonl"]))
    assert received(store, 1) == {"events-1.jsonl": contents}


class Traceless:
    """Workers of a round that has ended."""

    def remove_transient(self, reports: bool) -> None:
        pass


def test_a_node_whose_rank_has_changed_hands_in_what_there_is(
    store: Store, client: StoreClient, tmp_path: Path
) -> None:
    """Reports are removed from round to round, while their names are remembered."""
    node = runs._OtherNode(given(client), {})
    node.folder, node._shares_folder = RunFolder(tmp_path), False
    (tmp_path / "events-1.jsonl").write_bytes(b"{}\n")
    node._agent.workers = cast("NodeWorkers", Traceless())
    node._agent.records = {"events-1.jsonl", "report-2.json"}
    node.conclude(None)
    assert received(store, 0) == {"events-1.jsonl": b"{}\n"}
    assert client.get("left/0") is True


class Living:
    """A leader that sees two nodes, both of which beat."""

    def live_nodes(self) -> set[int]:
        return {0, 1}


def gather(
    client: StoreClient,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[[float], None],
) -> float:
    """Have a first node gather; `step` is what happens between two looks, 4 s apart, at a time."""
    node = runs._FirstNode(given(client))
    node.folder, node._leader = RunFolder(folder), cast("RoundLeader", Living())
    now = 0.0

    def pass_time(_: float) -> None:
        nonlocal now
        now += 4.0
        step(now)

    monkeypatch.setattr(runs, "monotonic", lambda: now)
    monkeypatch.setattr(runs, "sleep", pass_time)
    node._receive_records()
    return now


def test_node_0_waits_for_slow_records(
    store: Store, client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (there / "events-1.jsonl").write_bytes(b"{}\n")

    def step(now: float) -> None:
        store.add("parts/1", 1)
        if now > 5 * runs.PART_SECONDS:
            send_files(store, 1, there, ["events-1.jsonl"])
            store.set("left/1", "true")

    gather(client, here, monkeypatch, step)
    assert (here / "events-1.jsonl").read_bytes() == b"{}\n"


def test_a_node_that_lives_and_hands_nothing_in_is_not_waited_for(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = gather(client, tmp_path, monkeypatch, lambda _: None)
    assert runs.PART_SECONDS <= waited <= runs.PART_SECONDS + 4


@pytest.mark.parametrize("name", OUTSIDE)
def test_files_that_would_lie_outside_the_folder_are_not_taken_from_the_store(
    name: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.set("files/1", f'{{"{name}": 1, "events-1.jsonl": 1}}'.replace("\n", "\\n"))
    store.set(f"file/1/{name}/0", "bad")
    store.set("file/1/events-1.jsonl/0", "good")
    with caplog.at_level(logging.WARNING, "paceline"):
        assert received(store, 1) == {"events-1.jsonl": b"good"}
    assert f"ignored {name!r} from node 1" in caplog.text


@pytest.mark.parametrize("name", ["../up", ".hidden", 5])
def test_files_that_would_lie_outside_the_folder_are_not_taken_from_workers(
    name: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(from_mapping({"out": str(tmp_path), "name": "run"}))
    before = list(tmp_path.rglob("*"))

    def gathered(*_: Any) -> list[Any]:
        return [None, name]

    def payloads(_: Communicator, payload: Any, __: str) -> list[Any]:
        return [payload, payload]

    monkeypatch.setattr(record_collection, "gather_json", gathered)
    monkeypatch.setattr(record_collection, "gather_bytes", payloads)
    record_collection._collect_files(
        folder, SINGLE_PROCESS, cast("Communicator", None), shares_folder=False
    )
    assert list(tmp_path.rglob("*")) == before
