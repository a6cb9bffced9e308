"""Parameter server: synchronous and asynchronous training, staleness bound, lost servers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.shm import segment
from paceline.config import from_mapping
from paceline.errors import ConfigError, PeerError
from paceline.launch import launcher
from paceline.records import Result, RunFolder, read_lines
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.parameter_server import strategy as strategy_module
from paceline.strategies.parameter_server.strategy import ParameterServer, ServerCheckpointState
from paceline.strategies.strategy import AssignmentRequest, SingleProcess
from tests.support import toy_replicas as toy
from tests.support.server_threads import is_even, with_servers
from tests.support.warm import PrewarmedStarter
from tests.support.worker_pool import free_port

pytestmark = pytest.mark.usefixtures("warm_workers")

SMALL: dict[str, Any] = {
    "train_samples": 64, "test_samples": 32, "batch_size": 16, "threads": 1, "sample_seconds": 0,
    "tensorboard": False, "strategy": "parameter_server", "nproc_per_node": 2,
}  # fmt: skip


def alone(steps: int, optimizer: toy.MakeOptimizer, clip_norm: float | None = None) -> Tensor:
    """Return the weights of one worker that computes full batches."""

    def work(communicator: Communicator) -> Tensor:
        single = SingleProcess()
        single.setup(toy.replica(communicator, optimizer, clip_norm=clip_norm))
        toy.train(single, range(steps))
        return toy.weights_of(single.replica)

    return in_process.run(1, work)[0]


def in_step(
    workers: int, servers: int, steps: int, optimizer: toy.MakeOptimizer, **settings: Any
) -> list[Tensor]:
    def work(strategy: ParameterServer) -> Tensor:
        toy.train(strategy, range(steps))
        strategy.finish()
        return toy.weights_of(strategy.replica)

    make = lambda: ParameterServer(mode="sync", servers=servers)  # noqa: E731
    return with_servers(workers, make, optimizer, work, **settings)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_sync_mode_is_bit_identical_for_exact_sums(workers: int, servers: int) -> None:
    """Gradients, rate and momentum make every sum exact in any order."""

    def gradients(rank: int, step: int, like: nn.Parameter) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + step)
        return torch.randint(-8, 9, like.shape, generator=generator).float()

    def work(strategy: ParameterServer) -> Tensor:
        for weight in strategy.replica.trainable:
            weight.data.zero_()
        assert isinstance(strategy.checkpoint, ServerCheckpointState)
        strategy.checkpoint.initialize_servers({})
        for step in range(3):
            for weight in strategy.replica.trainable:
                assert weight.grad is not None
                weight.grad += gradients(strategy.replica.communicator.rank, step, weight)
            strategy.step()
        return toy.weights_of(strategy.replica)

    optimizer = toy.sgd(rate=0.5, momentum=0.5)
    make = lambda: ParameterServer(servers=servers)  # noqa: E731
    got = with_servers(workers, make, optimizer, work)

    weights = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 5), (4,), (3, 4), (3,))]
    reference = optimizer(weights)
    for step in range(3):
        for weight in weights:
            weight.grad = sum(
                (gradients(rank, step, weight) for rank in range(workers)), torch.zeros(())
            )
        reference.step()
    expected = torch.cat([weight.detach().flatten() for weight in weights])
    assert all(torch.equal(each, expected) for each in got)


@pytest.mark.parametrize("optimizer", [toy.sgd(), toy.adam()], ids=["sgd", "adam"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 2), (2, 1), (4, 2)])
def test_sync_mode_trains_like_one_worker(
    workers: int, servers: int, optimizer: toy.MakeOptimizer
) -> None:
    expected = alone(5, optimizer)
    got = in_step(workers, servers, 5, optimizer)
    assert all(torch.equal(each, got[0]) for each in got)
    torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("servers", [1, 2])
def test_shared_memory_and_messages_compute_the_same(servers: int) -> None:
    """A single asynchronous worker is deterministic."""
    synchronous = [
        in_step(3, servers, 5, toy.sgd(), shares_memory=choice)[0] for choice in (always, never)
    ]
    assert torch.equal(*synchronous)
    asynchronous = [
        train_asynchronously(1, 5, toy.sgd(), choice, mode="async", servers=servers)[0][0]
        for choice in (always, never)
    ]
    assert torch.equal(*asynchronous)


def always(_: int) -> bool:
    return True


def never(_: int) -> bool:
    return False


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_outside_of_the_memory_of_messages_train_the_same(
    mode: Literal["sync", "async"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those on a GPU, for which other tensors on the CPU stand in."""

    def weights() -> Tensor:
        if mode == "sync":
            return in_step(2, 2, 5, toy.sgd())[0]
        return train_asynchronously(1, 5, toy.sgd(), mode="async", servers=2)[0][0]

    expected = weights()
    monkeypatch.setattr(strategy_module, "FlatBuffer", lambda weights, memory: FlatBuffer(weights))
    assert torch.equal(weights(), expected)


def test_worker_without_space_in_shared_memory_sends_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(size_bytes: int) -> Path:
        raise OSError(errno.ENOSPC, "no space left on device")

    expected = in_step(2, 2, 5, toy.sgd())
    monkeypatch.setattr(segment, "create_file", fail)
    assert torch.equal(in_step(2, 2, 5, toy.sgd())[0], expected[0])


def test_shared_memory_is_unlinked_once_servers_have_mapped_it() -> None:
    def work(strategy: ParameterServer) -> list[Path]:
        strategy.replica.communicator.barrier().wait()
        return list(segment.FOLDER.glob(f"{segment.PREFIX}-*-{os.getpid()}-*"))

    assert with_servers(2, ParameterServer, toy.sgd(), work, shares_memory=always) == [[], []]


@pytest.mark.parametrize("servers", [1, 2])
def test_sync_mode_clips_by_the_norm_over_all_shards(servers: int) -> None:
    clipped = alone(5, toy.sgd(), clip_norm=0.05)
    got = in_step(2, servers, 5, toy.sgd(), clip_norm=0.05)
    torch.testing.assert_close(got[0], clipped, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(alone(5, toy.sgd()), clipped, rtol=1e-3)


@pytest.mark.parametrize("optimizer", [toy.sgd(), toy.adam()], ids=["sgd", "adam"])
@pytest.mark.parametrize("servers", [1, 2])
def test_optimizer_state_equals_that_of_one_worker_and_can_be_restored(
    optimizer: toy.MakeOptimizer, servers: int
) -> None:
    """Six steps are bit-identical with and without a restore into new servers after three."""

    def first_half(strategy: ParameterServer) -> tuple[dict[str, Any], dict[str, Any]]:
        toy.train(strategy, range(3))
        return strategy.checkpoint.model_state_dict(), strategy.checkpoint.optimizer_state_dict()

    make = lambda: ParameterServer(servers=servers)  # noqa: E731
    model, state = with_servers(2, make, optimizer, first_half)[0]

    def second_half(strategy: ParameterServer) -> Tensor:
        strategy.checkpoint.load_model_state_dict(model)
        strategy.checkpoint.load_optimizer_state_dict(state)
        toy.train(strategy, range(3, 6))
        return toy.weights_of(strategy.replica)

    assert torch.equal(
        with_servers(2, make, optimizer, second_half)[0], in_step(2, servers, 6, optimizer)[0]
    )

    def reference(communicator: Communicator) -> dict[str, Any]:
        single = SingleProcess()
        single.setup(toy.replica(communicator, optimizer))
        toy.train(single, range(3))
        return single.checkpoint.optimizer_state_dict()

    expected = in_process.run(1, reference)[0]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(state["state"][number][name], value, rtol=1e-4, atol=1e-6)


def train_asynchronously(
    workers: int,
    iterations: int,
    optimizer: toy.MakeOptimizer,
    shares_memory: Callable[[int], bool] = is_even,
    **options: Any,
) -> list[tuple[Tensor, dict[str, list[int]], dict[str, Any]]]:
    """Each worker requests, computes and pushes parts until the end."""

    def work(strategy: ParameterServer) -> tuple[Tensor, dict[str, list[int]], dict[str, Any]]:
        own = strategy.replica
        terms = AssignmentRequest(first=0, total=iterations, checkpoint_every=0, stop=False)
        while (turn := strategy.next_assignment(terms)).action == "train":
            toy.compute(strategy, turn.iteration, turn.part, [1.0] * workers)
            time.sleep(0.002 * own.communicator.rank)
            strategy.step()
        strategy.finish()
        return toy.weights_of(own), strategy.staleness.take(), strategy.staleness.summary()

    make = lambda: ParameterServer(**options)  # noqa: E731
    return with_servers(workers, make, optimizer, work, shares_memory=shares_memory)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_is_one_request_and_one_reply_per_server(
    mode: Literal["sync", "async"], servers: int
) -> None:
    """Counted by the worker, whose replies have all weights."""

    def work(strategy: ParameterServer) -> list[tuple[int, int]]:
        counted = [server.traffic.counts for server in strategy.replica.servers]

        def totals() -> list[tuple[int, int]]:
            return [
                (sum(count.messages for count in each.values()), each["parameters"].bytes_received)
                for each in counted
            ]

        terms = AssignmentRequest(first=0, total=9, checkpoint_every=0, stop=False)
        for step in range(3):
            before = totals()
            if not strategy.synchronous:
                strategy.next_assignment(terms)
            toy.compute(strategy, step, 0, [1.0])
            strategy.step()
        after = totals()
        strategy.finish()
        return [(new[0] - old[0], new[1] - old[1]) for new, old in zip(after, before, strict=True)]

    make = lambda: ParameterServer(mode=mode, servers=servers)  # noqa: E731
    (counts,) = with_servers(1, make, toy.sgd(), work)
    assert [messages for messages, _ in counts] == [1] * servers
    assert sum(size for _, size in counts) == 4 * (5 * 4 + 4 + 4 * 3 + 3)


def test_staleness_of_a_step_is_recorded_before_the_next_one() -> None:
    """Events are written between the step and the request that would take its gradient along."""

    def work(strategy: ParameterServer) -> list[dict[str, list[int]]]:
        terms = AssignmentRequest(first=0, total=2, checkpoint_every=0, stop=False)
        records = []
        while strategy.next_assignment(terms).action == "train":
            toy.compute(strategy, 0, 0, [1.0])
            strategy.step()
            records.append(strategy.staleness.take())
        strategy.finish()
        return records

    (records,) = with_servers(1, lambda: ParameterServer(mode="async"), toy.sgd(), work)
    assert [record["batch"] for record in records] == [[0], [1]]


@pytest.mark.parametrize("optimizer", [toy.sgd(), toy.adam()], ids=["sgd", "adam"])
def test_one_asynchronous_worker_trains_like_a_single_process(optimizer: toy.MakeOptimizer) -> None:
    ((weights, _, account),) = train_asynchronously(1, 5, optimizer, mode="async", servers=2)
    torch.testing.assert_close(weights, alone(5, optimizer), rtol=1e-5, atol=1e-6)
    assert account["staleness"]["behind"]["max"] == 0


@pytest.mark.parametrize("options", [{"mode": "async"}, {"mode": "bounded", "staleness": 1}])
def test_asynchronous_workers_compute_every_part_once_and_end_equal(
    options: dict[str, Any],
) -> None:
    results = train_asynchronously(3, 12, toy.sgd(), servers=2, **options)
    assigned = [
        pair for _, notes, _ in results for pair in zip(notes["batch"], notes["part"], strict=True)
    ]
    assert sorted(assigned) == [(batch, part) for batch in range(12) for part in range(3)]
    assert all(torch.equal(weights, results[0][0]) for weights, _, _ in results)


@pytest.mark.parametrize("staleness", [0, 2])
def test_recorded_staleness_never_exceeds_the_bound(staleness: int) -> None:
    results = train_asynchronously(3, 12, toy.sgd(), mode="bounded", staleness=staleness)
    for _, notes, account in results:
        assert max(notes["ahead"]) <= staleness
        assert account["staleness"]["ahead"]["max"] == max(notes["ahead"])
        histogram = account["staleness"]["behind"]["histogram"]
        assert sum(histogram.values()) == len(notes["behind"])


def test_asynchronous_update_is_weighted_by_its_samples() -> None:
    """With plain SGD, the updates of two parts of a batch add up to that of the batch."""
    (first, _, _), _ = train_asynchronously(2, 1, toy.sgd(rate=1e-3, momentum=0.0), mode="async")
    torch.testing.assert_close(first, alone(1, toy.sgd(rate=1e-3, momentum=0.0)), atol=1e-6, rtol=0)


def test_worker_that_exits_early_fails_the_barrier_of_the_others() -> None:
    """The worker is lost between the last step and the final checkpoint."""

    def work(strategy: ParameterServer) -> str:
        strategy.finish()
        if strategy.replica.communicator.rank == 1:
            strategy.replica.servers[0].close()
            return ""
        with pytest.raises(PeerError) as failure:
            strategy.checkpoint.optimizer_state_dict()
        return str(failure.value)

    cause, _ = with_servers(2, ParameterServer, toy.sgd(), work)
    assert cause == "rank 0: server 0: the connection was closed"


@pytest.mark.parametrize(("option", "value"), [("servers", 0), ("staleness", -1)])
def test_invalid_options_are_rejected(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"-o {option}: must be at least"):
        ParameterServer(**{option: value})  # type: ignore[arg-type]  # as given on the command line


def test_servers_are_placed_on_the_first_node_or_spread() -> None:
    assert ParameterServer(servers=3).server_nodes(2) == [0, 0, 0]
    assert ParameterServer(servers=3, place="spread").server_nodes(2) == [0, 1, 0]


def train(out: Path, name: str, **settings: Any) -> tuple[RunFolder, Result]:
    config = from_mapping({**SMALL, "out": str(out), "name": name, **settings})
    folder, result, code = launcher.train(config, quiet=True)
    assert result is not None
    assert code == 0, result["cause"]
    return folder, result


def test_synchronous_processes_match_one_worker_and_resume_bit_identically(
    tmp_path: Path,
) -> None:
    """Compares seven iterations with a resume from the checkpoint of iteration 4."""
    folder, whole = train(tmp_path, "whole", iterations=7, checkpoint_every=4)
    settings = {"strategy": "single", "nproc_per_node": 1}
    _, single = train(tmp_path, "single", iterations=7, **settings)
    assert whole["final"]["test_loss"] == pytest.approx(single["final"]["test_loss"], rel=1e-5)
    assert len(whole["workers"]) == 2
    _, again, _ = launcher.resume(str(folder.path), {"iterations": 7}, quiet=True)
    assert again is not None
    assert again["weights_sha256"] == whole["weights_sha256"]


def test_asynchronous_processes_use_every_sample_once_and_record_staleness(tmp_path: Path) -> None:
    """Includes a checkpoint, which synchronizes all workers."""
    folder, result = train(
        tmp_path, "bounded", epochs=3, options={"mode": "bounded", "staleness": "2"},
        eval_every=5, checkpoint_every=6, slow="1=2",
    )  # fmt: skip
    assert result["samples"] == 3 * 64
    assert result["iterations"] == 12
    assert result["checkpoints"]["count"] == 2
    assert result["history"][-1]["iteration"] == 12
    assigned = []
    for rank, worker in enumerate(result["workers"]):
        blocks = [e for e in read_lines(folder.events_file(rank)) if e["event"] == "iterations"]
        assigned += [p for e in blocks for p in zip(e["batch"], e["part"], strict=True)]
        ahead = [value for e in blocks for value in e["ahead"]]
        assert max(ahead) <= 2
        assert worker["staleness"]["ahead"]["max"] == max(ahead)
    assert sorted(assigned) == [(batch, part) for batch in range(12) for part in range(2)]
    _, more, _ = launcher.resume(str(folder.path), {"epochs": 4}, quiet=True)
    assert more is not None
    assert more["samples"] == 4 * 64


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_reaching_the_target_at_a_due_checkpoint_ends_the_run(mode: str, tmp_path: Path) -> None:
    """Rank 0 evaluates while rank 1 requests the batch after the checkpoint."""
    _, result = train(
        tmp_path, "target", epochs=1000, options={"mode": mode}, eval_every=4, checkpoint_every=4,
        target_accuracy=0.001, test_samples=2000, timeout_seconds=15,
    )  # fmt: skip
    assert result["status"] == "finished"
    assert result["seconds_to_target"] is not None
    assert result["iterations"] < 1000


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_divergence_at_a_due_checkpoint_is_the_reported_cause(mode: str, tmp_path: Path) -> None:
    settings = {
        **SMALL, "out": str(tmp_path), "name": "diverged", "iterations": 1000, "lr": 1e9,
        "options": {"mode": mode}, "eval_every": 2, "checkpoint_every": 2, "timeout_seconds": 15,
    }  # fmt: skip
    _, result, code = launcher.train(from_mapping(settings), quiet=True)
    assert result is not None
    assert (result["status"], code) == ("diverged", 1)


def flags() -> list[str]:
    """Return the settings as command-line flags."""
    named = {key: value for key, value in SMALL.items() if key != "tensorboard"}
    return ["--no-tensorboard", *(f"--{k.replace('_', '-')}={v}" for k, v in named.items())]


def running(starter: PrewarmedStarter, out: Path, name: str, *more: str) -> subprocess.Popen[str]:
    command = ["-m", "paceline", "train", "--quiet", *flags(), *more]
    return starter.start([*command, "--out", str(out), "--name", name])


def children(process: subprocess.Popen[str], role: str) -> Iterator[psutil.Process]:
    for child in psutil.Process(process.pid).children():
        if child.name().startswith(role):
            yield child


def wait_until_training(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(e["event"] == "iterations" for e in read_lines(folder / "events-0.jsonl")):
            return
        time.sleep(0.05)
    raise TimeoutError("the run did not begin to train within a minute")


def test_killed_server_fails_the_run_with_an_error_that_names_it(
    starter: PrewarmedStarter, tmp_path: Path
) -> None:
    process = running(starter, tmp_path, "killed", "--iterations=1000000", "-o", "mode=async")
    wait_until_training(tmp_path / "killed")
    (server,) = children(process, "server")
    server.send_signal(signal.SIGKILL)
    assert process.wait(60) == 1
    result = RunFolder.open(tmp_path / "killed").read_result()
    assert result is not None
    assert (result["status"], result["cause"]) == ("failed", "server 0 was killed by SIGKILL")


@pytest.mark.parametrize("more", [[], ["--checkpoint-every=1", "--eval-every=1"]])
def test_asynchronous_run_stops_on_request_with_its_servers(
    more: list[str], starter: PrewarmedStarter, tmp_path: Path
) -> None:
    options = ["--iterations=1000000", "-o", "mode=bounded", "--timeout-seconds=15", *more]
    process = running(starter, tmp_path, "stopped", *options)
    wait_until_training(tmp_path / "stopped")
    servers = list(children(process, "server"))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    result = RunFolder.open(tmp_path / "stopped").read_result()
    assert result is not None
    assert result["status"] == "stopped"
    assert result["samples"] == 16 * result["iterations"]
    assert not [server for server in servers if server.is_running()]


def test_first_worker_of_a_node_starts_its_servers_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    command = [*torchrun, f"--master-port={free_port()}", "-m", "paceline", "train", "--quiet"]
    command += [*flags(), "--iterations=3", "--out", str(tmp_path), "--name", "hosted"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    result = RunFolder.open(tmp_path / "hosted").read_result()
    assert result is not None
    assert (result["status"], result["samples"]) == ("finished", 3 * 16)
    assert not list((tmp_path / "hosted").glob("launch-*.json"))
