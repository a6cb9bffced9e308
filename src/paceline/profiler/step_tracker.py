"""Which phase a training script is in, and where its steps end, from what it calls in torch.

The phase of the training thread changes at these calls:

    input       from the request for a batch of a DataLoader until it is there
    forward     from the call of a model to the backward pass, with the loss
    backward    torch.autograd
    update      from the backward pass to the end of the optimizer's step, with clipping
    evaluate    from a call of a model without gradients to the next training batch
    checkpoint  torch.save and torch.distributed.checkpoint
    other       the rest

Some phases are known only when the next one begins: `_relabel` changes the one that ends.

A step ends with an optimizer's step. If a script has several optimizers, such as a GAN, it ends
with the one that steps last in an iteration, or with the request for the next batch. The time until
the next step belongs to that step, except for evaluation and checkpoints between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.measure.phase_clock import CudaPhaseClock, PhaseClock, clock_for

SEQUENCES = (list, tuple)
NOT_INTERRUPTED = frozenset(("input", "backward", "checkpoint"))
"""Phases that contain whatever a script does in them."""


def nothing() -> Any:
    """In place of a weak reference."""


class StepTracker:
    """Follows one thread: the one that takes optimizer steps."""

    def __init__(
        self, on_step: Callable[[], None], on_gpu: Callable[[], None] = lambda: None
    ) -> None:
        """`on_gpu` is called when the optimizer is found to be on a GPU."""
        self.clock = PhaseClock()
        self.thread = get_ident()
        self.steps = 0
        self.updates = 0
        """Steps of all optimizers."""
        self.parts_of_first = 0
        """Steps of the clock that the first step consists of: one for each optimizer."""
        self.module_calls = 0
        """Estimate: each module of a model is called once."""
        self.recorder_seconds = 0.0
        """What recording collectives took the program."""
        self.timed_calls = self.skipped_calls = 0
        """Calls that may block the program (`script_calls`)."""
        self.samples = 0
        """In the batches of DataLoaders that models were trained on."""
        self.checkpoints = 0
        self.loss: Tensor | None = None
        """Of the last backward pass."""
        self._unscaled_loss: Tensor | None = None
        self._on_step, self._on_gpu = on_step, on_gpu
        self._is_on_gpu = False
        self._modules: dict[int, int] = {}
        """Number of modules by the id of a model."""
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._last_optimizer: Callable[[], Optimizer | None] = nothing
        """A weak reference to the one that ends steps."""
        self._others: set[int] = set()
        """Ids of other optimizers that stepped since then."""
        self._is_manual = False
        """Whether the program says where steps end."""
        self._stepping: list[int] = []
        """Ids of optimizers whose step is in progress: one may call another, or a closure."""
        self._phase_after_update = "other"
        self._computes = False
        """Whether the step has called a model."""
        self._is_interrupted = True
        """Whether evaluation, a checkpoint or startup preceded the step."""
        self._is_after_backward = False
        self._has_batch = False
        """Whether a batch arrived and no model was called since."""
        self._iterator: Callable[[], object] = nothing
        """A weak reference to the iterator of the last batch."""
        self._samples_ahead = 0
        """In its batches since the last backward pass."""
        self._evaluation_iterator: Callable[[], object] = nothing
        self._maybe_teacher: Callable[[], nn.Module | None] = nothing
        """A weak reference to a model called without gradients, perhaps for a training batch."""
        self._maybe_evaluation = False
        """Whether the model called last is in evaluation mode, but with gradients."""

    @property
    def learning_rate(self) -> float | None:
        """Of the first parameter group; None if it is a tensor, which could be on a GPU."""
        optimizer = self._last_optimizer()
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        return rate if isinstance(rate, float) else None

    def is_in_thread(self) -> bool:
        """Whether this is the thread that trains, and what it does can be timed."""
        if get_ident() != self.thread:
            return False
        # The clock's marks must not become part of a CUDA graph.
        return not (self._is_on_gpu and torch.cuda.is_current_stream_capturing())

    def _enter_after_interruption(self, phase: str) -> None:
        """Enter a phase of the step; it begins the step unless that has begun."""
        if self._computes:
            self.clock.enter(phase)
        else:
            self._is_interrupted = False
            self.clock.begin_step(phase)

    def _relabel(self, phase: str) -> None:
        """Change the phase that is about to end."""
        self.clock.phase = phase

    def begin_input(self, iterator: object) -> bool:
        """A batch is requested; returns whether `end_input` must follow."""
        phase = self.clock.phase
        if phase in NOT_INTERRUPTED or not self.is_in_thread():
            return False
        if self._maybe_evaluation and phase == "forward":
            # No backward pass followed.
            self._relabel("evaluate")
            self._is_interrupted, self._computes = True, False
        self._maybe_evaluation = False
        if self._others and self._iterator() is iterator:
            # The iteration is over without a step of the optimizer that usually ends it.
            self.end_step()
        if not torch.is_grad_enabled() or self._evaluation_iterator() is iterator:
            self._maybe_teacher = nothing
            self._enter_evaluation()
            return False
        self._is_after_backward = False
        if self._is_interrupted:
            self._enter_after_interruption("input")
        else:
            self.clock.enter("input")
        return True

    def end_input(self, iterator: object, batch: object) -> None:
        self.clock.enter("other")
        self._has_batch = True
        if self._iterator() is not iterator:
            # The last batches of the other one were for evaluation, or only looked at.
            self._iterator, self._samples_ahead = ref(iterator), 0
        self._samples_ahead += count_samples(batch)

    def _enter_evaluation(self) -> None:
        if self.clock.phase != "evaluate":
            self.clock.enter("evaluate")
            self._is_interrupted = True

    def call_model(self, model: nn.Module) -> None:
        """A module is called while no model is training."""
        if not self.is_in_thread():
            return
        clock = self.clock
        phase = clock.phase
        if phase != "evaluate":
            self.module_calls += self._modules.get(id(model)) or self._count_modules(model)
        has_batch, self._has_batch = self._has_batch, False
        if torch.is_grad_enabled() or model.training:
            if phase == "evaluate" and self._has_teacher(model):
                self._relabel("forward")
                self._is_interrupted = False
            self._evaluation_iterator = nothing
            self._maybe_evaluation = not model.training and not self._stepping
            self._is_after_backward = False
            if self._is_interrupted:
                self._enter_after_interruption("forward")
            else:
                clock.enter("forward")
            self._computes = True
        elif phase != "evaluate":
            if has_batch:
                self._evaluation_iterator = self._iterator
            if has_batch or self._iterator is nothing:
                self._maybe_teacher = ref(model)
            self._enter_evaluation()

    def _has_teacher(self, model: nn.Module) -> bool:
        """Whether a model was called without gradients for the training batch, like a teacher."""
        found, self._maybe_teacher = self._maybe_teacher(), nothing
        if found is None or self._iterator is not nothing:
            return found is not None
        # Without a DataLoader, calls of the trained model itself are taken for evaluation.
        return found is not model and found is not getattr(model, "module", None)

    def _count_modules(self, model: nn.Module) -> int:
        modules = self._modules[id(model)] = sum(1 for _ in model.modules())
        return modules

    def begin_backward(self, outputs: Any, accumulates: bool) -> str | None:
        """Returns the phase after it; None if it is part of another one.

        `accumulates`: whether gradients are accumulated in parameters, not returned.
        """
        phase = self.clock.phase
        if phase in NOT_INTERRUPTED or not self.is_in_thread():
            return None
        if phase == "other":
            # A compiled function or a functional model is not called as a module.
            self._relabel("forward")
        if self._is_interrupted:
            self._enter_after_interruption("backward")
        else:
            self.clock.enter("backward")
        self._computes = True
        if not accumulates:
            return phase
        self._maybe_evaluation = self._has_batch = False
        self.samples += self._samples_ahead
        self._samples_ahead = 0
        loss = outputs[0] if isinstance(outputs, SEQUENCES) and outputs else outputs
        if self._unscaled_loss is not None:
            loss, self._unscaled_loss = self._unscaled_loss, None
        if isinstance(loss, Tensor) and not loss.dim():
            self.loss = loss.detach()
        return "update" if self._stepping else "other"

    def scale_loss(self, outputs: object) -> None:
        """A GradScaler scales what the next backward pass begins with."""
        if isinstance(outputs, Tensor) and self.is_in_thread():
            self._unscaled_loss = outputs.detach()

    def end_backward(self, phase: str) -> None:
        self.clock.enter(phase)
        self._is_after_backward = phase == "other"

    def begin_update(self, optimizer: Optimizer, *_: object) -> None:
        """The hook of torch has more arguments, which do not matter here."""
        self.updates += 1
        if id(optimizer) in self._stepping:
            # Its last step raised an exception.
            self._stepping.clear()
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1:
            return
        if not self.steps:
            self.thread = get_ident()
            self._use_device_of(optimizer)
        if not self.is_in_thread():
            self._stepping.clear()
            return
        phase = self.clock.phase
        # Optimizers may step for each parameter as soon as its gradient is known.
        self._phase_after_update = "backward" if phase == "backward" else "other"
        if self._is_after_backward and phase == "other":
            # Unscaling and clipping of gradients.
            self._relabel("update")
        if self._is_interrupted:
            self._enter_after_interruption("update")
        else:
            self.clock.enter("update")

    def _use_device_of(self, optimizer: Optimizer) -> None:
        device = self._device_of(optimizer)
        if device.type != "cuda" or isinstance(self.clock, CudaPhaseClock):
            return
        self._is_on_gpu = True
        if not torch.cuda.is_current_stream_capturing():
            self.clock = clock_for(device, self.clock)
            # Of the first step, it measures only the rest.
            self.clock.begin_step("other")
            self._on_gpu()

    @staticmethod
    def _device_of(optimizer: Optimizer) -> torch.device:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        return next((each.device for each in parameters), torch.device("cpu"))

    def end_update(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) not in self._stepping:
            return
        if self._stepping[0] != id(optimizer):
            return
        self._stepping.clear()
        is_known = optimizer is self._last_optimizer() and not self._is_manual
        if is_known or self._ends_step(optimizer):
            self.end_step(self._phase_after_update)
        else:
            self.clock.enter(self._phase_after_update)

    def skip_update(self, optimizer: Optimizer) -> None:
        """A GradScaler skipped the step of an optimizer, because gradients were not finite."""
        if self.is_in_thread() and self._ends_step(optimizer):
            self.end_step()

    def _ends_step(self, optimizer: Optimizer) -> bool:
        if self._is_manual:
            return False
        if optimizer is not self._last_optimizer():
            # If it steps twice, the one that ended steps was not used in a whole iteration.
            if optimizer in self._optimizers and id(optimizer) not in self._others:
                self._others.add(id(optimizer))
                return False
            if self.steps == 1 and optimizer not in self._optimizers:
                # The first iteration has several optimizers.
                self.steps = 0
            # Of those that step in an iteration, the last one appears last.
            self._optimizers.add(optimizer)
            self._last_optimizer = ref(optimizer)
        return True

    def end_step(self, phase: str = "other") -> None:
        """End the step; the next one begins now unless evaluation or a checkpoint comes first."""
        if self._is_interrupted:
            self._enter_after_interruption("other")
        self.clock.next_step(phase)
        if self._is_on_gpu:
            # Steps before a capture are often executed on another stream than later ones.
            self.clock.use_current_stream()
        self._computes = self._is_interrupted = self._is_after_backward = False
        self._others.clear()
        self.parts_of_first += not self.steps
        self.steps += 1
        self._on_step()

    def end_step_here(self) -> None:
        """End a step by request; from now on, optimizers do not end steps."""
        if not self.steps:
            self.thread = get_ident()
        elif self.steps == 1 and not self._is_manual:
            # An optimizer ended the first step before it was known that it does not.
            self.steps = 0
        self._is_manual = True
        self.end_step()

    def replay_graph(self) -> None:
        """A CUDA graph is launched; which phases it contains is not known."""
        if self.clock.phase != "other" or not self.is_in_thread():
            return
        if self._is_interrupted:
            self._enter_after_interruption("forward")
        else:
            self.clock.enter("forward")
        self._computes, self._has_batch = True, False
        self.samples += self._samples_ahead
        self._samples_ahead = 0

    def begin_checkpoint(self) -> str | None:
        """Returns the phase after it; None if it is part of another one."""
        phase = self.clock.phase
        if phase == "checkpoint" or not self.is_in_thread():
            return None
        self.clock.enter("checkpoint")
        self.checkpoints += 1
        self._is_interrupted = True
        return phase

    def end_checkpoint(self, phase: str) -> None:
        self.clock.enter(phase)


def count_samples(batch: object) -> int:
    """The length of the first tensor of a batch; 0 if it has none."""
    if isinstance(batch, SEQUENCES) and batch and isinstance(batch[0], Tensor):
        batch = batch[0]
    if isinstance(batch, Tensor):
        shape = batch.shape
        return shape[0] if shape else 0
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, SEQUENCES):
        return 0
    for each in batch:
        if samples := count_samples(each):
            return samples
    return 0
