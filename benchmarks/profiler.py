"""Overhead of `paceline profile`: step time with and without the profiler.

    python benchmarks/profiler.py [--quick] [--models lenet,resnet18] [--workers 2] [--hooks]

A script trains with DistributedDataParallel over gloo. The profiler is attached in every other
block of steps, in the same processes. The overhead is the increase in wall time and in CPU time of
all threads, as a share of the step, over paired blocks: the median and its 95% confidence interval.
Other load on the machine disturbs wall time much more than CPU time. `stated` is what the profiler
itself says in the record. With `--hooks`, each kind of hook is also left out in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from common.stats import median_interval
from paceline.measure.machine import hardware, software
from paceline.models.build import build_model
from paceline.profiler.collectives.recorder import CollectiveRecorder
from paceline.profiler.rank_log import RankLog
from paceline.profiler.session import Session
from paceline.profiler.tracking.hooks import Hooks
from paceline.profiler.tracking.script_calls import ScriptCalls

PAIRS, QUICK_PAIRS = 40, 10

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
    """Per block: more than half a second, after which the profiler writes a block of records."""
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    has_tokens: bool = False


CASES = {
    "softmax": Case(400, 16, (1, 28, 28)),
    "lenet": Case(160, 16, (1, 28, 28)),
    "resnet18": Case(2, 8, (3, 32, 32)),
    "gpt-nano": Case(70, 4, (64,), 256, has_tokens=True),
}


class Block(NamedTuple):
    """Seconds per step."""

    wall: float
    cpu: float
    stated: float = 0.0


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
    print("increase of a step: median [95% confidence interval]\n")
    print(
        f"{'model':10} {'step, ms':>8} {'without':>19} {'wall, %':>20} {'wall, us':>20}"
        f" {'CPU, %':>20} {'CPU, us':>20} {'stated, %':>9}"
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
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    run = _training(name, CASES[name])
    run(CASES[name].steps)
    for variant in variants:
        plain: list[Block] = []
        profiled: list[Block] = []
        for pair in range(pairs):
            # Whichever comes second could profit from a warm cache.
            for is_profiled in (False, True) if pair % 2 else (True, False):
                if is_profiled:
                    with _attached(Path(folder), variant) as session:
                        profiled.append(_block(run, CASES[name].steps, session))
                else:
                    plain.append(_block(run, CASES[name].steps))
        _print(rank, workers, name, variant, plain, profiled)
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


def _block(run: Callable[[int], None], steps: int, session: Session | None = None) -> Block:
    # The profiler creates its files in the first steps.
    run(min(steps, 10))
    dist.barrier()
    stated = 0.0 if session is None else session.log.costs.seconds(session.tracker)
    wall, cpu = perf_counter(), process_time()
    run(steps)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    if session is not None:
        stated = session.log.costs.seconds(session.tracker) - stated
    return Block(wall / steps, cpu / steps, stated / steps)


def _print(
    rank: int, workers: int, name: str, variant: str, plain: list[Block], profiled: list[Block]
) -> None:
    """Of each pair, the mean over ranks."""
    gathered: list[Any] = [None] * workers
    dist.all_gather_object(gathered, (plain, profiled))
    if rank:
        return
    before, after = (
        torch.tensor([ranks[part] for ranks in gathered], dtype=torch.float64).mean(0)
        for part in (0, 1)
    )
    step = before[:, 0].median().item()
    columns = []
    for unit in (0, 1):
        increase = (after[:, unit] - before[:, unit]).tolist()
        columns.append(median_interval([100 * each / step for each in increase]))
        columns.append(median_interval([1e6 * each for each in increase], 0))
    stated = 100 * statistics.median((after[:, 2] / after[:, 0]).tolist())
    print(
        f"{name:10} {1e3 * step:8.3f} {variant:>19} "
        + " ".join(f"{column:>20}" for column in columns)
        + f" {stated:>9.2f}",
        flush=True,
    )


def _training(name: str, case: Case) -> Callable[[int], None]:
    """A loop as users write it, of a given number of steps."""
    model: nn.Module = build_model(
        name, case.shape, case.classes, seed=0, has_tokens=case.has_tokens
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples = case.batch * case.steps
    inputs = torch.rand(samples, *case.shape)
    targets: Tensor = torch.randint(case.classes, (samples,))
    if case.has_tokens:
        inputs = torch.randint(case.classes, (samples, *case.shape))
        targets = torch.randint(case.classes, (samples, *case.shape))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=case.batch)

    def run(steps: int) -> None:
        for _, (batch, labels) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            outputs = model(batch)
            loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
