"""Calls that can block a step, and the lines of the script that make them.

Counted are calls of the script and of libraries that it uses. What torch itself calls, such as an
optimizer that reads its step count, is not for the script to change.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.utils.data.dataloader as dataloader
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from paceline.profiler.collectives.ddp import describe
from paceline.profiler.tracking.call_sites import (
    PACELINE,
    TORCH,
    CallSite,
    ScriptLine,
    is_within,
    script_line,
)
from paceline.profiler.tracking.event_queue import Guard
from paceline.profiler.tracking.hooks import Hooks
from paceline.profiler.tracking.step_tracker import StepTracker

READ_BACKS = ("item", "tolist", "__float__", "__int__", "__bool__")
"""Methods of a tensor that wait until its value is known."""
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
)
NOT_IN_STEPS = frozenset(("input", "evaluate", "checkpoint"))
"""Phases in which a call does not block a step."""
CHECKPOINT_CALL = "torch.save"
TIMED_MAX, STRIDE = 64, 16
"""Read-backs of one line that are all timed in a step; of those after them, one in `STRIDE` is."""
NEVER_TIMED = 1 << 62
ITERATORS_KEPT = 64
"""Of DataLoaders; from then on, those that no longer exist are forgotten."""
RECORD_SHARE = 0.1
"""A script that is killed loses at most the calls of this share of its time."""


@dataclass(slots=True)
class LoaderUse:
    """Training batches of a DataLoader."""

    line: ScriptLine
    workers: int
    batch_size: int | None
    batches: int = 0
    seconds: float = 0.0

    def to_record(self) -> dict[str, Any]:
        return {
            **self.line.to_record(),
            "workers": self.workers,
            "batch_size": self.batch_size,
            "batches": self.batches,
            "seconds": round(self.seconds, 6),
        }


@dataclass(slots=True)
class ModelUse:
    """Forward passes of a DDP model."""

    line: ScriptLine
    searches: int = 0
    """Searches for unused parameters."""
    search_seconds: float = 0.0


class ScriptCalls:
    """Counts calls from `install` until the hooks are removed."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._started = self._due = perf_counter()
        self._interval_share = RECORD_SHARE
        self._sites: dict[tuple[CodeType, int, str], CallSite | None] = {}
        """None for a line that is not counted."""
        self._ignored: set[CodeType] = set()
        """Functions of torch and of the profiler."""
        self._skipping: list[CallSite] = []
        """Those of read-backs of which not all are timed in this step."""
        self._ignored_sites: list[CallSite] = []
        self._loaders: WeakKeyDictionary[Any, LoaderUse] = WeakKeyDictionary()
        self._uses: list[LoaderUse] = []
        self._iterators: dict[int, tuple[ref[Any], LoaderUse]] = {}
        """By id of the weak reference, which is always the same one for an iterator."""
        self._models: WeakKeyDictionary[Any, ModelUse] = WeakKeyDictionary()

    def install(self, hooks: Hooks, guard: Guard) -> None:
        for name in READ_BACKS:
            hooks.replace(Tensor, name, self.read_back(f"Tensor.{name}", guard))
        hooks.replace(torch.cuda, "synchronize", self._timed("torch.cuda.synchronize", guard))
        if torch.distributed.is_available():
            # torch.compile knows collectives by the functions that this module finds.
            importlib.import_module("torch.distributed._functional_collectives")
            for name in COLLECTIVES:
                make = self._timed(f"dist.{name}", guard)
                hooks.replace(torch.distributed, name, make)
        hooks.replace(torch, "save", self._timed(CHECKPOINT_CALL, guard))
        self._hook_loaders(hooks, guard)
        self._hook_models(hooks, guard)

    def _timed(self, name: str, guard: Guard) -> Callable[[Any], Any]:
        ignored, note, getframe = self._ignored, guard(self._note), sys._getframe

        def make(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling() or getframe(1).f_code in ignored:
                    return original(*args, **kwargs)
                began = perf_counter()
                result = original(*args, **kwargs)
                seconds = perf_counter() - began
                note(name, getframe(1), seconds, (*args, *kwargs.values()), result)
                return result

            return call

        return make

    def read_back(self, name: str, guard: Guard) -> Callable[[Any], Any]:
        """As above, but faster: scripts may read back each element, and optimizers each step count.

        The site is found by the instruction, since looking up the number of a line takes longer.
        """
        tracker, note, getframe = self._tracker, guard(self._note_read_back), sys._getframe
        paused = tracker.paused
        sites: dict[tuple[int, int], CallSite] = {}
        unknown = CallSite(name, None)

        def make(original: Any) -> Any:
            def call(tensor: Any) -> Any:
                if is_dynamo_compiling():
                    return original(tensor)
                frame = getframe(1)
                site = sites.get((id(frame.f_code), frame.f_lasti), unknown)
                # Reading the phase of one that is ignored would only take time.
                if site.left < STRIDE:
                    # In a pause, it is part of a step if it was before.
                    is_outside = (
                        site is unknown if paused.thread else tracker.clock.phase in NOT_IN_STEPS
                    )
                    if is_outside:
                        return original(tensor)
                if site.left:
                    site.left -= 1
                    return original(tensor)
                began = perf_counter()
                result = original(tensor)
                note(name, sites, frame, perf_counter() - began)
                return result

            return call

        return make

    def _note_read_back(
        self, name: str, sites: dict[tuple[int, int], CallSite], frame: FrameType, seconds: float
    ) -> None:
        tracker = self._tracker
        if not tracker.is_in_thread():
            return
        key = id(frame.f_code), frame.f_lasti
        site = sites.get(key)
        if site is None:
            site = sites[key] = self._site(name, frame) or self._ignored_site(name)
            if site.skips == NEVER_TIMED:
                return
        tracker.timed_calls += 1
        tracker.skipped_calls += site.skips - site.left
        site.add(seconds, tracker.events.updates if tracker.paused.thread else tracker.steps)
        if site.timed_in_step >= TIMED_MAX:
            if not site.skips:
                self._skipping.append(site)
            site.skips = site.left = STRIDE - 1

    def _ignored_site(self, name: str) -> CallSite:
        site = CallSite(name, None, skips=NEVER_TIMED, left=NEVER_TIMED)
        self._ignored_sites.append(site)
        return site

    def end_step(self) -> None:
        """Time all read-backs again."""
        tracker = self._tracker
        for site in self._skipping:
            tracker.skipped_calls += site.add_skipped()
            site.skips = site.left = 0
        self._skipping.clear()
        for site in self._ignored_sites:
            tracker.skipped_calls += site.skips - site.left
            site.left = site.skips

    def _note(
        self, name: str, frame: FrameType, seconds: float, args: tuple[Any, ...], result: Any
    ) -> None:
        tracker = self._tracker
        if not tracker.is_in_thread() or (
            tracker.clock.phase in NOT_IN_STEPS and name != CHECKPOINT_CALL
        ):
            return
        site, is_collective = self._site(name, frame), name.startswith("dist.")
        # Objects are sent from the host, and waited for.
        tensors = tensors_of(args) if is_collective and "object" not in name else []
        if site is None or (is_collective and not blocks_program(tensors, result)):
            return
        tracker.timed_calls += 1
        site.add(seconds, tracker.steps)
        if tensors:
            site.bytes += tensors[0].nbytes

    def _site(self, name: str, frame: FrameType) -> CallSite | None:
        key = frame.f_code, frame.f_lineno, name
        if key not in self._sites:
            self._sites[key] = self._new_site(name, frame)
        return self._sites[key]

    def _new_site(self, name: str, frame: FrameType) -> CallSite | None:
        if is_within(frame, TORCH) or is_within(frame, PACELINE):
            self._ignored.add(frame.f_code)
            return None
        return CallSite(name, script_line(frame))

    def _hook_loaders(self, hooks: Hooks, guard: Guard) -> None:
        created, began = guard(self._created), guard(self._began)
        self._tracker.on_batches = self._got

        def make_loader(original: Any) -> Any:
            def init(loader: Any, *args: Any, **kwargs: Any) -> None:
                original(loader, *args, **kwargs)
                created(loader, sys._getframe(1))

            return init

        def make_iterator(original: Any) -> Any:
            def get_iterator(loader: Any) -> Any:
                iterator = original(loader)
                began(iterator, loader)
                return iterator

            return get_iterator

        hooks.replace(dataloader.DataLoader, "__init__", make_loader)
        # Warnings of an iterator's constructor name its caller, so that must not be a hook.
        hooks.replace(dataloader.DataLoader, "_get_iterator", make_iterator)

    def _created(self, loader: Any, frame: FrameType) -> None:
        use = LoaderUse(script_line(frame), loader.num_workers, loader.batch_size)
        self._loaders[loader] = use
        self._uses.append(use)

    def _began(self, iterator: Any, loader: Any) -> None:
        use = self._loaders.get(loader)
        if use is not None:
            if len(self._iterators) >= ITERATORS_KEPT:
                kept = {key: one for key, one in self._iterators.items() if one[0]() is not None}
                self._iterators = kept
            reference = ref(iterator)
            self._iterators[id(reference)] = reference, use

    def _got(self, iterator: ref[Any], batches: int, seconds: float) -> None:
        _, use = self._iterators.get(id(iterator), (None, None))
        if use is not None:
            use.batches += batches
            use.seconds += seconds

    def _hook_models(self, hooks: Hooks, guard: Guard) -> None:
        wrapped, searched = guard(self._wrapped), guard(self._searched)

        def make_init(original: Any) -> Any:
            def init(model: Any, *args: Any, **kwargs: Any) -> None:
                original(model, *args, **kwargs)
                wrapped(model, sys._getframe(1))

            return init

        def make_search(original: Any) -> Any:
            def post_forward(model: Any, output: Any) -> Any:
                if is_dynamo_compiling() or not model.find_unused_parameters:
                    return original(model, output)
                began = perf_counter()
                result = original(model, output)
                searched(model, perf_counter() - began)
                return result

            return post_forward

        hooks.replace(DistributedDataParallel, "__init__", make_init)
        # It walks the graph of the output if it must find unused parameters.
        hooks.replace(DistributedDataParallel, "_post_forward", make_search)

    def _wrapped(self, model: Any, frame: FrameType) -> None:
        self._models[model] = ModelUse(script_line(frame))

    def _searched(self, model: Any, seconds: float) -> None:
        use = self._models.get(model)
        if use is not None:
            use.searches += 1
            use.search_seconds += seconds

    def due_records(self) -> dict[str, Any]:
        """The records, at intervals that grow with the time: totals of long runs change little."""
        now = perf_counter()
        if now < self._due:
            return {}
        self._due = now + self._interval_share * (now - self._started)
        return self.records()

    def finish(self) -> None:
        """Records are due from now on: the next ones may be the last."""
        self.end_step()
        self._interval_share = 0.0
        self._due = 0.0

    def records(self) -> dict[str, Any]:
        """Totals since the start."""
        return {
            "calls": [site.to_record() for site in self._sites.values() if site and site.count],
            "loaders": [use.to_record() for use in self._uses if use.batches],
            "ddp_models": list(self._model_records()),
        }

    def _model_records(self) -> Iterator[dict[str, Any]]:
        for model, use in self._models.items():
            unused = model._get_ddp_logging_data().get("unused_parameter_size", 0)
            yield {
                **use.line.to_record(),
                **describe(model),
                "unused_bytes": unused,
                # The size is of sampled searches; this compares all of them.
                "same_parameters_unused": model.reducer._ddp_graph_static(),
                "searches": use.searches,
                "search_seconds": round(use.search_seconds, 6),
            }


def tensors_of(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments of a collective, and in lists of them."""
    flat = (one for each in args for one in (each if isinstance(each, list) else (each,)))
    return [one for one in flat if isinstance(one, Tensor)]


def blocks_program(tensors: Sequence[Tensor], result: object) -> bool:
    """Whether the program waits in a collective until it has ended.

    An asynchronous one has a result to wait for. On a GPU, a synchronous one is only put into the
    stream, behind which later work waits.
    """
    return result is None and not any(one.is_cuda for one in tensors)
