"""Which phase a training script is in, and where its steps end, from what it calls in torch.

The phase of the training thread changes at these calls:

    input       from the request for a batch of a DataLoader until it is there
    forward     from the call of a model to the backward pass, with the loss
    backward    torch.autograd
    update      from the backward pass to the end of the optimizer's step, with clipping, and
                clearing the gradients
    evaluate    from a call of a model without gradients to the next training batch
    checkpoint  torch.save and torch.distributed.checkpoint
    other       the rest

Some phases are known only when the next one begins: `_relabel` changes the one that ends.

A step ends with an optimizer's step. If a script has several optimizers, such as a GAN, it ends
with the one that steps last in an iteration, or with the request for the next batch. The time until
the next step belongs to that step, except for evaluation and checkpoints: a step is as long as its
other phases.

Functions that torch calls append events to a queue (notes.py), and the methods here interpret them.
`clock` is up to date with all that was noted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.measure.phase_clock import CudaPhaseClock, PhaseClock, clock_for
from paceline.profiler.tracking.event_queue import EventQueue, Guard
from paceline.profiler.tracking.paused_steps import (
    OUTSIDE,
    Measured,
    Noted,
    PausedSteps,
    StepPhases,
)

NOT_INTERRUPTED = frozenset(("input", "backward", "checkpoint"))
"""Phases that contain whatever a script does in them."""
READ_SECONDS_MAX = 50e-6
"""Reading a loss that takes longer was interrupted by another process."""
LAST_STEPS = 64
"""More than a window has that is recorded (recording_windows.py)."""
CHECK_STEPS = 16
"""Of so many steps on a GPU, one is checked for whether the GPU waits for the program."""
NO_MODEL = frozenset(("other", "update", "evaluate"))
"""Phases in which the call of a module may begin another phase."""


Loss = Tensor | float
"""A tensor only on a GPU, which would have to be waited for. On the host, a tensor that outlives
the step is in the way of the allocator, which then gives memory back and takes it again in each
step (docs/design-notes.md)."""


def nothing(*_: object) -> Any:
    """In place of a weak reference, or of a function to call."""


class StepTracker:
    """Follows one thread: the one that takes optimizer steps."""

    def __init__(
        self,
        on_step: Callable[[], None],
        on_gpu: Callable[[], None] = lambda: None,
        guard: Guard = lambda function: function,
    ) -> None:
        """`on_gpu` is called when the optimizer is found to be on a GPU."""
        self.events = EventQueue(guard)
        self._clock = PhaseClock(self.events.time)
        self.paused = PausedSteps()
        self.paused_steps = 0
        """How many steps were not recorded."""
        self.last_steps = deque[StepPhases](maxlen=LAST_STEPS)
        """Totals at the ends of the last recorded steps, not on a GPU."""
        self.has_loader = False
        """Whether the script takes batches from a DataLoader."""
        self.on_batches: Callable[[Any, int, float], object] = nothing
        """Called with a weak reference to the iterator of batches, their number, and the seconds
        they took."""
        self.steps = 0
        self.parts_of_first = 0
        """Steps of the clock that the first step consists of: one for each optimizer."""
        self.module_calls = 0
        """Estimate: each module of a model is called once."""
        self.recorder_seconds = 0.0
        """What recording collectives took the program."""
        self.exposed_seconds: dict[str, float] = {}
        """How long collectives blocked the program, by the phase that this would be part of."""
        self.timed_calls = self.skipped_calls = 0
        """Calls that may block the program (`script_calls`)."""
        self.samples = 0
        """In the batches of DataLoaders that models were trained on."""
        self.checkpoints = 0
        """Files that are saved between the same two steps are one."""
        self._last_checkpoint = -1
        """How many steps there were at the last one."""
        self.loss: Loss | None = None
        """Of the last backward pass."""
        self.loss_seconds = 0.0
        """What reading losses took the program."""
        self._checked_steps = self._delayed_steps = 0
        """Steps on a GPU that were checked, and those in which it waited for the program."""
        self._on_step, self._on_gpu = on_step, on_gpu
        self._is_on_gpu = False
        self._modules: dict[int, int] = {}
        """Number of modules by the id of a model."""
        self._optimizers: dict[int, ref[Optimizer]] = {}
        """Weak references by id; it is always the same one for an optimizer."""
        self._last_optimizer: Callable[[], Optimizer | None] = nothing
        """A weak reference to the one that ends steps."""
        self._others: set[int] = set()
        """Ids of the references to other optimizers that stepped since then."""
        self._is_manual = False
        """Whether the program says where steps end."""
        self._stepping: list[Callable[[], Optimizer | None]] = []
        """Optimizers whose step is in progress: one may call another, or a closure."""
        self._outer: list[Any] = []
        """For each input and backward pass in progress, what its end must know."""
        self._phase_after_update = "other"
        self._computes = False
        """Whether the step has called a model."""
        self._has_begun = False
        """Whether the first step has; until then, it is startup."""
        self.interruptions: list[tuple[float, float]] = []
        """Evaluation and checkpoints since the last call of `take_interruptions`."""
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
        self._maybe_forward = False
        """Whether it was called in training mode, but without gradients."""
        self._is_training = True
        """Whether the model that is trained is in training mode."""

    @property
    def clock(self) -> PhaseClock:
        self.events.flush()
        return self._clock

    @property
    def learning_rate(self) -> float | None:
        """Of the first parameter group; None if it is a tensor, which could be on a GPU."""
        optimizer = self._last_optimizer()
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        return rate if isinstance(rate, float) else None

    @property
    def delayed_share(self) -> float:
        """Of the time that the profiler takes the program, what delays steps.

        A GPU that is behind the program works meanwhile.
        """
        return self._delayed_steps / self._checked_steps if self._checked_steps else 1.0

    def is_in_thread(self) -> bool:
        """Whether this is the thread that trains, and what it does can be timed."""
        return get_ident() == self.events.thread and not self._is_capturing()

    def _is_capturing(self) -> bool:
        """The clock's marks must not become part of a CUDA graph."""
        return self._is_on_gpu and torch.cuda.is_current_stream_capturing()

    def _enter(self, phase: str) -> None:
        """Enter a phase of the step."""
        clock = self._clock
        if clock.phase in OUTSIDE:
            self._exclude(phase)
            if self.steps or self._computes:
                return
        elif self._has_begun:
            clock.enter(phase)
            return
        # What precedes the first step is startup, and so is evaluation without training.
        self._has_begun = True
        clock.begin_step(phase)

    def _exclude(self, phase: str) -> None:
        """Enter a phase; the one that ends is not part of the step."""
        self.interruptions.append(self._clock.exclude(phase))

    def _interrupt(self, phase: str) -> None:
        """Enter a phase that is not part of the step."""
        if self._clock.phase in OUTSIDE:
            self._exclude(phase)
        else:
            self._clock.enter(phase)

    def count_phase(self) -> None:
        """Count the current phase up to now, and continue it."""
        phase = self.clock.phase
        if phase in OUTSIDE:
            self._exclude(phase)
        else:
            self._clock.enter(phase)

    def take_interruptions(self) -> list[tuple[float, float]]:
        """Evaluation and checkpoints that ended since the last call: when they were."""
        taken, self.interruptions = self.interruptions, []
        return taken

    def _relabel(self, phase: str) -> None:
        """Change the phase that is about to end."""
        self._clock.phase = phase

    def begin_input(self, iterator: Callable[[], object], has_gradients: bool) -> None:
        """A batch is requested; `iterator` is a weak reference."""
        self._maybe_forward = False
        is_input = self._is_input(iterator, has_gradients)
        self._outer.append((is_input, self.events.time()))

    def _is_input(self, iterator: Callable[[], object], has_gradients: bool) -> bool:
        phase = self._clock.phase
        if phase in NOT_INTERRUPTED or self._is_capturing():
            return False
        if self._maybe_evaluation and phase == "forward":
            # No backward pass followed.
            self._relabel("evaluate")
            self._computes = False
        self._maybe_evaluation = False
        if self._others and self._iterator is iterator:
            # The iteration is over without a step of the optimizer that usually ends it.
            self.end_step()
        if not has_gradients or self._evaluation_iterator is iterator:
            self._maybe_teacher = nothing
            self._enter_evaluation()
            return False
        self._is_after_backward = False
        self._enter("input")
        return True

    def end_input(self, iterator: Callable[[], object], samples: int | None) -> None:
        """`samples` is None if there is no batch."""
        is_input, began = self._outer.pop() if self._outer else (False, 0.0)
        if is_input:
            self._clock.enter("other")
            self._has_batch = True
            if self._iterator is not iterator:
                # The last batches of the other one were for evaluation, or only looked at.
                self._iterator, self._samples_ahead = iterator, 0
            self._samples_ahead += samples or 0
        if samples is not None and self._clock.phase != "evaluate":
            self.on_batches(iterator, 1, self.events.time() - began)

    def _enter_evaluation(self) -> None:
        if self._clock.phase != "evaluate":
            self._interrupt("evaluate")

    def call_model(self, reference: ref[nn.Module], trains: bool, is_training: bool) -> None:
        """`trains`: with gradients, or in training mode (`is_training`) without a DataLoader."""
        clock = self._clock
        phase = clock.phase
        if phase not in NO_MODEL or self._is_capturing():
            return
        model = reference()
        if phase != "evaluate" and model is not None:
            self.module_calls += self._modules.get(id(model)) or self._count_modules(model)
        has_batch, self._has_batch = self._has_batch, False
        if trains:
            if phase == "evaluate" and (self._maybe_forward or self._has_teacher(model)):
                self._relabel("forward")
            self._evaluation_iterator, self._maybe_forward = nothing, False
            self._maybe_evaluation = not is_training and not self._stepping
            self._is_after_backward = False
            self._is_training = is_training
            self._enter("forward")
            self._computes = True
        elif phase != "evaluate":
            if has_batch:
                self._evaluation_iterator = self._iterator
            if has_batch or self._iterator is nothing:
                self._maybe_teacher = reference
            self._maybe_forward = is_training
            self._enter_evaluation()
        elif is_training:
            self._maybe_forward = True

    def _has_teacher(self, model: nn.Module | None) -> bool:
        """Whether a model was called without gradients for the training batch, like a teacher."""
        found, self._maybe_teacher = self._maybe_teacher(), nothing
        if found is None or self._iterator is not nothing:
            return found is not None
        # Without a DataLoader, calls of the trained model itself are taken for evaluation.
        return found is not model and found is not getattr(model, "module", None)

    def _count_modules(self, model: nn.Module) -> int:
        modules = self._modules[id(model)] = sum(1 for _ in model.modules())
        return modules

    def begin_backward(self, accumulates: bool, loss: Loss | None, noted: float) -> None:
        """`noted`: when the loss was not read yet."""
        self.loss_seconds += min(self.events.time() - noted, READ_SECONDS_MAX)
        self._outer.append(self._phase_after_backward(accumulates, loss))

    def _phase_after_backward(self, accumulates: bool, loss: Loss | None) -> str | None:
        """Enter the phase; returns None if it is part of another one."""
        phase = self._clock.phase
        if phase in NOT_INTERRUPTED or self._is_capturing():
            return None
        if phase == "other":
            # A compiled function or a functional model is not called as a module.
            self._relabel("forward")
        # Activation checkpointing computes without gradients first.
        self._relabel_forward()
        self._enter("backward")
        self._computes = True
        if not accumulates:
            return phase
        self._maybe_evaluation = self._has_batch = False
        self.samples += self._samples_ahead
        self._samples_ahead = 0
        if loss is not None:
            self.loss = loss
        return "update" if self._stepping else "other"

    def _relabel_forward(self) -> None:
        """A pass or an update shows what a model was called for, in training mode."""
        if self._maybe_forward and self._clock.phase == "evaluate":
            self._relabel("forward")
            self._evaluation_iterator = self._maybe_teacher = nothing
        self._maybe_forward = False

    def end_backward(self) -> None:
        phase = self._outer.pop() if self._outer else None
        if phase is not None:
            self._clock.enter(phase)
            self._is_after_backward = phase == "other"

    def expose(self, began: float, ended: float) -> None:
        if get_ident() == self.events.thread:
            self.events.append((perf_counter(), self._expose, began, ended))

    def _expose(self, began: float, ended: float) -> None:
        clock = self._clock
        if clock.log is not None:
            # A log has a phase only when it has ended.
            clock.enter(clock.phase)
        clock.expose(clock.phase, began, ended)
        clock.exposed.clear()
        self.note_exposed(clock.phase, ended - began)

    def note_exposed(self, phase: str, seconds: float) -> None:
        """Collectives blocked the program in a phase, which is now phase exchange."""
        if phase == "other" and self._is_after_backward:
            phase = "update"
        self.exposed_seconds[phase] = self.exposed_seconds.get(phase, 0.0) + seconds

    def begin_update(self, optimizer: ref[Optimizer], thread: int) -> None:
        if self.steps and thread != self.events.thread:
            return
        if optimizer in self._stepping:
            # Its last step raised an exception.
            self._stepping.clear()
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return
        if not self.steps:
            if self.events.thread != thread:
                self.events.follow(thread)
                self._outer.clear()
            self._use_device_of(optimizer())
        if self._is_capturing():
            self._stepping.clear()
            return
        # Gradients may be computed without autograd.
        self._relabel_forward()
        phase = self._clock.phase
        # Optimizers may step for each parameter as soon as its gradient is known.
        self._phase_after_update = "backward" if phase == "backward" else "other"
        if self._is_after_backward and phase == "other":
            # Unscaling and clipping of gradients.
            self._relabel("update")
        self._enter("update")

    def _use_device_of(self, optimizer: Optimizer | None) -> None:
        device = self._device_of(optimizer)
        if device.type != "cuda" or isinstance(self._clock, CudaPhaseClock):
            return
        self._is_on_gpu = True
        if not torch.cuda.is_current_stream_capturing():
            self._clock = clock_for(device, self._clock)
            # Of the first step, it measures only the rest.
            self._clock.begin_step("other")
            self._on_gpu()

    @staticmethod
    def _device_of(optimizer: Optimizer | None) -> torch.device:
        groups = optimizer.param_groups if optimizer is not None else ()
        parameters = (each for group in groups for each in group["params"])
        return next((each.device for each in parameters), torch.device("cpu"))

    def end_paused_step(self, input_seconds: float, backward_seconds: float) -> None:
        """`PausedSteps` had these totals."""
        self.end_step(measured=Measured(input_seconds, backward_seconds))

    def end_update(self, optimizer: ref[Optimizer]) -> None:
        if not self._stepping or self._stepping[0] is not optimizer:
            return
        self._stepping.clear()
        is_known = optimizer is self._last_optimizer and not self._is_manual
        if is_known or self._ends_step(optimizer):
            self.end_step(self._phase_after_update)
        else:
            self._clock.enter(self._phase_after_update)

    def clear_gradients(self, ended: float) -> None:
        """The gradients are cleared; a GPU does nothing for it."""
        phase = self._clock.phase
        if phase not in ("other", "forward") or not self._has_begun or self._is_on_gpu:
            # It is part of the phase.
            return
        if self._is_after_backward and phase == "other":
            self._relabel("update")
        self._clock.enter("update")
        self.events.advance(ended)
        self._clock.enter(phase)

    def skip_update(self, optimizer: Optimizer) -> None:
        """A GradScaler skipped the step of an optimizer, because gradients were not finite."""
        self.events.flush()
        if self.is_in_thread() and self._ends_step(ref(optimizer)):
            self.end_step()

    def _ends_step(self, optimizer: ref[Optimizer]) -> bool:
        if self._is_manual:
            return False
        if optimizer is not self._last_optimizer:
            key = id(optimizer)
            # If it steps twice, the one that ended steps was not used in a whole iteration.
            if key in self._optimizers and key not in self._others:
                self._others.add(key)
                return False
            if self.steps == 1 and key not in self._optimizers:
                # The first iteration has several optimizers.
                self.steps = 0
            # Of those that step in an iteration, the last one appears last.
            self._optimizers[key] = self._last_optimizer = optimizer
        return True

    def end_step(self, phase: str = "other", measured: Measured | None = None) -> None:
        """End the step; the next one begins now unless evaluation or a checkpoint comes first.

        `measured`: the totals of a pause at the end of the step, if it was noted before.
        """
        if self._clock.phase in OUTSIDE or not self._has_begun:
            self._enter("other")
        if self._is_on_gpu and self.steps % CHECK_STEPS == CHECK_STEPS - 1:
            self._checked_steps += 1
            self._delayed_steps += self._clock.is_up_to_date()
        self._clock.next_step(phase)
        if self._is_on_gpu:
            # Steps before a capture are often executed on another stream than later ones.
            self._clock.use_current_stream()
        self._computes = self._is_after_backward = False
        self._others.clear()
        self.parts_of_first += not self.steps
        self.steps += 1
        if self.paused.thread:
            self.paused.ends.append(measured or self.paused.measured)
        elif not self._is_on_gpu:
            self.last_steps.append(self.phases_so_far())
            if self.steps == 1:
                self.events.defer()
        self._on_step()

    def phases_so_far(self) -> StepPhases:
        exposed = self.exposed_seconds.get("backward", 0.0)
        return StepPhases(dict(self._clock.known_seconds), exposed)

    def end_step_here(self) -> None:
        """End a step by request; from now on, optimizers do not end steps."""
        self.paused.interrupt()
        self.events.flush()
        if not self.steps:
            self.events.follow(get_ident())
        elif self.steps == 1 and not self._is_manual:
            # An optimizer ended the first step before it was known that it does not.
            self.steps = 0
        self._is_manual = True
        self.end_step()

    @property
    def can_pause(self) -> bool:
        """Whether steps from here on may be noted less closely, if they are like those before."""
        is_between_steps = self.clock.phase == "other" and not self._stepping and not self._outer
        return is_between_steps and self.events.is_deferred and not self._is_manual

    def begin_pause(self) -> None:
        self.events.noted_thread = 0
        # The next step trains on a batch that arrived before this one ended.
        self.samples += self._samples_ahead
        self._samples_ahead = 0
        self.paused.begin(
            self.events.thread, self._last_optimizer, self._iterator, self._is_training
        )

    def take_paused(self) -> Noted:
        """Count what was noted in a pause since the last call."""
        paused, now = self.paused, perf_counter()
        if paused.is_in_input:
            paused.input_seconds += now - paused.input_began
            paused.input_began = now
        if paused.is_in_backward:
            paused.backward_seconds += now - paused.backward_began
            paused.backward_began = now
        noted = paused.take()
        self.samples += noted.samples
        self.count_paused_batches()
        return noted

    def count_paused_batches(self) -> None:
        """Before the batches of another iterator, whose loader may be another one."""
        paused = self.paused
        if paused.batches:
            seconds = paused.input_seconds - paused.counted_seconds
            self.on_batches(paused.iterator, paused.batches, seconds)
            paused.batches, paused.counted_seconds = 0, paused.input_seconds

    def stop(self) -> None:
        """Ignore events from now on."""
        self.paused.end()
        self.events.stop()

    def end_pause(self) -> None:
        paused, events = self.paused, self.events
        paused.end()
        events.noted_thread = events.thread
        self._iterator, self._has_batch = paused.iterator, paused.has_batch
        # The end of what is in progress is noted.
        if paused.is_in_update:
            self._clock.enter("update")
            self._phase_after_update = "other"
            self._stepping.append(self._last_optimizer)
        if paused.is_in_input:
            self._clock.enter("input")
            self._outer.append((True, self.events.time()))
        if paused.is_in_backward:
            self._clock.enter("backward")
            self._outer.append("update" if paused.is_in_update else "other")
        if self._has_batch:
            # No model was trained on it yet.
            self._samples_ahead = paused.last_samples
            self.samples -= paused.last_samples
        events.is_in_model = False

    def divide_cells(self) -> None:
        """A cell of a notebook begins or ends: phase other, up to here, is not part of a step."""
        if not self.is_in_thread():
            return
        self.paused.interrupt()
        if self.clock.phase == "other":
            self._clock.exclude("other")
        else:
            self._interrupt("other")
        # The next call of a module may begin a phase again.
        self.events.is_in_model = False

    def replay_graph(self) -> None:
        """A CUDA graph is launched; which phases it contains is not known."""
        if self.clock.phase != "other" or not self.is_in_thread():
            return
        self._enter("forward")
        self._computes, self._has_batch = True, False
        self.samples += self._samples_ahead
        self._samples_ahead = 0

    def begin_checkpoint(self) -> str | None:
        """Returns the phase after it; None if it is part of another one."""
        if not self.is_in_thread():
            return None
        self.paused.interrupt()
        phase = self.clock.phase
        if phase == "checkpoint":
            return None
        self._interrupt("checkpoint")
        self.checkpoints += self.steps != self._last_checkpoint
        self._last_checkpoint = self.steps
        return phase

    def end_checkpoint(self, phase: str) -> None:
        self.events.flush()
        self._exclude(phase)
