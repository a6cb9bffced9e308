"""Records every collective of every process group, from its arrival to its end.

Kernels of the dispatcher call it (kernels.py), and methods of process groups that are Python
classes (python_groups.py).

The program's thread is blocked by

- `wait` of a Work, also inside synchronous functions, and `wait_tensor` of functional collectives
- C++ functions that wait: `BLOCKING_FUNCTIONS`
- the end of a backward pass, where DDP waits in C++ for its buckets (backward_passes.py)

This time is phase exchange. The rest of a collective's time is overlapped.

NCCL executes collectives on the GPU. `wait` then makes a stream wait, and the phase is measured by
the events of the clock. What a collective takes is known by the events of its Work, or for a
synchronous one by those around it. While a CUDA graph is captured, nothing is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from paceline.measure.timeline import is_capturing
from paceline.profiler.collectives.backward_passes import BackwardPasses, unbox
from paceline.profiler.collectives.blocked_thread import BlockedThread, Program
from paceline.profiler.collectives.ddp import DdpModels
from paceline.profiler.collectives.flight_recorder import number_of
from paceline.profiler.collectives.gloo_threads import wait_until_idle
from paceline.profiler.collectives.kernels import Arrival, CollectiveKernels
from paceline.profiler.collectives.log import (
    ASYNC,
    BACKWARD,
    FAILED,
    ON_GPU,
    POLLED,
    CollectiveLog,
    Counts,
)
from paceline.profiler.collectives.operations import METHODS, Operation, transfer_counts
from paceline.profiler.collectives.python_groups import PythonGroups
from paceline.profiler.tracking.event_queue import Guard
from paceline.profiler.tracking.gpu_times import GpuInterval
from paceline.profiler.tracking.hooks import Hooks

EXACT_SECONDS = 0.1
"""Mean interval between operations, or backward passes, whose exact end is noted by a callback. It
costs the program up to 0.2 ms, because a thread of the process group needs the GIL."""

MAX_PENDING = 512
"""Operations whose end is not known, and for which the program may still wait."""

BLOCKING_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (dist, "_broadcast_coalesced"),
    (dist, "_verify_params_across_processes"),
)
"""C++ functions that issue collectives and wait for them."""


@dataclass(slots=True)
class RecordedGroup:
    """A process group, from its first record on."""

    index: int
    rank: int
    size: int
    sequence: count[int] = field(default_factory=count)
    messages: dict[tuple[str, int], count[int]] = field(default_factory=dict)
    """Sequence numbers of messages by direction and peer."""
    counts: dict[tuple[Any, ...], Counts] = field(default_factory=dict)
    """Of the operations so far, by operation, size, peer and dtype."""
    is_nccl: bool = False
    """Whether its operations run on a GPU, after the functions that wait for them return."""
    calls_before: int = 0
    """Collectives that the group itself counted before its first record."""

    def calls(self) -> int:
        """How many of its collectives are recorded, or counted by `continue_at`."""
        number = next(self.sequence)
        self.sequence = count(number)
        return number

    def continue_at(self, number: int) -> None:
        """The next collective is `number`."""
        self.sequence = count(number)


class Pending(NamedTuple):
    """An operation that has not ended, or that the program did not wait for yet."""

    work: Any
    """The Python object, which exists until then, so that `wait` is called on the same one; of a
    synchronous operation on a GPU, its interval."""
    position: int
    storage: int
    """Address of the first tensor: `wait_tensor` gets no Work."""
    is_on_gpu: bool = False
    """Whether the program does not wait for the end, but a stream of the GPU does."""


class CollectiveRecorder:
    """Records from `install` to `remove`. `guard` keeps its errors from the program."""

    def __init__(self, program: Program, folder: Path, guard: Guard = lambda function: function):
        self.log: CollectiveLog | None = None
        """Created by the first collective, when the rank is known."""
        self.pending: dict[int, Pending] = {}
        """By id of the Work."""
        self.guard = guard
        self.hooks = Hooks()
        self.blocked = BlockedThread(program, guard)
        self.failed, self.leave = guard(self._failed), guard(self._leave)
        self._folder = folder
        self._is_installed = False
        self.groups: dict[str, RecordedGroup] = {}
        """By name."""
        self.can_pause = True
        """Whether the process groups count their collectives as the log does (pauses.py)."""
        self.calls_of_other_threads = 0
        self.before_call: Callable[[], object] = lambda: None
        """Called before the script issues a collective, creates or destroys a group, or creates a
        DDP model."""
        self.before_shutdown: Callable[[], object] = lambda: None
        """Called before a group is destroyed."""
        self.script_calls = 0
        """Collectives that Python code issued."""
        self.other_records = 0
        """Records besides those of DDP."""
        self._group_numbers = count()
        self._incarnations: dict[str, count[int]] = {}
        self._polled: deque[Pending] = deque()
        """Those without a callback at their end, in the order of their start."""
        self.end_step = guard(self._poll)
        """The end of what the program does not wait for is known by the end of a step."""
        self.has_nccl = False
        """Whether collectives may run on a GPU."""
        self._next_exact = 0.0
        self._random = Random(0)
        self._models = DdpModels(self)
        self._backward_passes = BackwardPasses(self, self._models)
        self.python_groups = PythonGroups(self)
        self.kernels = CollectiveKernels(self)

    def install(self) -> None:
        """Begin to record, when there is a process group: most processes never create one."""
        self.hooks.replace(distributed_c10d, "_new_process_group_helper", self._make_creation)
        if distributed_c10d._world.pg_map:
            self._install_hooks()

    def _install_hooks(self) -> None:
        self._is_installed = True
        self.kernels.enable()
        for name in ("wait", "synchronize"):
            self.hooks.replace(dist.Work, name, self._make_blocking)
        for owner, name in BLOCKING_FUNCTIONS:
            self.hooks.replace(owner, name, self._make_section)
        # DDP calls it in each step.
        self.hooks.replace(dist.Reducer, "_rebuild_buckets", self.blocked.make_section)  # type: ignore[attr-defined]  # not in the stubs
        for name in METHODS:
            if hasattr(dist.ProcessGroup, name):
                self.hooks.replace(dist.ProcessGroup, name, self._make_script_call)
        self.hooks.replace(dist.ProcessGroup, "shutdown", self._make_shutdown)
        self._models.install()
        for group in distributed_c10d._world.pg_map:
            self.python_groups.watch(type(group))

    def remove(self) -> None:
        self.hooks.remove()
        self.kernels.disable()
        if self.log is not None:
            wait_until_idle()
            self.guard(self._poll)()
            # Later callbacks see that it is closed.
            log, self.log = self.log, None
            log.close()
        self.pending.clear()
        self._polled.clear()

    # The life of a collective

    def begin(
        self,
        operation: Operation,
        group: Any,
        tensor: Tensor | None,
        size_bytes: int,
        peer: int,
        is_async: bool,
        arrival: float,
        task: int,
    ) -> int:
        """Record an arrival; returns the position in the log.

        `tensor` is the first one, and `size_bytes` the size of all. `task`: the backward pass, or
        -1.
        """
        known = self.groups.get(group.group_name) or self._add_group(group)
        assert self.log is not None
        if operation.is_message:
            sequence = next(known.messages.setdefault((operation.name, peer), count()))
            self.can_pause = False
        else:
            sequence = next(known.sequence)
        flags = self._models.flags
        if not flags and task == -1 and self.blocked.section is None:
            self.other_records += 1
        if is_async:
            flags |= ASYNC
        if task != -1:
            flags |= BACKWARD
        elif not self.blocked.program.is_in_thread():
            self.calls_of_other_threads += 1
        if operation.is_part:
            size_bytes *= known.size
        key = operation.code, size_bytes, peer, tensor is not None and tensor.dtype
        counts = known.counts.get(key)
        if counts is None:
            element_bytes = 1 if tensor is None else tensor.element_size()
            counts = known.counts[key] = transfer_counts(
                operation.name, size_bytes, element_bytes, known.rank, known.size, peer
            )
        position = self.log.add(
            known.index, operation.code, flags, sequence, size_bytes, counts, peer, arrival
        )
        if self.blocked.section is not None:
            self.blocked.add_to_section(self.log, position)
        return position

    def uses_nccl(self, group: Any, tensor: Tensor | None, position: int) -> bool:
        if not (self.groups[group.group_name].is_nccl and (tensor is None or tensor.is_cuda)):
            return False
        if self.log is not None:
            self.log.set_flag(position, ON_GPU)
        return True

    def end_interval(self, interval: GpuInterval, position: int) -> None:
        interval.end()
        self._poll()
        self._poll_later(Pending(interval, position, 0, is_on_gpu=True))

    def launched(self, operation: Operation, work: Any, arrived: Arrival, is_engine: bool) -> None:
        """`is_engine`: in a backward pass, C++ code called the operator, not Python code."""
        position, tensor, is_async, is_nccl, task = arrived
        if task != -1 and not is_nccl and is_engine:
            # C++ code such as that of DDP issued it: the program has no Work to wait for.
            self._backward_passes.add(task, position, work)
            return
        own = unbox(work)
        if own is None:
            # Several operations are launched together, and only the last one has a Work.
            self.has_ended(position, perf_counter())
            return
        pending = self.hold(own, position, tensor, is_nccl)
        self._poll()
        is_in_pass = task != -1 and self.blocked.section is None
        if is_nccl:
            # A future of NCCL is completed when the work is launched.
            self._poll_later(pending)
            if is_in_pass:
                self._backward_passes.add_on_gpu(task)
        elif not is_async or operation.is_message:
            # It ends with `wait`.
            return
        elif is_in_pass:
            self._backward_passes.add(task, position, work, id(own))
        elif self.is_exact_due(perf_counter()):
            self.note_end(own, position)
        else:
            self._poll_later(pending)

    def is_exact_due(self, now: float) -> bool:
        """Whether the exact end of what begins now is noted; irregular, since buckets repeat."""
        if now < self._next_exact:
            return False
        self._next_exact = now + EXACT_SECONDS * (0.5 + self._random.random())
        return True

    def note_end(self, work: Any, position: int) -> None:
        """Note the exact end by a callback."""
        work.get_future().add_done_callback(self.ender(work, position))

    def hold(
        self, work: Any, position: int, tensor: Tensor | None, is_on_gpu: bool = False
    ) -> Pending:
        if len(self.pending) >= MAX_PENDING:
            # The program did not wait for the oldest.
            for key in list(self.pending)[: MAX_PENDING // 2]:
                self.pending.pop(key, None)
        pending = Pending(work, position, _address(tensor), is_on_gpu)
        self.pending[id(work)] = pending
        return pending

    def _poll_later(self, pending: Pending) -> None:
        if len(self._polled) >= MAX_PENDING:
            # A record without an end is that of an operation in which the rank still is.
            self.has_ended(self._polled.popleft().position, perf_counter())
        self._polled.append(pending)

    def _poll(self) -> None:
        if self.has_nccl and is_capturing():
            return
        while self._polled and self._polled[0].work.is_completed():
            pending = self._polled.popleft()
            self.pending.pop(id(pending.work), None)
            if pending.is_on_gpu:
                self._has_ended_on_gpu(pending)
            else:
                self.has_ended(pending.position, perf_counter())

    def _has_ended_on_gpu(self, pending: Pending) -> None:
        if self.log is None:
            return
        work = pending.work
        try:
            seconds = (
                work.seconds() if isinstance(work, GpuInterval) else work._get_duration() / 1000
            )
        except RuntimeError:
            # It has no events of its own, since it is part of a larger operation.
            self.has_ended(pending.position, perf_counter())
        else:
            self.log.end(pending.position, self.log.arrival(pending.position) + seconds)

    def has_ended(self, position: int, moment: float) -> None:
        """It ended some time before `moment`."""
        if self.log is not None and not self.log.ended(position):
            self.log.end(position, moment)
            self.log.set_flag(position, POLLED)

    def ender(self, work: Any, position: int) -> Callable[[Any], None]:
        """Return a callback for the end, which a thread of the process group calls."""
        key, log, pending = id(work), self.log, self.pending
        assert log is not None

        def ended(_: Any) -> None:
            if self.log is log and not log.ended(position):
                log.end(position, perf_counter())
            pending.pop(key, None)

        return self.guard(ended)

    def _failed(self, position: int | None) -> None:
        if self.log is not None and position is not None:
            self.log.set_flag(position, FAILED)

    def _leave(self, before: str | None, position: int | None, began: float) -> None:
        """End the blocking of the program by one operation, which has ended."""
        ended = self.blocked.leave(before)
        if self.log is not None and position is not None:
            if not self.log.ended(position):
                self.log.end(position, ended or perf_counter())
            if before is not None:
                # As long as phase exchange, of which the wait is a part.
                began = max(began, self.blocked.entered)
                self.log.block(position, began, ended or perf_counter())

    def _make_blocking(self, original: Any) -> Any:
        """Make `wait` of Work."""
        pending, ended = self.pending, self.guard(self.has_ended)

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            held = pending.pop(id(work), None)
            if held is None:
                return original(work, *args, **kwargs)
            began = perf_counter()
            if not held.is_on_gpu and work.is_completed():
                ended(held.position, began)
                return original(work, *args, **kwargs)
            before = self.blocked.enter()
            try:
                return original(work, *args, **kwargs)
            except BaseException:
                self.failed(held.position)
                raise
            finally:
                self.leave(before, None if held.is_on_gpu else held.position, began)

        return wait

    def take_by_storage(self, tensor: Tensor) -> list[Pending]:
        if not self.pending or (self.has_nccl and is_capturing()):
            return []
        storage = _address(tensor)
        found = [each for each in list(self.pending.values()) if each.storage == storage]
        waiting = []
        for each in found:
            self.pending.pop(id(each.work), None)
            if not each.is_on_gpu and each.work.is_completed():
                self.has_ended(each.position, perf_counter())
            else:
                waiting.append(each)
        return waiting

    # Process groups

    def _make_script_call(self, original: Any) -> Any:
        """Make a method through which Python code, but not that of C++, issues collectives."""

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            if type(group) is dist.ProcessGroup:
                self.before_call()
                self.script_calls += 1
            return original(group, *args, **kwargs)

        # C++ calls the methods of subclasses in Python. It takes this one for that of a subclass,
        # and would call it again from the original, if its code had another name.
        method.__code__ = method.__code__.replace(co_name=original.__name__)
        return method

    def _make_shutdown(self, original: Any) -> Any:
        """Make the method that destroys a group, which does not count its collectives any more."""

        def shutdown(group: Any) -> Any:
            self.before_call()
            self.before_shutdown()
            return original(group)

        return shutdown

    def _make_section(self, original: Any) -> Any:
        """Make a function that issues collectives, and waits for them, in C++."""
        section = self.blocked.make_section(original)

        def function(*args: Any, **kwargs: Any) -> Any:
            if not self._models.flags:
                self.before_call()
            return section(*args, **kwargs)

        return function

    def _add_group(self, group: Any) -> RecordedGroup:
        name = group.group_name
        ranks = distributed_c10d._world.pg_group_ranks.get(group)
        if self.log is None:
            self.log = CollectiveLog(self._folder, dist.get_rank() if dist.is_initialized() else 0)
        known = RecordedGroup(next(self._group_numbers), group.rank(), group.size())
        self.log.describe(
            "group",
            index=known.index,
            name=name,
            incarnation=next(self._incarnations.setdefault(name, count())),
            ranks=sorted(ranks, key=ranks.__getitem__) if ranks else list(range(group.size())),
            backend=dist.get_backend(group) if ranks else group.name(),
        )
        known.is_nccl = _times_nccl(group)
        self.has_nccl |= known.is_nccl
        number = number_of(group) if type(group) is dist.ProcessGroup and ranks else None
        if number is None or known.is_nccl:
            self.can_pause = False
        known.calls_before = number or 0
        self.groups[name] = known
        return known

    def _make_creation(self, original: Any) -> Any:
        @self.guard
        def created(group: Any) -> None:
            if not self._is_installed:
                self._install_hooks()
            self.before_call()
            if isinstance(group, dist.ProcessGroup):
                # The name of a destroyed group is used again.
                self.groups.pop(group.group_name, None)
                self.python_groups.watch(type(group))

        def create(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            created(result[0])
            return result

        return create


def _times_nccl(group: Any) -> bool:
    """Whether tensors on a GPU use NCCL; if so, its Works are timed from now on."""
    try:
        is_nccl = bool(group._get_backend(torch.device("cuda")).name() == "nccl")
    except RuntimeError:
        # There is no backend for GPUs.
        return False
    if is_nccl:
        with suppress(RuntimeError):
            group._enable_collectives_timing()
    return is_nccl


def _address(tensor: Tensor | None) -> int:
    if tensor is None or tensor.layout is not torch.strided:
        return 0
    return tensor.data_ptr()
