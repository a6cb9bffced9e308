"""Exchange between workers that share one GPU: GPU memory (CUDA IPC) against gloo.

Both transports run in the same processes, in alternating order. A sample is the slowest worker's
time from a barrier until its GPU has the result; "pipelined" is the time per operation of several
that are submitted without waiting for the GPU. Also times training steps of resnet18.

    python benchmarks/gpu_exchange.py [--workers 2] [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not list it
from torch.multiprocessing.spawn import spawn

from paceline.comm.communicator import Communicator
from paceline.comm.objects import all_gather_scalars
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.shared_gpu import SharedGpuCommunicator
from paceline.comm.shared_gpu import connect as connect_shared
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.models.build import build_model

SIZES = tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24, 26))
PIPELINED = 4
GPU = torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    spawn(run_worker, (arguments,), nprocs=arguments.workers)


def run_worker(rank: int, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(GPU)
    rendezvous = Rendezvous(rank, arguments.workers, "127.0.0.1", arguments.port)
    with connect_shared(rendezvous, GPU, timeout_seconds=120.0) as shared:
        assert shared.shares_memory, "the workers cannot share GPU memory"
        with over_gloo(shared) as gloo:
            transports: dict[str, Communicator] = {"ipc": shared, "gloo": gloo}
            table = [time_size(transports, size, arguments.repeats) for size in SIZES]
            steps = time_steps(transports, arguments.steps)
        shared.barrier().wait()
    if rank == 0:
        show(table, steps, arguments)


def over_gloo(shared: SharedGpuCommunicator) -> TorchCommunicator:
    """Connect the same ranks through CPU memory."""
    return TorchCommunicator(
        PrefixStore("gloo-only", shared._store),
        shared.rank,
        shared.world_size,
        address=shared._address,
        timeout_seconds=120.0,
    )


def time_size(transports: dict[str, Communicator], size_bytes: int, repeats: int) -> dict[str, Any]:
    tensor = torch.ones(size_bytes // 4, device=GPU)
    alone: dict[str, list[float]] = {name: [] for name in transports}
    pipelined: dict[str, list[float]] = {name: [] for name in transports}
    for repeat in range(-2, repeats):
        for name in sorted(transports, reverse=repeat % 2 == 1):
            first = time_batch(transports[name], tensor, 1)
            several = time_batch(transports[name], tensor, PIPELINED)
            if repeat >= 0:
                alone[name].append(first)
                pipelined[name].append(several)
    return {"bytes": size_bytes, "alone": alone, "pipelined": pipelined}


def time_batch(communicator: Communicator, tensor: Tensor, count: int) -> float:
    """Return the seconds per all-reduce of the slowest worker."""
    tensor.zero_()
    torch.cuda.synchronize()
    control = torch.zeros(1)
    communicator.all_reduce(control, "control").wait()
    began = perf_counter()
    for _ in range(count):
        communicator.all_reduce(tensor, "gradients").wait()
    torch.cuda.synchronize()
    return slowest(communicator, (perf_counter() - began) / count)


def slowest(communicator: Communicator, seconds: float) -> float:
    own = torch.tensor(seconds, dtype=torch.float64)
    return float(all_gather_scalars(communicator, own).max())


def time_steps(transports: dict[str, Communicator], steps: int) -> dict[str, list[float]]:
    """Return the seconds of training steps of resnet18 (batch 128 per worker, bf16)."""
    step = training_step()
    seconds: dict[str, list[float]] = {"no exchange": [], **{name: [] for name in transports}}
    control = transports["gloo"]
    for repeat in range(-3, steps):
        for name in seconds:
            torch.cuda.synchronize()
            control.barrier().wait()
            began = perf_counter()
            step(transports.get(name))
            torch.cuda.synchronize()
            measured = slowest(control, perf_counter() - began)
            if repeat >= 0:
                seconds[name].append(measured)
    return seconds


def training_step() -> Callable[[Communicator | None], None]:
    model = build_model("resnet18", (3, 32, 32), 10, seed=0).to(GPU)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    weights = list(model.parameters())
    flat = torch.zeros(sum(weight.numel() for weight in weights), device=GPU)
    views = flat.split([weight.numel() for weight in weights])
    optimizer = torch.optim.SGD(weights, lr=0.0, fused=True)
    images = torch.randn(128, 3, 32, 32, device=GPU).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (128,), device=GPU)

    def step(communicator: Communicator | None) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        if communicator is not None:
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            torch._foreach_copy_(
                list(views),
                [gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients],
            )
            communicator.all_reduce(flat, "gradients").wait()
        optimizer.step()
        optimizer.zero_grad()

    return step


def show(
    table: list[dict[str, Any]], steps: dict[str, list[float]], arguments: argparse.Namespace
) -> None:
    properties = torch.cuda.get_device_properties(GPU)
    print(f"{properties.name}, torch {torch.__version__}, {arguments.workers} workers on one GPU")
    print(f"all-reduce, n = {arguments.repeats}, median (min-max) in us; ratio of medians")
    print(f"{'bytes':>10} {'ipc':>22} {'gloo':>24} {'ratio':>6} {'pipelined ipc, gloo':>22} ratio")
    for row in table:
        alone, pipelined = row["alone"], row["pipelined"]
        print(
            f"{row['bytes']:>10} {spread(alone['ipc']):>22} {spread(alone['gloo']):>24}"
            f" {ratio(alone):>6.1f}"
            f" {micros(pipelined['ipc']):>10} {micros(pipelined['gloo']):>10}"
            f" {ratio(pipelined):.1f}"
        )
    print(f"resnet18 step, batch 128 per worker, bf16, n = {arguments.steps}, median (min-max) us")
    for name, seconds in steps.items():
        print(f"{name:>12} {spread(seconds)}")
    medians = {name: statistics.median(seconds) for name, seconds in steps.items()}
    exchange = {name: medians[name] - medians["no exchange"] for name in ("ipc", "gloo")}
    print(f"added by the exchange: {exchange['ipc'] * 1e6:.0f} us, {exchange['gloo'] * 1e6:.0f} us")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"all_reduce": table, "steps": steps}))


def ratio(samples: dict[str, list[float]]) -> float:
    return statistics.median(samples["gloo"]) / statistics.median(samples["ipc"])


def micros(samples: list[float]) -> str:
    return f"{statistics.median(samples) * 1e6:.0f}"


def spread(samples: list[float]) -> str:
    return f"{micros(samples)} ({min(samples) * 1e6:.0f}-{max(samples) * 1e6:.0f})"


if __name__ == "__main__":
    main()
