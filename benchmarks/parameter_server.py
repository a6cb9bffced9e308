"""Step time of the parameter server, compared with all-reduce, PyTorch's RPC and another version.

    python benchmarks/parameter_server.py [--quick] [--models softmax,lenet] [--rounds 9]
    python benchmarks/parameter_server.py --before DIR [--repeats 3]

Without `--before`: two worker processes of one thread and a process with the servers. All
contenders are set up side by side and alternate in short blocks of steps, so that background load
affects all of them equally. They share model, batch, optimizer and loop:

- `allreduce`: `allreduce -o flat=true`, over gloo, without a server
- `server/sync`, `server/async`: `parameter_server`
- `rpc/sync`, `rpc/async`: the batch-updating parameter server of PyTorch's RPC tutorial, with one
  flat tensor per message and the same optimizer step

With `--before DIR`, a checkout of an earlier version with its `.venv`: complete runs of both
versions alternate, on an emulated node of half a core (softmax), and with two local workers. Their
weights must be equal for synchronous runs. Requires root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

import strategies
from common.stats import min_max, quartiles
from paceline.comm.communicator import Communicator
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.torch_distributed import connect
from paceline.measure.machine import hardware, software
from paceline.strategies import create_strategy
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.optimizer_step import FusedSgdStep
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy

WORKERS = 2
BATCH_PER_WORKER = 64
REFERENCE = "allreduce"
CONTENDERS = (REFERENCE, "server/sync", "server/async", "rpc/sync", "rpc/async")
SERVER_NAME = "server"
SOFTMAX = "--model softmax --data plain_digits --train-samples 4096 --batch-per-worker 128"
LOCAL = "--data digits --train-samples 8192 --batch-size 128 --nproc-per-node 2"
COMMON = "--quiet --threads 1 --device cpu --test-samples 200 --eval-every never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and repeats")
    parser.add_argument("--models", type=strategies.comma_separated, default=["softmax", "lenet"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--only", default="", help="cases of --before that contain this text")
    options = parser.parse_args()
    print(f"{hardware()['cpu']}, {os.cpu_count()} cores, torch {software()['torch']}")
    if options.before is not None:
        compare_versions(
            options.before, options.repeats or (1 if options.quick else 3), options.only
        )
    else:
        compare_contenders(options.models, options.rounds or (3 if options.quick else 9))


def compare_contenders(models: list[str], rounds: int) -> None:
    print(f"{WORKERS} workers, batch of {BATCH_PER_WORKER} each, {rounds} blocks per contender")
    with strategies.workers(WORKERS + 1, run_process) as pipes:
        for model in models:
            ports = strategies.free_port(), strategies.free_port()
            for rank, pipe in enumerate(pipes):
                pipe.send((rank, ports, model, rounds))
            blocks, *_ = [pipe.recv() for pipe in pipes]
            print(f"\n{model}: ms per step of rank 0, median (quartiles)")
            print(f"{'contender':14}{'ms':>24}{f'to {REFERENCE}':>24}")
            for name, seconds in blocks.items():
                ratios = [
                    own / other for own, other in zip(seconds, blocks[REFERENCE], strict=True)
                ]
                milliseconds = quartiles(1e3 * each for each in seconds)
                print(f"{name:14}{milliseconds:>24}{quartiles(ratios):>24}")


def run_process(pipe: Pipe) -> None:
    """Run the servers (the last rank) or a worker, for one model after the other."""
    torch.set_num_threads(1)
    while True:
        try:
            rank, ports, model, rounds = pipe.recv()
        except EOFError:
            return
        all_processes = Rendezvous(
            rank, WORKERS + 1, "127.0.0.1", ports[0], name="all_processes"
        ).join()
        modes = tuple(name for name in CONTENDERS if name in strategies.MODES)
        cell = strategies.Cell(model, modes, BATCH_PER_WORKER, rounds)
        rpc.init_rpc(
            SERVER_NAME if rank == WORKERS else f"worker{rank}",
            rank=rank,
            world_size=WORKERS + 1,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"tcp://127.0.0.1:{ports[1]}", rpc_timeout=600
            ),
        )
        if rank == WORKERS:
            strategies.host_servers(all_processes, WORKERS, cell)
            pipe.send(None)
        else:
            own = Rendezvous(
                rank, WORKERS, "127.0.0.1", ports[0], serves_store=False, name="workers"
            )
            with (
                connect(own) as communicator,
                strategies.servers_of(all_processes, communicator, cell) as servers,
            ):
                contenders = {
                    name: strategies.attach(
                        communicator,
                        create(name),
                        model,
                        [servers[name]] if name in servers else [],
                    )
                    for name in CONTENDERS
                }
                pipe.send(measure(communicator, contenders, rounds))
                for strategy in contenders.values():
                    strategy.finish()
                communicator.barrier().wait()
        rpc.shutdown()
        SERVERS.clear()


def create(name: str) -> Strategy:
    if name == REFERENCE:
        return create_strategy("allreduce", {"flat": "true"})
    if name.startswith("rpc/"):
        return RpcParameterServer(name)
    return strategies.create(name)


def measure(
    communicator: Communicator, contenders: dict[str, Strategy], rounds: int
) -> dict[str, list[float]]:
    """Return the median step time of each block."""
    generator = torch.Generator().manual_seed(communicator.rank)
    inputs = torch.randn(BATCH_PER_WORKER, *strategies.SHAPE, generator=generator)
    labels = torch.randint(strategies.CLASSES, (BATCH_PER_WORKER,), generator=generator)
    steps = {}
    for name, strategy in contenders.items():
        seconds = statistics.median(strategies.update(strategy, inputs, labels) for _ in range(10))
        slowest = torch.tensor([seconds], dtype=torch.float64)
        communicator.all_reduce(slowest, "control").wait()
        steps[name] = max(5, round(strategies.SECONDS_PER_BLOCK * WORKERS / float(slowest)))
    blocks: dict[str, list[float]] = {name: [] for name in contenders}
    names = tuple(contenders)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            communicator.barrier().wait()
            began = perf_counter()
            for _ in range(steps[name]):
                strategies.update(contenders[name], inputs, labels)
            blocks[name].append((perf_counter() - began) / steps[name])
    return blocks


class RpcServer:
    """Weights and optimizer in the server process; after PyTorch's batch RPC tutorial."""

    def __init__(self, weights: Tensor, is_synchronous: bool) -> None:
        self._weights = nn.Parameter(weights)
        self._step = FusedSgdStep(strategies.optimizer_of([self._weights]))
        self._is_synchronous = is_synchronous
        self._lock = Lock()
        self._future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._gradients: list[Tensor] = []

    def update(self, gradient: Tensor) -> torch.futures.Future[Tensor]:
        with self._lock:
            self._gradients.append(gradient)
            future = self._future
            if not self._is_synchronous or len(self._gradients) == WORKERS:
                first, *others = self._gradients
                for other in others:
                    first.add_(other)
                self._weights.grad = first
                self._step()
                weights = self._weights.detach()
                future.set_result(weights if self._is_synchronous else weights.clone())
                self._gradients, self._future = [], torch.futures.Future()
            return future


SERVERS: dict[str, RpcServer] = {}
"""The servers of this process, by contender."""
_creating = Lock()


def start_rpc_server(name: str, weights: Tensor) -> None:
    with _creating:
        if name not in SERVERS:
            SERVERS[name] = RpcServer(weights.clone(), name == "rpc/sync")


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch has no annotation
def update_on_server(name: str, gradient: Tensor) -> torch.futures.Future[Tensor]:
    return SERVERS[name].update(gradient)


class RpcParameterServer(Strategy):
    """The worker's side: sends the flat gradient, and receives the flat weights."""

    def __init__(self, name: str) -> None:
        self._name = name

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._weights = FlatBuffer(replica.trainable)
        self._weights.hold_weights()
        self._gradients = FlatBuffer(replica.trainable)
        self._gradients.hold_gradients()
        replica.flat_gradients = self._gradients.tensor
        rpc.rpc_sync(SERVER_NAME, start_rpc_server, (self._name, self._weights.tensor))

    def step(self) -> None:
        weights = rpc.rpc_sync(SERVER_NAME, update_on_server, (self._name, self._gradients.tensor))
        self._weights.tensor.copy_(weights)
        self.replica.clear_gradients()


def compare_versions(before: Path, repeats: int, only: str) -> None:
    cases = {
        f"softmax, one node of half a core, {mode}": (
            f"{SOFTMAX} --lr 0.01 --momentum 0 --iterations 100"
            " --cluster nodes=1,cpus=0.5,bandwidth=1gbit"
            f" --strategy parameter_server -o mode={mode}"
        )
        for mode in ("sync", "async")
    }
    cases |= {
        f"{model}, two local workers, {mode}": (
            f"{LOCAL} --model {model} --iterations 300 --strategy parameter_server -o mode={mode}"
        )
        for model in ("softmax", "lenet")
        for mode in ("sync", "async")
    }
    versions: dict[str, Callable[[], list[str]]] = {
        "before": lambda: [str(before / ".venv/bin/python"), "-m", "paceline"],
        "now": lambda: [sys.executable, "-m", "paceline"],
    }
    print(f"median iteration of rank 0 in ms, {repeats} repeats: median (min-max)")
    print(f"{'case':40}{'before':>24}{'now':>22}{'speedup':>22}  weights")
    for case, arguments in cases.items():
        if only not in case:
            continue
        seconds: dict[str, list[float]] = {name: [] for name in versions}
        hashes: set[str] = set()
        for _ in range(repeats):
            for name, program in versions.items():
                result = train(
                    [*program(), "train", *COMMON.split(), *arguments.split()], before, name
                )
                seconds[name].append(1e3 * result["workers"][0]["iteration_seconds"]["median"])
                hashes.add(result["weights_sha256"])
        speedups = [old / new for old, new in zip(*seconds.values(), strict=True)]
        print(
            f"{case:40}{min_max(seconds['before']):>24}{min_max(seconds['now']):>22}"
            f"{min_max(speedups, '.1f'):>22}  {'equal' if len(hashes) == 1 else 'differ'}",
            flush=True,
        )


def train(command: list[str], before: Path, version: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, "--out", folder, "--name", "run"],
            cwd=before if version == "before" else None,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return dict(json.loads((Path(folder) / "run" / "result.json").read_text()))


if __name__ == "__main__":
    main()
