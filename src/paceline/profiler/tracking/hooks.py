"""Where torch calls the profiler: replaced functions and methods, and optimizer hooks.

A replaced function calls the original with the arguments it got, and has its name: a script can
send it to another process. Models and optimizers are not changed, so what a script saves is what it
saves without the profiler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from types import ModuleType
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.utils.data.dataloader as dataloader
from torch import nn
from torch.amp import grad_scaler
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from paceline.profiler.tracking.event_queue import EventQueue, Guard
from paceline.profiler.tracking.step_tracker import StepTracker, count_samples

SAVER = "torch.distributed.checkpoint.state_dict_saver"
"""Its function `_save_state_dict` writes a distributed checkpoint."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Hooks:
    """Calls a tracker from torch until `remove`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._handles: list[RemovableHandle] = []
        self._make_save: Callable[[Any], Any] | None = None

    def replace(
        self, owner: Any, name: str, make: Callable[[Any], Any], *, is_compiled: bool = False
    ) -> None:
        """Replace an attribute by `make(original)`; `is_compiled`: torch.compile may compile it."""
        original = getattr(owner, name)
        replacement = named_like(make(original), original, owner, name)
        if not is_compiled:
            never_compile(replacement)
        self._set(owner, name, replacement)
        if isinstance(owner, ModuleType):
            # pickle finds a function in the module that defines it.
            defining = sys.modules.get(original.__module__)
            if getattr(defining, name, None) is original:
                self._set(defining, name, replacement)

    def _set(self, owner: Any, name: str, replacement: Any) -> None:
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        else:
            # An inherited method is found again without the replacement.
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, replacement)

    def on_remove(self, function: Callable[[], None]) -> None:
        """Call a function when the hooks are removed."""
        self._undo.append(function)

    def remove(self, *, is_in_hook: bool = False) -> None:
        """Restore what was replaced; hooks of optimizers stay where torch is calling them."""
        self._make_save = None
        while self._undo:
            self._undo.pop()()
        while self._handles and not is_in_hook:
            self._handles.pop().remove()

    def hook_imported(self) -> tuple[()]:
        """Replace functions of modules that are imported only by some scripts."""
        if self._make_save is not None and SAVER in sys.modules:
            self.replace(sys.modules[SAVER], "_save_state_dict", self._make_save)
            self._make_save = None
        return ()

    def install(self, tracker: StepTracker, guard: Guard) -> None:
        self._hook_models(tracker.events, guard(tracker.note_call))
        self._hook_graphs(guard(tracker.replay_graph))
        self._hook_backward(guard(tracker.note_backward), guard(tracker.note_end_of_backward))
        self._hook_input(tracker, guard(count_samples))
        self._hook_optimizers(guard(tracker.note_update), guard(tracker.note_end_of_update))
        self._hook_grad_scaler(tracker, guard(tracker.scale_loss), guard(tracker.skip_update))
        self._hook_checkpoints(guard(tracker.begin_checkpoint), guard(tracker.end_checkpoint))
        self.hook_imported()

    def _hook_models(self, events: EventQueue, note_call: Callable[..., Any]) -> None:
        self.replace(
            nn.Module,
            "__call__",
            lambda original: measured_call(original, events, note_call),
            is_compiled=True,
        )

    def _hook_graphs(self, replay_graph: Callable[..., Any]) -> None:
        def make(original: Any) -> Any:
            def replay(graph: Any) -> None:
                replay_graph()
                original(graph)

            return replay

        self.replace(torch.cuda.CUDAGraph, "replay", make)

    def _hook_backward(self, begin: Callable[..., Any], end: Callable[..., Any]) -> None:
        def make(original: Any) -> Any:
            def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
                if not begin(outputs, kwargs.get("accumulate_grad", False)):
                    return original(outputs, *args, **kwargs)
                try:
                    return original(outputs, *args, **kwargs)
                finally:
                    end()

            return run_backward

        # Both torch.autograd.backward and torch.autograd.grad call it.
        self.replace(torch.autograd, "_engine_run_backward", make)

    def _hook_input(self, tracker: StepTracker, samples: Callable[..., Any]) -> None:
        events, begin, end = tracker.events, tracker.begin_input, tracker.end_input

        def make(original: Any) -> Any:
            def measured(self: Any) -> Any:
                if get_ident() != events.thread:
                    return original(self)
                batch, iterator = None, ref(self)
                events.append((perf_counter(), begin, iterator, torch.is_grad_enabled()))
                try:
                    batch = original(self)
                    return batch
                finally:
                    now = perf_counter()
                    size = None if batch is None else samples(batch)
                    events.append((now, end, iterator, size))
                    events.is_in_model = False
                    if now >= events.due:
                        events.flush()

            return measured

        # Creating an iterator starts the worker processes of the DataLoader.
        self.replace(dataloader.DataLoader, "__iter__", make)
        self.replace(dataloader._BaseDataLoaderIter, "__next__", make)

    def _hook_optimizers(self, begin: Callable[..., Any], end: Callable[..., Any]) -> None:
        self._handles.append(register_optimizer_step_pre_hook(begin))
        self._handles.append(register_optimizer_step_post_hook(end))

    def _hook_grad_scaler(
        self, tracker: StepTracker, scale_loss: Callable[..., Any], skip: Callable[..., Any]
    ) -> None:
        def make_scale(original: Any) -> Any:
            def scale(self: Any, outputs: Any) -> Any:
                if self.is_enabled():
                    scale_loss(outputs)
                return original(self, outputs)

            return scale

        def make(original: Any) -> Any:
            def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                before = tracker.updates
                result = original(self, optimizer, *args, **kwargs)
                if tracker.updates == before:
                    skip(optimizer)
                return result

            return step

        self.replace(grad_scaler.GradScaler, "scale", make_scale)
        self.replace(grad_scaler.GradScaler, "step", make)

    def _hook_checkpoints(self, begin: Callable[..., Any], end: Callable[..., Any]) -> None:
        def make(original: Any) -> Any:
            def save(*args: Any, **kwargs: Any) -> Any:
                phase = begin()
                if phase is None:
                    return original(*args, **kwargs)
                try:
                    return original(*args, **kwargs)
                finally:
                    end(phase)

            return save

        self.replace(torch, "save", make)
        self._make_save = make


def never_compile(function: Function, *, with_callees: bool = False) -> Function:
    """Make torch.compile leave a function alone, as it does functions of torch.

    It would compile a function that code between its graphs calls, which takes seconds.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, skip if with_callees else default)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


def named_like(replacement: Any, original: Any, owner: Any, name: str) -> Any:
    """Give a replacement the name under which it is found, and the signature of the original."""
    functools.update_wrapper(replacement, original)
    replacement.__name__ = replacement.__qualname__ = name
    if isinstance(owner, type):
        # The original may be inherited, or have another name.
        replacement.__module__ = owner.__module__
        replacement.__qualname__ = f"{owner.__qualname__}.{name}"
    return replacement


def measured_call(original: Any, events: EventQueue, note_call: Callable[..., Any]) -> Any:
    """`Module.__call__` that calls `note_call` first if no model is training."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Compiled code must not depend on what was noted.
        if not is_dynamo_compiling() and not events.is_in_model:
            note_call(self)
        return original(self, *args, **kwargs)

    # torch.compile treats this frame like the one that it replaces.
    call.__code__ = call.__code__.replace(co_filename=original.__code__.co_filename)
    return call
