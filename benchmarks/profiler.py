"""Overhead of `paceline profile`: step time with and without the profiler.

    python benchmarks/profiler.py [--quick] [--models lenet,resnet18] [--workers 2] [--hooks]

A script trains with DistributedDataParallel over gloo, each rank on a core of its own. The profiler
is attached in every other block of steps, in the same processes. Steps are not alike: in some of
them, the profiler interprets what it noted, writes a block of records, or records collectives. The
increase of each kind of step over the steps of the paired block without the profiler is a 20%
trimmed mean, since other load on the machine makes some steps much longer. `wall` is the increase
of a mean step: that of each kind, weighted by its share of the steps. `CPU` is the increase in CPU
time of all threads, as the median over pairs. The intervals contain 95% of the values that pairs
drawn at random, with repetition, lead to. `stated` is what the profiler itself says in the record.
With `--hooks`, each kind of hook is also left out in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.measure.machine import hardware, software
from paceline.models.build import build_model
from paceline.profiler.collectives.recorder import CollectiveRecorder
from paceline.profiler.rank_log import RankLog
from paceline.profiler.session import Session
from paceline.profiler.tracking.hooks import Hooks
from paceline.profiler.tracking.script_calls import ScriptCalls

PAIRS, QUICK_PAIRS = 40, 8
"""A pair takes 4 to 6 seconds."""
TRIMMED, RESAMPLES = 0.2, 1000

HOOKS: dict[str, tuple[type, str]] = {
    "modules": (Hooks, "_hook_models"),
    "backward": (Hooks, "_hook_backward"),
    "input": (Hooks, "_hook_input"),
    "optimizers": (Hooks, "_hook_optimizers"),
    "calls of the script": (ScriptCalls, "install"),
    "collectives": (CollectiveRecorder, "install"),
    "event file": (RankLog, "step"),
}
"""Methods without which the profiler still runs."""


class Case(NamedTuple):
    steps: int
    """Per block: 1.5 to 2.5 seconds; a power of two, like the periods of sampled collectives."""
    first_steps: int
    """Of a session, not measured: more than a second, in which the profiler records everything."""
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    has_tokens: bool = False


CASES = {
    "softmax": Case(1024, 900, 16, (1, 28, 28)),
    "lenet": Case(512, 320, 16, (1, 28, 28)),
    "resnet18": Case(6, 2, 8, (3, 32, 32)),
    "gpt-nano": Case(256, 150, 4, (64,), 256, has_tokens=True),
}

KINDS = ("interpreted", "written", "collectives")
"""What the profiler does only in some steps, as bits."""


class Block(NamedTuple):
    """One rank's steps."""

    seconds: list[float]
    kinds: list[int]
    cpu: float
    """Seconds per step, like the rest."""
    stated: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--models", default=",".join(CASES), help="models, separated by commas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hooks", action="store_true", help="leave out each kind of hook in turn")
    options = parser.parse_args()
    machine, versions = hardware(), software()
    pairs = QUICK_PAIRS if options.quick else PAIRS
    print(f"{machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}")
    print(f"{options.workers} workers, one thread each, DDP over gloo; {pairs} pairs of blocks")
    print("increase of a step [95% confidence interval]\n")
    print(
        f"{'model':10} {'step, ms':>8} {'without':>19} {'wall, %':>20} {'wall, us':>20}"
        f" {'CPU, us':>20} {'stated, %':>9}  kinds of steps: share x increase, us"
    )
    variants = ("", *HOOKS) if options.hooks else ("",)
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            spawn(
                _worker,
                (options.workers, name, pairs, variants, folder),
                nprocs=options.workers,
            )


def _worker(
    rank: int, workers: int, name: str, pairs: int, variants: tuple[str, ...], folder: str
) -> None:
    # Threads that are created later inherit it.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    case = CASES[name]
    run = _training(name, case)
    run(case.first_steps, None)
    for variant in variants:
        blocks: tuple[list[Block], list[Block]] = [], []
        for pair in range(pairs):
            # Whichever comes second could profit from a warm cache.
            for is_profiled in (False, True) if pair % 2 else (True, False):
                if is_profiled:
                    with _attached(Path(folder), variant) as session:
                        blocks[1].append(_block(run, case, session))
                else:
                    blocks[0].append(_block(run, case))
        gathered: list[Any] = [None] * workers
        dist.all_gather_object(gathered, blocks)
        if not rank:
            _print(name, variant, gathered)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _attached(folder: Path, variant: str) -> Iterator[Session]:
    with contextlib.ExitStack() as stack:
        if variant:
            stack.enter_context(mock.patch.object(*HOOKS[variant], lambda *_: None))
        session = Session(folder)
        session.start()
        stack.callback(session.close)
        yield session


def _block(run: Callable[..., Steps], case: Case, session: Session | None = None) -> Block:
    run(case.first_steps if session is not None else min(case.first_steps, 10), None)
    dist.barrier()
    stated = 0.0 if session is None else session.log.costs.seconds(session.tracker)
    cpu = process_time()
    steps = run(case.steps, session)
    cpu = process_time() - cpu
    if session is not None:
        stated = session.log.costs.seconds(session.tracker) - stated
    seconds, kinds = zip(*steps, strict=True)
    return Block(list(seconds), list(kinds), cpu / case.steps, stated / case.steps)


class Pair(NamedTuple):
    """Means over ranks."""

    step: float
    increases: np.ndarray
    """Of the steps of the profiled block."""
    kinds: np.ndarray
    cpu: float
    stated: float


def _pairs(gathered: list[tuple[list[Block], list[Block]]]) -> Iterator[Pair]:
    plain, profiled = (zip(*(ranks[part] for ranks in gathered), strict=True) for part in (0, 1))
    for before, after in zip(plain, profiled, strict=True):
        step = _trimmed_mean(np.mean([block.seconds for block in before], axis=0))
        seconds = np.mean([block.seconds for block in after], axis=0)
        # What one rank does, the others wait for.
        kinds = np.bitwise_or.reduce([block.kinds for block in after])
        cpu = np.mean([block.cpu for block in after]) - np.mean([block.cpu for block in before])
        stated = float(np.mean([block.stated for block in after]) / seconds.mean())
        yield Pair(step, seconds - step, kinds, float(cpu), stated)


def _trimmed_mean(values: np.ndarray) -> float:
    cut = int(TRIMMED * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _increase_by_kind(pairs: list[Pair]) -> dict[str, tuple[float, float]]:
    """The share of each kind of step, and its increase."""
    increases = np.concatenate([pair.increases for pair in pairs])
    kinds = np.concatenate([pair.kinds for pair in pairs])
    found = {}
    for kind in np.unique(kinds):
        name = "+".join(name for bit, name in enumerate(KINDS) if kind >> bit & 1) or "others"
        chosen = kinds == kind
        found[name] = float(chosen.mean()), _trimmed_mean(increases[chosen])
    return found


def _increase(pairs: list[Pair]) -> float:
    return sum(share * increase for share, increase in _increase_by_kind(pairs).values())


def _median_cpu(pairs: list[Pair]) -> float:
    return statistics.median(pair.cpu for pair in pairs)


def _print(name: str, variant: str, gathered: list[tuple[list[Block], list[Block]]]) -> None:
    pairs = list(_pairs(gathered))
    step = statistics.median(pair.step for pair in pairs)
    random = np.random.default_rng(0)
    columns = []
    for estimate, scale, digits in (
        (_increase, 100 / step, 2),
        (_increase, 1e6, 0),
        (_median_cpu, 1e6, 0),
    ):
        drawn = [
            estimate([pairs[each] for each in random.integers(len(pairs), size=len(pairs))])
            for _ in range(RESAMPLES)
        ]
        low, high = np.quantile(drawn, (0.025, 0.975)) * scale
        found = estimate(pairs) * scale
        columns.append(f"{found:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
    stated = 100 * statistics.median(pair.stated for pair in pairs)
    parts = (
        f"{kind} {100 * share:.1f}% x {1e6 * increase:.0f}"
        for kind, (share, increase) in _increase_by_kind(pairs).items()
    )
    print(
        f"{name:10} {1e3 * step:8.3f} {variant:>19} "
        + " ".join(f"{column:>20}" for column in columns)
        + f" {stated:>9.2f}  {', '.join(parts)}",
        flush=True,
    )


Steps = list[tuple[float, int]]
"""Seconds and the kind of each step."""


def _activity(session: Session | None) -> tuple[float, ...]:
    """Counts that change with each of `KINDS`."""
    if session is None:
        return (0.0,) * len(KINDS)
    tracker = session.tracker
    return tracker.events.noted, session.log._written, tracker.recorder_seconds


def _training(name: str, case: Case) -> Callable[[int, Session | None], Steps]:
    """A loop as users write it, of a given number of steps."""
    model: nn.Module = build_model(
        name, case.shape, case.classes, seed=0, has_tokens=case.has_tokens
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples = case.batch * max(case.steps, case.first_steps)
    inputs = torch.rand(samples, *case.shape)
    targets: Tensor = torch.randint(case.classes, (samples,))
    if case.has_tokens:
        inputs = torch.randint(case.classes, (samples, *case.shape))
        targets = torch.randint(case.classes, (samples, *case.shape))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=case.batch)

    def run(steps: int, session: Session | None) -> Steps:
        found: Steps = []
        activity, began = _activity(session), perf_counter()
        for _, (batch, labels) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            outputs = model(batch)
            loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
            before, activity, now = activity, _activity(session), perf_counter()
            changed = map(operator.ne, before, activity)
            found.append((now - began, sum(each << bit for bit, each in enumerate(changed))))
            began = now
        return found

    return run


if __name__ == "__main__":
    main()
