"""Functions that torch calls in every step, which note what happens as events.

They run when little of their code is in the caches of the processor, where each function more takes
about a microsecond (docs/design-notes.md): so each of them appends its events itself. They cannot
raise an exception of their own, so they need no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from paceline.profiler.tracking.event_queue import EventQueue
from paceline.profiler.tracking.step_tracker import Loss, StepTracker

SEQUENCES = (list, tuple)

_read: Callable[[Tensor], object] = torch._C.TensorBase.item
"""Without the hook of `Tensor.item`."""


def model_notes(tracker: StepTracker) -> Callable[[nn.Module], None]:
    """Make the function that notes the call of a model (`measured_call`)."""
    events, paused, call_model = tracker.events, tracker.paused, tracker.call_model

    def note_call(model: nn.Module) -> None:
        thread = get_ident()
        if thread not in (paused.thread, events.noted_thread):
            return
        # A module without it fails by itself.
        is_training, trains = getattr(model, "training", True), torch.is_grad_enabled()
        if is_training and not trains:
            if not has_weights(model):
                # A loss or a metric of an evaluation.
                return
            # Such as one that plays the games that it learns from.
            trains = not tracker.has_loader
        if thread == paused.thread:
            if paused.is_in_input or paused.is_in_backward:
                return
            if trains and is_training is paused.is_training:
                events.is_in_model, paused.has_batch = True, False
                return
            # It is evaluated.
            paused.interrupt()
        if thread == events.noted_thread:
            now = perf_counter()
            events.append((now, call_model, ref(model), trains, is_training))
            events.is_in_model = trains
            if now >= events.due:
                events.flush_due()

    return note_call


def has_weights(model: nn.Module) -> bool:
    try:
        return next(iter(model.parameters()), None) is not None
    except Exception:  # noqa: BLE001 - the script may have replaced the method
        return True


def measured_call(original: Any, events: EventQueue, note_call: Callable[..., Any]) -> Any:
    """Make `Module.__call__`, which calls `note_call` first if no model is training."""

    # Compiled code must not depend on what was noted.
    def call_original(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and not events.is_in_model:
            note_call(self)
        return original(self, *args, **kwargs)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and not events.is_in_model:
            note_call(self)
        # As torch does it. To call its method would take longer than the rest.
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)

    is_torch = original is nn.Module._wrapped_call_impl
    return _in_file_of(original, call if is_torch else call_original)


def _in_file_of(original: Any, replacement: Any) -> Any:
    """Make torch.compile treat a function like the one that it replaces."""
    file = original.__code__.co_filename
    replacement.__code__ = replacement.__code__.replace(co_filename=file)
    return replacement


def measured_backward(original: Any, tracker: StepTracker, unscaled: list[Loss | None]) -> Any:
    """Make the function that runs a backward pass.

    `unscaled`: the loss before it was scaled, if a GradScaler did that; None if it is not known.
    """
    events, paused = tracker.events, tracker.paused
    begin, end = tracker.begin_backward, tracker.end_backward

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        if thread != events.noted_thread:
            if thread != paused.thread or paused.is_in_input or paused.is_in_backward:
                return original(outputs, *args, **kwargs)
            paused.is_in_backward, paused.backward_began = True, perf_counter()
            try:
                return original(outputs, *args, **kwargs)
            finally:
                now = perf_counter()
                paused.backward_seconds += now - paused.backward_began
                paused.is_in_backward = paused.has_batch = events.is_in_model = False
                if not paused.thread:
                    # A collective of the script ended the pause.
                    events.append((now, end))
        # Whether gradients are accumulated in parameters, not returned.
        accumulates, loss, began = kwargs.get("accumulate_grad", False), None, perf_counter()
        if accumulates:
            loss = unscaled.pop() if unscaled else loss_of(outputs)
        # What reading the loss takes depends most on the program, so it is timed.
        events.append((perf_counter(), begin, accumulates, loss, began))
        events.is_in_model = False
        try:
            return original(outputs, *args, **kwargs)
        finally:
            events.append((perf_counter(), end))
            events.is_in_model = False

    return run_backward


def measured_input(original: Any, tracker: StepTracker, count: Callable[[object], Any]) -> Any:
    """Make the function that gets a batch; `count` counts its samples if it is not a list."""
    events, paused = tracker.events, tracker.paused
    begin, end = tracker.begin_input, tracker.end_input

    def samples_of(batch: Any) -> Any:
        first = batch[0] if type(batch) is list and batch else None
        return first.size(0) if type(first) is Tensor and first.dim() else count(batch)

    def measured(self: Any) -> Any:
        thread = get_ident()
        if thread == paused.thread:
            if paused.is_in_input or paused.is_in_backward:
                return original(self)
            if torch.is_grad_enabled() and paused.is_usual(self, events.updates):
                if ref(self) is not paused.iterator:
                    tracker.count_paused_batches()
                paused.is_in_input, paused.input_began = True, perf_counter()
                samples = None
                try:
                    batch = original(self)
                    samples = samples_of(batch) or 0
                    return batch
                finally:
                    now = perf_counter()
                    paused.input_seconds += now - paused.input_began
                    paused.is_in_input = events.is_in_model = False
                    if not paused.thread:
                        # A collective of the dataset ended the pause.
                        events.append((now, end, ref(self), samples))
                    elif samples is not None:
                        paused.add_batch(ref(self), samples, events.updates)
            # It is for evaluation, or of another loader.
            paused.interrupt()
        if thread != events.noted_thread:
            return original(self)
        batch, iterator = None, ref(self)
        events.append((perf_counter(), begin, iterator, torch.is_grad_enabled()))
        try:
            batch = original(self)
            return batch
        finally:
            now = perf_counter()
            samples = None if batch is None else samples_of(batch)
            events.append((now, end, iterator, samples))
            events.is_in_model = False
            if now >= events.due:
                events.flush_due()

    return measured


def measured_iterator(original: Any, measured: Any, tracker: StepTracker) -> Any:
    """Make the function that begins to iterate over a DataLoader: it starts its processes."""
    events, paused, end = tracker.events, tracker.paused, tracker.end_input

    def iterate(self: Any) -> Any:
        tracker.has_loader = True
        if get_ident() == paused.thread:
            if paused.is_in_input or paused.is_in_backward:
                return original(self)
            if id(self.dataset) == paused.dataset_id and torch.is_grad_enabled():
                tracker.count_paused_batches()
                paused.is_in_input, paused.input_began = True, perf_counter()
                try:
                    return original(self)
                finally:
                    now = perf_counter()
                    paused.input_seconds += now - paused.input_began
                    paused.is_in_input = False
                    if not paused.thread:
                        events.append((now, end, paused.iterator, None))
            paused.interrupt()
        return measured(self)

    return iterate


def update_notes(tracker: StepTracker) -> tuple[Callable[..., None], Callable[..., None]]:
    """Make the hooks before and after the step of an optimizer.

    torch passes more arguments, which do not matter here.
    """
    events, paused = tracker.events, tracker.paused
    begin, end, end_paused = tracker.begin_update, tracker.end_update, tracker.end_paused_step

    def begin_update(optimizer: Optimizer, *_: object) -> None:
        events.updates += 1
        if get_ident() == paused.thread and ref(optimizer) is not paused.optimizer:
            paused.interrupt()
        if not paused.thread:
            events.append((perf_counter(), begin, ref(optimizer), get_ident()))
            events.is_in_model = False
        elif get_ident() == paused.thread:
            paused.is_in_update = True

    def end_update(optimizer: Optimizer, *_: object) -> None:
        now = perf_counter()
        if not paused.thread:
            events.append((now, end, ref(optimizer)))
        elif paused.thread == get_ident():
            events.append((now, end_paused, paused.input_seconds, paused.backward_seconds))
            paused.is_in_update = False
        else:
            return
        events.is_in_model = False
        if events.updates >= events.due_update or now >= events.due:
            events.flush_due()
        if events.updates >= events.window_ends:
            events.on_window()

    return begin_update, end_update


def measured_clearing(original: Any, tracker: StepTracker) -> Any:
    """Make the function that clears gradients."""
    events, clear = tracker.events, tracker.clear_gradients

    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != events.noted_thread:
            return original(self, *args, **kwargs)
        began = perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            events.append((began, clear, perf_counter()))

    return _in_file_of(original, zero_grad)


def loss_of(outputs: Any) -> Loss | None:
    """The scalar that a backward pass begins with; None if there is none that can be read."""
    loss = outputs[0] if isinstance(outputs, SEQUENCES) and outputs else outputs
    if type(loss) is Tensor and loss.is_cpu:
        try:
            value = None if loss.dim() else _read(loss)
        except RuntimeError:
            # Tensors of some transforms, such as torch.vmap, have no value.
            return None
        return value if type(value) is float else None
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        return None
    return loss.detach()


def count_samples(batch: object) -> int:
    """The length of the first tensor of a batch; 0 if it has none."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.dim() else 0
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, SEQUENCES):
        return 0
    for each in batch:
        if samples := count_samples(each):
            return samples
    return 0
