"""Overhead of `paceline profile`: step time with and without its hooks.

    python benchmarks/profiler.py [--quick] [--models lenet,resnet18] [--workers 2] [--hooks]

A script trains with DistributedDataParallel over gloo, each rank on a core of its own, as one
session of the profiler. Its hooks are removed and put back every few steps, in random order, so
that the steps with and without them that are compared are milliseconds apart. With root, the ranks
have real-time priority, so other processes disturb them less.

Steps are not alike: in some of them, the profiler interprets what it noted, writes a block of
records, or records collectives. The increase of each kind of step over the steps without hooks of
the same pair is a 20% trimmed mean, since other load makes some steps much longer. The increase of
a mean step, `wall` for its time and `CPU` for the CPU time of all threads, is that of each kind,
weighted by its share of the steps. The intervals contain 95% of the values that pairs drawn at
random, with repetition, lead to. `stated` is what the profiler itself says in the record. With
`--hooks`, each kind of hook is also left out in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import operator
import os
import tempfile
from collections.abc import Iterator, Sequence
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
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset

from paceline.measure.machine import hardware, software
from paceline.models.build import build_model
from paceline.profiler import recording_windows
from paceline.profiler.collectives.recorder import CollectiveRecorder
from paceline.profiler.rank_log import RankLog
from paceline.profiler.session import Session
from paceline.profiler.tracking.hooks import Hooks
from paceline.profiler.tracking.script_calls import ScriptCalls

QUICK = 5
"""How many times fewer pairs."""
LEFT_OUT = 2
"""Steps after a switch: what Python knows about the replaced methods is invalid then."""
BATCHES = 256
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
    pairs: int
    """About a minute, of resnet18 four."""
    steps: int
    """Between two switches. Odd: the profiler interprets events after multiples of powers of two,
    which must not be the steps that are left out."""
    first_steps: int
    """Of a session, not measured: more than a second, in which the profiler records everything."""
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    has_tokens: bool = False


# A step of softmax takes about 1 ms.
CASES = {
    "softmax": Case(1000, 33, 1400, 96, (1, 28, 28)),
    "lenet": Case(500, 17, 400, 16, (1, 28, 28)),
    "resnet18": Case(120, 5, 4, 8, (3, 32, 32)),
    "gpt-nano": Case(400, 9, 200, 8, (64,), 256, has_tokens=True),
}

KINDS = ("interpreted", "written", "collectives")
"""What the profiler does only in some steps, as bits."""

STEP = np.dtype(
    [("pair", int), ("is_profiled", bool), ("kinds", int), ("wall", float), ("cpu", float)]
)


class Measured(NamedTuple):
    """One rank's steps."""

    steps: np.ndarray
    stated: float
    """Seconds per step with hooks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--models", default=",".join(CASES), help="models, separated by commas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hooks", action="store_true", help="leave out each kind of hook in turn")
    options = parser.parse_args()
    machine, versions = hardware(), software()
    print(f"{machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}")
    print(f"{options.workers} workers, one thread each, {_priority()}; DDP over gloo")
    print("increase of a step [95% confidence interval]\n")
    print(
        f"{'model':10} {'step, ms':>8} {'without':>19} {'pairs':>5} {'wall, %':>20}"
        f" {'wall, us':>20} {'CPU, us':>20} {'stated, %':>9}  kinds of steps: share x increase, us"
    )
    variants = ("", *HOOKS) if options.hooks else ("",)
    for name in options.models.split(","):
        pairs = CASES[name].pairs // (QUICK if options.quick else 1)
        with tempfile.TemporaryDirectory() as folder:
            spawn(
                _worker,
                (options.workers, name, pairs, variants, folder),
                nprocs=options.workers,
            )


def _priority() -> str:
    """Ask for real-time priority, which the workers inherit, and say whether they have it."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except PermissionError:
        return "without real-time priority"
    return "with real-time priority"


def _worker(
    rank: int, workers: int, name: str, pairs: int, variants: tuple[str, ...], folder: str
) -> None:
    # Threads that are created later inherit it.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    training = _training(name, CASES[name])
    for variant in variants:
        with _attached(Path(folder), variant) as session:
            measured = _measure(training, CASES[name], pairs, session)
        gathered: list[Any] = [None] * workers
        dist.all_gather_object(gathered, measured)
        if not rank:
            _print(name, variant, gathered)
    dist.barrier()
    dist.destroy_process_group()


def _training(name: str, case: Case) -> Iterator[None]:
    """A loop as users write it; the next value is there when the next step has ended."""
    model: nn.Module = build_model(
        name, case.shape, case.classes, seed=0, has_tokens=case.has_tokens
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples = case.batch * BATCHES
    inputs = torch.rand(samples, *case.shape)
    targets: Tensor = torch.randint(case.classes, (samples,))
    if case.has_tokens:
        inputs = torch.randint(case.classes, (samples, *case.shape))
        targets = torch.randint(case.classes, (samples, *case.shape))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=case.batch)
    while True:
        for batch, labels in loader:
            optimizer.zero_grad()
            outputs = model(batch)
            loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
            yield


@contextlib.contextmanager
def _attached(folder: Path, variant: str) -> Iterator[Session]:
    with contextlib.ExitStack() as stack:
        if variant:
            stack.enter_context(mock.patch.object(*HOOKS[variant], lambda *_: None))
        # For 50 ms of a second, Linux stops real-time processes in favor of others. The profiler
        # would take that for a rank that others wait for, and record collectives again.
        stack.enter_context(mock.patch.object(recording_windows, "STALL_SECONDS", math.inf))
        session = Session(folder)
        session.start()
        stack.callback(session.close)
        yield session


class Switch:
    """Removes the hooks of a session, and puts them back as if no time had passed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        replaced = [
            undo
            for undo in session._hooks._undo
            if isinstance(undo, functools.partial) and undo.func in (setattr, delattr)
        ]
        self._remove = replaced[::-1]
        self._restore = [
            functools.partial(setattr, owner, name, vars(owner)[name])
            for owner, name in (undo.args[:2] for undo in replaced)
        ]
        of_optimizers: tuple[Any, ...] = (
            optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )
        self._of_optimizers = [(hooks, dict(hooks)) for hooks in of_optimizers]
        self._removed_at: float | None = None
        self._was_recording = False

    def turn(self, *, on: bool) -> None:
        if on == (self._removed_at is None):
            return
        for change in self._restore if on else self._remove:
            change()
        for hooks, installed in self._of_optimizers:
            hooks.clear()
            hooks.update(installed if on else {})
        if self._removed_at is None:
            self._stop_recording()
            self._removed_at = perf_counter()
        else:
            self._skip(perf_counter() - self._removed_at)
            self._removed_at = None
            self._continue_recording()

    def _skip(self, seconds: float) -> None:
        """What is due after an interval is due later."""
        events, log, windows = self._session.tracker.events, self._session.log, self._windows
        events.due += seconds
        steps, moment = events._last
        events._last = steps, moment + seconds
        log._written += seconds
        if windows._window is not None:
            windows._window.moment += seconds

    @property
    def _windows(self) -> Any:
        return self._session._windows

    @property
    def _recorder(self) -> Any:
        return self._session._collectives

    def _stop_recording(self) -> None:
        recorder = self._recorder
        self._was_recording = recorder.log is not None and not self._windows.is_paused
        if self._was_recording:
            recorder.end_step()
            recorder.kernels.disable()

    def _continue_recording(self) -> None:
        if self._was_recording:
            recorder, numbers = self._recorder, self._windows._collectives._numbers()
            for known in recorder.groups.values():
                if known.index in numbers:
                    known.continue_at(numbers[known.index])
            recorder.kernels.enable()


def _measure(training: Iterator[None], case: Case, pairs: int, session: Session) -> Measured:
    for _ in range(case.first_steps):
        next(training)
    switch, random = Switch(session), np.random.default_rng(0)
    session.tracker.events.flush()
    stated = session.log.costs.seconds(session.tracker)
    steps = []
    for pair, first in enumerate(random.integers(2, size=pairs)):
        for is_profiled in (bool(first), not first):
            switch.turn(on=is_profiled)
            found = [_step(training, session) for _ in range(case.steps)]
            steps += [(pair, is_profiled, *each) for each in found[LEFT_OUT:]]
    switch.turn(on=True)
    session.tracker.events.flush()
    stated = session.log.costs.seconds(session.tracker) - stated
    return Measured(np.array(steps, STEP), stated / (pairs * case.steps))


def _step(training: Iterator[None], session: Session) -> tuple[int, float, float]:
    """The kinds of a step, its seconds and CPU seconds."""
    before, cpu, began = _activity(session), process_time(), perf_counter()
    next(training)
    seconds, cpu = perf_counter() - began, process_time() - cpu
    changed = map(operator.ne, before, _activity(session))
    return sum(each << bit for bit, each in enumerate(changed)), seconds, cpu


def _activity(session: Session) -> tuple[float, ...]:
    """Counts that change with each of `KINDS`."""
    tracker = session.tracker
    return tracker.events.noted, session.log._written, tracker.recorder_seconds


class Pair(NamedTuple):
    """Steps before and after a switch: by how much each is longer than those without hooks."""

    kinds: np.ndarray
    profiled: np.ndarray
    plain: np.ndarray


def _mean_of_ranks(gathered: Sequence[np.ndarray]) -> np.ndarray:
    steps = gathered[0].copy()
    # What one rank does, the others wait for.
    steps["kinds"] = np.bitwise_or.reduce([each["kinds"] for each in gathered])
    for column in ("wall", "cpu"):
        steps[column] = np.mean([each[column] for each in gathered], axis=0)
    return steps


def _pairs(steps: np.ndarray, column: str) -> list[Pair]:
    found = []
    for number in np.unique(steps["pair"]):
        pair = steps[steps["pair"] == number]
        is_profiled, seconds = pair["is_profiled"], pair[column]
        excess = seconds - np.median(seconds[~is_profiled])
        found.append(Pair(pair["kinds"][is_profiled], excess[is_profiled], excess[~is_profiled]))
    return found


def _trimmed_mean(values: np.ndarray) -> float:
    cut = int(TRIMMED * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _increase_by_kind(pairs: Sequence[Pair]) -> dict[str, tuple[float, float]]:
    """The share of each kind of step, and its increase."""
    kinds = np.concatenate([pair.kinds for pair in pairs])
    profiled = np.concatenate([pair.profiled for pair in pairs])
    plain = _trimmed_mean(np.concatenate([pair.plain for pair in pairs]))
    found = {}
    for kind in np.unique(kinds):
        name = "+".join(name for bit, name in enumerate(KINDS) if kind >> bit & 1) or "others"
        chosen = kinds == kind
        found[name] = float(chosen.mean()), _trimmed_mean(profiled[chosen]) - plain
    return found


def _increase(pairs: Sequence[Pair]) -> float:
    return sum(share * increase for share, increase in _increase_by_kind(pairs).values())


def _interval(pairs: Sequence[Pair]) -> tuple[float, float]:
    random = np.random.default_rng(0)
    drawn = [
        _increase([pairs[each] for each in random.integers(len(pairs), size=len(pairs))])
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def _print(name: str, variant: str, gathered: Sequence[Measured]) -> None:
    steps = _mean_of_ranks([each.steps for each in gathered])
    step = _trimmed_mean(steps["wall"][~steps["is_profiled"]])
    wall, cpu = _pairs(steps, "wall"), _pairs(steps, "cpu")
    columns = []
    for pairs, scales in ((wall, ((100 / step, 2), (1e6, 0))), (cpu, ((1e6, 0),))):
        increase, (low, high) = _increase(pairs), _interval(pairs)
        for scale, digits in scales:
            figures = (f"{scale * value:.{digits}f}" for value in (increase, low, high))
            columns.append("{} [{}, {}]".format(*figures))
    stated = 100 * float(np.mean([each.stated for each in gathered])) / step
    parts = (
        f"{kind} {100 * share:.1f}% x {1e6 * increase:.0f}"
        for kind, (share, increase) in _increase_by_kind(wall).items()
    )
    print(
        f"{name:10} {1e3 * step:8.3f} {variant:>19} {len(wall):5} "
        + " ".join(f"{column:>20}" for column in columns)
        + f" {stated:>9.2f}  {', '.join(parts)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
