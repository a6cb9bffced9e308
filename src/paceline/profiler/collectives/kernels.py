"""Kernels of the dispatcher through which every collective passes, from Python and C++.

torch.distributed, the C++ code of DistributedDataParallel, FSDP and functional collectives all call
operators of the dispatcher: `c10d::allreduce_` and others. These kernels are for the dispatch key
BackendSelect, which has none for them, and which every call passes before it reaches the kernel of
its device. A kernel notes the arrival and calls the next one, so tensors, process groups and
results are those of the program.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import graph

from paceline.measure.timeline import is_capturing
from paceline.profiler.collectives import operations as collective_operations
from paceline.profiler.collectives.operations import Operation
from paceline.profiler.tracking.gpu_times import GpuInterval
from paceline.profiler.tracking.hooks import never_compile

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import CollectiveRecorder

DISPATCH_SECONDS = 25e-6
"""Estimate of what a kernel in Python costs before and after it runs, with cold caches
(docs/design-notes.md)."""

_RUN_BACKWARD = inspect.unwrap(graph._engine_run_backward).__code__
"""The innermost function in Python while the engine runs."""

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class Arrival(NamedTuple):
    position: int
    """In the log."""
    tensor: Tensor | None
    """The first one."""
    is_async: bool
    """Whether the call does not wait."""
    is_nccl: bool
    task: int
    """The backward pass that issued it, or -1."""


class CollectiveKernels:
    """Records from `enable` to `disable`."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        self._recorder = recorder
        self._kernels: list[tuple[str, str, Callable[..., Any]]] = []
        """Namespace and name of the operator, and the kernel."""
        self._libraries: list[torch.library.Library] = []

    @property
    def are_enabled(self) -> bool:
        return bool(self._libraries)

    def enable(self) -> None:
        if not self._kernels:
            self._kernels = [
                ("c10d", operation.op, self._make(operation))
                for operation in collective_operations.ALL
                if hasattr(torch.ops.c10d, operation.op)
            ]
            self._kernels.append(("_c10d_functional", "wait_tensor", self._make_wait()))
        libraries: dict[str, torch.library.Library] = {}
        for namespace, name, kernel in self._kernels:
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL")
            libraries[namespace].impl(name, kernel, "BackendSelect", with_keyset=True)
        self._libraries = list(libraries.values())

    def disable(self) -> None:
        """No thread may be in a kernel."""
        for library in self._libraries:
            library._destroy()
        self._libraries = []

    def _make(self, operation: Operation) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, operation.op).default
        returns_work_only = len(op._schema.returns) == 1
        redispatch = op._handle.redispatch_boxed
        blocks = operation.blocks

        recorder = self._recorder
        inside, blocked = recorder.python_groups.inside, recorder.blocked
        program, guard = blocked.program, recorder.guard
        arrive = guard(self._make_arrive(operation))
        begin_interval, end_interval = guard(GpuInterval), guard(recorder.end_interval)

        @guard
        def launched(result: Any, arrived: Arrival, caller: FrameType | None) -> None:
            work = result if returns_work_only else result[1]
            is_engine = caller is None or caller.f_code is _RUN_BACKWARD
            recorder.launched(operation, work, arrived, is_engine)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            arrival = perf_counter()
            # Recorded before it is issued: a mismatch may end the process at once.
            arrived = None if inside and get_ident() in inside else arrive(args, arrival)
            if arrived is None:
                return redispatch(keyset & _BELOW, *args, **kwargs)
            position, tensor, is_async, is_nccl, _ = arrived
            # One of NCCL that is synchronous is executed by the current stream, without a Work.
            is_synchronous = is_nccl and not is_async
            before = blocked.enter() if blocks or is_synchronous else None
            device = None if tensor is None else tensor.device
            interval = begin_interval(device) if is_synchronous else None
            began = perf_counter()
            try:
                result = redispatch(keyset & _BELOW, *args, **kwargs)
            except BaseException:
                recorder.failed(position)
                raise
            finally:
                ended = perf_counter()
                if interval is not None:
                    end_interval(interval, position)
                    blocked.leave(before)
                elif blocks:
                    recorder.leave(before, position, arrival)
            if not (blocks or is_synchronous):
                launched(result, arrived, sys._getframe().f_back)
            program.recorder_seconds += began - arrival + perf_counter() - ended + DISPATCH_SECONDS
            return result

        return never_compile(kernel)

    def _make_arrive(
        self, operation: Operation
    ) -> Callable[[tuple[Any, ...], float], Arrival | None]:
        names = [
            argument.name
            for argument in getattr(torch.ops.c10d, operation.op).default._schema.arguments
        ]
        at_group = names.index("process_group")
        at_async = names.index("async_op") if "async_op" in names else len(names)
        at_peer = next(
            (names.index(name) for name in ("root_rank", "dst", "src") if name in names), 0
        )
        recorder, blocks = self._recorder, operation.blocks
        group_of, graph_task = dist.ProcessGroup.unbox, torch._C._current_graph_task_id

        def arrive(args: tuple[Any, ...], arrival: float) -> Arrival | None:
            # Arguments at the end that have their default value are omitted.
            is_async = not blocks and (len(args) <= at_async or args[at_async])
            group, peer = group_of(args[at_group]), args[at_peer] if at_peer else -1
            tensor, size_bytes = operation.measure(args)
            if tensor is not None and tensor.is_cuda and is_capturing():
                return None
            task = graph_task()
            position = recorder.begin(
                operation, group, tensor, size_bytes, peer, is_async, arrival, task
            )
            is_nccl = recorder.has_nccl and recorder.uses_nccl(group, tensor, position)
            return Arrival(position, tensor, is_async, is_nccl, task)

        return arrive

    def _make_wait(self) -> Callable[..., Any]:
        redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed
        recorder = self._recorder
        take = recorder.guard(recorder.take_by_storage)

        def kernel(keyset: Any, tensor: Tensor) -> Any:
            waiting = take(tensor)
            if not waiting:
                return redispatch(keyset & _BELOW, tensor)
            began = perf_counter()
            before = recorder.blocked.enter()
            try:
                return redispatch(keyset & _BELOW, tensor)
            finally:
                for pending in waiting:
                    recorder.leave(before, None if pending.is_on_gpu else pending.position, began)

        return never_compile(kernel)
