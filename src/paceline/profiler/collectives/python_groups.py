"""Process groups that are Python classes, such as paceline's own.

Their methods replace the operators of the dispatcher, and may do all of the work inside the call or
inside a method of the Work that they return.
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.profiler.collectives import operations as collective_operations
from paceline.profiler.collectives.operations import Operation

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import CollectiveRecorder

graph_task = torch._C._current_graph_task_id
BLOCKING_METHODS = ("wait", "synchronize", "result", "get_future")


class PythonGroups:
    def __init__(self, recorder: CollectiveRecorder) -> None:
        self._recorder = recorder
        self._classes: set[type] = {dist.ProcessGroup, dist.Work}
        """Those whose methods are replaced, and those of torch."""
        self.inside: set[int] = set()
        """Threads that are in a method of a group: what it calls is not another collective."""

    def watch(self, cls: type) -> None:
        """Record the collectives of a class of process groups."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        for operation in collective_operations.ALL:
            for name in operation.methods:
                if name in vars(cls):
                    make = functools.partial(self._make_collective, operation)
                    self._recorder.hooks.replace(cls, name, make)

    def _make_collective(self, operation: Operation, original: Any) -> Any:
        recorder = self._recorder

        @recorder.guard
        def arrive(group: Any, args: tuple[Any, ...], arrival: float) -> int:
            tensor, size = operation.measure(args)
            return recorder.begin(
                operation, group, tensor, size, operation.peer(args), True, arrival, graph_task()
            )

        @recorder.guard
        def returned(work: Any, position: int, before: str | None, arrival: float) -> None:
            if work.is_completed():
                recorder.leave(before, position, arrival)
            else:
                recorder.blocked.leave(before)
                self._watch_work(type(work))
                recorder.hold(work, position, None)

        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            thread, arrival = get_ident(), perf_counter()
            position = None if thread in self.inside else arrive(group, args, arrival)
            if position is None:
                return original(group, *args, **kwargs)
            before = recorder.blocked.enter()
            self.inside.add(thread)
            try:
                work = original(group, *args, **kwargs)
            except BaseException:
                recorder.failed(position)
                recorder.blocked.leave(before)
                raise
            finally:
                self.inside.discard(thread)
            returned(work, position, before, arrival)
            return work

        return collective

    def _watch_work(self, cls: type) -> None:
        for base in cls.__mro__:
            if base is dist.Work:
                break
            if base not in self._classes:
                self._classes.add(base)
                for name in BLOCKING_METHODS:
                    if name in vars(base):
                        self._recorder.hooks.replace(base, name, self._make_blocking)

    def _make_blocking(self, original: Any) -> Any:
        recorder = self._recorder

        @recorder.guard
        def returned(
            result: Any, work: Any, position: int, before: str | None, began: float
        ) -> None:
            if isinstance(result, torch.futures.Future) and not result.done():
                recorder.blocked.leave(before)
                result.add_done_callback(recorder.ender(work, position))
            else:
                recorder.pending.pop(id(work), None)
                recorder.leave(before, position, began)

        def method(work: Any, *args: Any, **kwargs: Any) -> Any:
            pending = recorder.pending.get(id(work))
            if pending is None or get_ident() in self.inside:
                return original(work, *args, **kwargs)
            began = perf_counter()
            before = recorder.blocked.enter()
            # One method may call another.
            self.inside.add(get_ident())
            try:
                result = original(work, *args, **kwargs)
            except BaseException:
                recorder.failed(pending.position)
                recorder.blocked.leave(before)
                raise
            finally:
                self.inside.discard(get_ident())
            returned(result, work, pending.position, before, began)
            return result

        return method
