"""Where torch calls the profiler: replaced functions and methods, and optimizer hooks.

A replaced function calls the original with the arguments it got, and has its name: a script can
send it to another process. Models and optimizers are not changed, so what a script saves is what it
saves without the profiler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.utils.data.dataloader as dataloader
from torch import nn
from torch.amp import grad_scaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from paceline.profiler.tracking.event_queue import Guard
from paceline.profiler.tracking.notes import (
    count_samples,
    has_weights,
    loss_of,
    measured_backward,
    measured_call,
    measured_clearing,
    measured_input,
    measured_iterator,
    model_notes,
    update_notes,
)
from paceline.profiler.tracking.step_tracker import Loss, StepTracker

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
            self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
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
        never_compile(loss_of)
        never_compile(has_weights)
        unscaled: list[Loss | None] = []
        self._hook_models(tracker)
        self._hook_graphs(guard(tracker.replay_graph))
        self._hook_backward(tracker, unscaled)
        self._hook_input(tracker, guard(count_samples))
        self._hook_optimizers(tracker)
        self._hook_grad_scaler(tracker, unscaled, guard(tracker.skip_update))
        self._hook_checkpoints(guard(tracker.begin_checkpoint), guard(tracker.end_checkpoint))
        self.hook_imported()

    def _hook_models(self, tracker: StepTracker) -> None:
        note_call = never_compile(model_notes(tracker))

        def make(original: Any) -> Any:
            return measured_call(original, tracker.events, note_call)

        self.replace(nn.Module, "__call__", make, is_compiled=True)

    def _hook_graphs(self, replay_graph: Callable[..., Any]) -> None:
        def make(original: Any) -> Any:
            def replay(graph: Any) -> None:
                replay_graph()
                original(graph)

            return replay

        self.replace(torch.cuda.CUDAGraph, "replay", make)

    def _hook_backward(self, tracker: StepTracker, unscaled: list[Loss | None]) -> None:
        def make(original: Any) -> Any:
            return measured_backward(original, tracker, unscaled)

        # Both torch.autograd.backward and torch.autograd.grad call it.
        self.replace(torch.autograd, "_engine_run_backward", make)

    def _hook_input(self, tracker: StepTracker, count: Callable[[object], Any]) -> None:
        def make(original: Any) -> Any:
            return measured_input(original, tracker, count)

        def make_iterator(original: Any) -> Any:
            return measured_iterator(original, make(original), tracker)

        self.replace(dataloader.DataLoader, "__iter__", make_iterator)
        self.replace(dataloader._BaseDataLoaderIter, "__next__", make)

    def _hook_optimizers(self, tracker: StepTracker) -> None:
        begin, end = map(never_compile, update_notes(tracker))
        self._handles.append(register_optimizer_step_pre_hook(begin))
        self._handles.append(register_optimizer_step_post_hook(end))

        def make(original: Any) -> Any:
            return measured_clearing(original, tracker)

        self.replace(Optimizer, "zero_grad", make)

    def _hook_grad_scaler(
        self, tracker: StepTracker, unscaled: list[Loss | None], skip: Callable[..., Any]
    ) -> None:
        events = tracker.events

        def make_scale(original: Any) -> Any:
            def scale(self: Any, outputs: Any) -> Any:
                if self.is_enabled() and tracker.is_in_thread():
                    # The next backward pass begins with what is scaled here. It may be recorded
                    # even if this is still in a pause.
                    unscaled[:] = (None if tracker.paused.thread else loss_of(outputs),)
                return original(self, outputs)

            return scale

        def make(original: Any) -> Any:
            def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                before = events.updates
                result = original(self, optimizer, *args, **kwargs)
                if events.updates == before:
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
