"""Phases of `paceline profile` against those of `paceline.join`, on the same training.

    python benchmarks/profiler_against_join.py [--repeats 15] [--models lenet,gpt-nano,resnet18]
                                               [--hook]

A loop with DistributedDataParallel that knows nothing of paceline is profiled, and the same
training is run with `paceline.join(strategy="ddp")`, by turns and in the same processes: two
workers over gloo, one thread each, batches from the same DataLoader. Both exchange the numbers of
samples during the forward pass, by which losses are weighted. A difference is that of a phase's
share of the step time, in percentage points: the median over pairs of runs. Runs are short, so
that both of a pair see the same machine. Loss and gradient traffic must be equal.

The script calls a collective in each step, so each of its steps is recorded in full.
The strategy `ddp` of join replaces DDP's all-reduce by a hook in Python, which takes time while the
program waits: part of a difference in `exchange` is that. With --hook, the script has one, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from common.stats import min_max
from paceline.analysis.phases import run_iteration_breakdown
from paceline.analysis.run import open_run
from paceline.measure.machine import hardware, software
from paceline.models.build import build_model

KINDS = ("join", "profile")
PHASES = ("input", "forward", "backward", "exchange", "wait", "update", "other")
Loader = DataLoader[tuple[Tensor, ...]]
GOAL = 3.0
"""Percentage points."""


class Case(NamedTuple):
    steps: int
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    has_tokens: bool = False


CASES = {
    "lenet": Case(600, 64, (1, 28, 28)),
    "gpt-nano": Case(300, 8, (64,), 256, has_tokens=True),
    "resnet18": Case(12, 8, (3, 32, 32)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--hook", action="store_true", help="DDP with a communication hook")
    parser.add_argument("--json", type=Path, help="file for all values")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train_by_turns(options.models, options.repeats, options.out, has_hook=options.hook)
        return
    machine, versions = hardware(), software()
    print(f"{machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}")
    print(f"shares of the step time in %, medians of {options.repeats} runs each\n")
    print(f"{'':16} {'':8}" + "".join(f"{name:>16}" for name in PHASES) + f"{'step':>12}")
    values: dict[str, Any] = {}
    for name in options.models.split(","):
        values[name] = compare(name, options.repeats, has_hook=options.hook)
    if options.json:
        options.json.write_text(json.dumps(values, indent=1))


def compare(name: str, repeats: int, *, has_hook: bool) -> dict[str, Any]:
    shares: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [__file__, "--models", name, "--repeats", str(repeats), "--out", folder]
        script += ["--hook"] if has_hook else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, *script]
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        for repeat in range(repeats):
            for kind in KINDS:
                shares[kind].append(shares_of(Path(folder) / f"{kind}-{repeat}"))
            check_equal([Path(folder) / f"{kind}-{repeat}" for kind in KINDS])
    for kind, runs in shares.items():
        medians = {each: statistics.median(one[each] for one in runs) for each in runs[0]}
        row = "".join(f"{medians[phase]:>16.2f}" for phase in PHASES)
        print(f"{name:16} {kind:8}{row}{medians['step_ms']:>9.2f} ms", flush=True)
    pairs = list(zip(shares["profile"], shares["join"], strict=True))
    differences = {phase: [one[phase] - other[phase] for one, other in pairs] for phase in PHASES}
    row = "".join(f"{min_max(values, '+.1f'):>16}" for values in differences.values())
    largest = max(abs(statistics.median(values)) for values in differences.values())
    verdict = "within" if largest <= GOAL else "MORE THAN"
    print(f"{'':16} {'':8}{row}   {verdict} {GOAL:.0f} points\n", flush=True)
    return {"runs": shares, "differences": differences}


def shares_of(path: Path) -> dict[str, float]:
    split = run_iteration_breakdown(open_run(path))
    assert split is not None, f"{path} has no steps"
    shares = {phase: 100 * split.share(phase) for phase in PHASES}
    return {**shares, "step_ms": 1e3 * split.total}


def check_equal(folders: list[Path]) -> None:
    """Both trained the same."""
    one, other = (json.loads((folder / "result.json").read_text()) for folder in folders)
    losses = [result["final"]["train_loss"] for result in (one, other)]
    sent = [result["workers"][0]["traffic"]["gradients"]["bytes_sent"] for result in (one, other)]
    assert one["iterations"] == other["iterations"], (one["iterations"], other["iterations"])
    assert abs(losses[0] - losses[1]) < 1e-5, losses
    assert sent[0] == sent[1], sent


def model_of(name: str) -> nn.Module:
    case = CASES[name]
    model: nn.Module = build_model(
        name, case.shape, case.classes, seed=0, has_tokens=case.has_tokens
    )
    return model


def dataset_of(case: Case) -> TensorDataset:
    torch.manual_seed(1)
    samples = case.batch * case.steps
    if case.has_tokens:
        inputs, targets = torch.randint(case.classes, (2, samples, *case.shape))
        return TensorDataset(inputs, targets)
    return TensorDataset(torch.rand(samples, *case.shape), torch.randint(case.classes, (samples,)))


def loader_of(case: Case, rank: int) -> Loader:
    data = dataset_of(case)
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, rank, shuffle=False)
    return DataLoader(data, batch_size=case.batch // 2, sampler=sampler)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train_by_turns(model: str, repeats: int, out: str, *, has_hook: bool) -> None:
    rank = int(os.environ["RANK"])
    loader = loader_of(CASES[model], rank)
    for repeat in range(repeats):
        for kind in KINDS if repeat % 2 else KINDS[::-1]:
            name = f"{kind}-{repeat}"
            if kind == "join":
                train_with_join(model_of(model), loader, out, name)
                continue
            with paceline.profile(out=out, name=name):
                store = f"file://{out}/store-{repeat}"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
                train_as_script(model_of(model), loader, has_hook=has_hook)
                dist.destroy_process_group()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_as_script(model: nn.Module, loader: Loader, *, has_hook: bool) -> None:
    """As users write it."""
    # As in join, which averages buffers for evaluation only.
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = optimizer_of(model)
    if has_hook:
        replica.register_comm_hook(None, allreduce_hook)
    for inputs, targets in loader:
        samples = torch.tensor([len(inputs)], dtype=torch.float64)
        counting = dist.all_reduce(samples, async_op=True)
        loss = loss_of(replica(inputs), targets)
        counting.wait()
        # DDP averages over the ranks.
        (loss * (2 * len(inputs) / samples.item())).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_join(model: nn.Module, loader: Loader, out: str, name: str) -> None:
    with paceline.join(strategy="ddp", out=out, name=name) as team:
        trained, _, batches = team.prepare(model, optimizer_of(model), loader)
        for inputs, targets in batches:
            team.backward(loss_of(trained(inputs), targets))
            team.step()


if __name__ == "__main__":
    main()
