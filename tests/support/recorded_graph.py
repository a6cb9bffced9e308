"""A CUDA graph on the CPU: records operations with their tensors, and repeats them.

As in a CUDA graph, recording has no effect on tensors that exist, Python code does not run again,
and its values are part of the graph: only the contents of tensors may change between replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READ_BY_PROGRAM = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


_WRITES_WITHOUT_SAYING_SO = {torch.ops.aten.native_batch_norm.default}
"""Its schema does not say that it updates the running statistics."""


class GraphError(RuntimeError):
    """What a CUDA graph cannot contain."""


class RecordedGraph(TorchDispatchMode):
    """Use `with graph.record()`, then `graph.replay()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Callable[[], Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Memory that recorded operations wrote to, and its contents before, by address."""

    @contextmanager
    def record(self) -> Iterator[None]:
        try:
            with self:
                yield
        finally:
            for memory, contents in self._before.values():
                memory.copy_(contents)
            self._before.clear()

    def replay(self) -> None:
        with torch.no_grad():
            for call in self._calls:
                call()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READ_BY_PROGRAM:
            raise GraphError(f"{func} reads a value while a graph is recorded")
        inputs = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable or func in _WRITES_WITHOUT_SAYING_SO:
            for tensor in inputs:
                self._keep(tensor)
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self._calls.append(lambda: func(*args, **kwargs))
        elif not _are_views(outputs, inputs):
            self._calls.append(lambda: _copy(func(*args, **kwargs), outputs))
        return result

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._before:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage.data_ptr()] = (memory, memory.clone())


class RecordingBackend:
    """Records the work of training steps in place of CUDA graphs."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, function: Callable[[], Tensor]) -> tuple[_CountedGraph, Tensor]:
        graph = RecordedGraph()
        with graph.record():
            output = function()
        return _CountedGraph(graph, self), output


class _CountedGraph:
    def __init__(self, graph: RecordedGraph, backend: RecordingBackend) -> None:
        self._graph, self._backend = graph, backend

    def replay(self) -> None:
        self._backend.replays += 1
        self._graph.replay()


def _are_views(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return whether all outputs are memory of the inputs, so that a replay need not compute them.

    Detached copies of results stay valid for the same reason.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return all(output.untyped_storage().data_ptr() in memory for output in outputs)


def _copy(result: Any, outputs: Sequence[Tensor]) -> None:
    fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for output, value in zip(outputs, fresh, strict=True):
        output.copy_(value)
