"""Gradients of linear layers as their factors.

The gradient of a linear layer's weight is a product: the gradients of its outputs, transposed,
times its inputs, both with one row for each sample. Where the batch is smaller than the layer, the
factors are much smaller than the product. So a worker deposits its factors, and whoever updates
some rows of the weight multiplies them for the samples of all workers: no more multiplications in
all than when each multiplies its own, and no gradient that is written, copied and summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment, aligned_offsets

LEAST_WEIGHT_BYTES = 256 * 1024
"""Of a layer for which the detour pays."""


class LinearGradientFactors:
    """The factors of one layer's gradient, those of all workers of a host.

    There is room for as many samples as make the factors half as large as the product. What goes
    beyond becomes an ordinary gradient, to which the product of the factors is to be added.
    """

    def __init__(
        self, layer: nn.Linear, arena: SharedSegment, begin_byte: int, place: int, workers: int
    ):
        self.weight = layer.weight
        self._layer = layer
        size_bytes = memory_bytes(layer)
        self._memories = [
            _Memory(layer, arena, begin_byte + number * size_bytes) for number in range(workers)
        ]
        self._own = self._memories[place]
        self._rows = 0
        self._product: Tensor | None = None
        layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def keep(self, inputs: Tensor, gradients: Tensor) -> bool:
        """Deposit the factors of some samples; whether there was room."""
        begin, end = self._rows, self._rows + len(inputs)
        if end > len(self._own.inputs):
            return False
        self._own.inputs[begin:end] = inputs
        self._own.gradients[begin:end] = gradients
        self._rows = end
        return True

    def publish(self) -> None:
        """Say what this worker has deposited, before the others read it."""
        self._own.header[0] = self._rows
        self._own.header[1] = self.weight.grad is not None

    def has_ordinary(self, place: int) -> bool:
        """Whether a worker has an ordinary gradient too."""
        return bool(self._memories[place].header[1])

    def multiply(self, elements: slice) -> Tensor:
        """Neighbouring elements of the product, in the order of memory, over all workers."""
        width, (first, last) = self.weight.shape[1], self._rows_of(elements)
        if self._product is None:
            self._product = self.weight.new_empty(last - first, width)
        product, beta = self._product, 0
        for memory in self._memories:
            rows = memory.header[0]
            if rows:
                gradients = memory.gradients[:rows, first:last].t()
                torch.addmm(product, gradients, memory.inputs[:rows], beta=beta, out=product)
                beta = 1
        if not beta:
            product.zero_()
        return product.view(-1)[elements.start - first * width : elements.stop - first * width]

    def read_bytes(self, elements: slice, places: Iterable[int]) -> int:
        """How much of the factors of some workers `multiply` reads."""
        first, last = self._rows_of(elements)
        rows = sum(self._memories[place].header[0] for place in places)
        return rows * (self.weight.shape[1] + last - first) * self.weight.element_size()

    def _rows_of(self, elements: slice) -> tuple[int, int]:
        """The first row of the weight that has some of them, and the one after the last."""
        width = self.weight.shape[1]
        return elements.start // width, -(-elements.stop // width)

    def clear(self) -> None:
        """Forget this worker's factors, once nobody reads them any more."""
        self._rows = 0

    def release(self) -> None:
        """Give the layer its own forward pass back."""
        del self._layer.forward

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    @property
    def bytes_deposited(self) -> int:
        return self._rows * (sum(self.weight.shape)) * self.weight.element_size()


class _Memory:
    """One worker's: how many rows, whether there is an ordinary gradient; inputs; gradients."""

    def __init__(self, layer: nn.Linear, arena: SharedSegment, begin_byte: int) -> None:
        begins, _ = aligned_offsets(_parts_bytes(layer))
        header, inputs, gradients = (begin_byte + begin for begin in begins)
        rows, dtype = _most_rows(layer), layer.weight.dtype
        self.header = arena.integers(header, CACHE_LINE_BYTES)
        self.inputs = arena.tensor(inputs, rows * layer.in_features, dtype).view(rows, -1)
        self.gradients = arena.tensor(gradients, rows * layer.out_features, dtype).view(rows, -1)


def layers_to_factor(model: nn.Module, weights: Sequence[nn.Parameter]) -> list[nn.Linear]:
    """Plain linear layers, large enough, whose weights are trained and belong to them alone."""
    trained = {id(weight) for weight in weights if weight.requires_grad}
    users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and id(layer.weight) in trained
        and users[id(layer.weight)] == 1
        and layer.weight.is_contiguous()
        and not layer.weight._backward_hooks
        and layer.weight.nbytes >= LEAST_WEIGHT_BYTES
    ]


def memory_bytes(layer: nn.Linear) -> int:
    """Of one worker's factors."""
    return aligned_offsets(_parts_bytes(layer))[1]


def _parts_bytes(layer: nn.Linear) -> list[int]:
    row_bytes = _most_rows(layer) * layer.weight.element_size()
    return [CACHE_LINE_BYTES, row_bytes * layer.in_features, row_bytes * layer.out_features]


def _most_rows(layer: nn.Linear) -> int:
    return layer.weight.numel() // (2 * (layer.in_features + layer.out_features))


def _nothing() -> None:
    """What becomes of factors when a model is copied or written: its layers are plain then."""


def _forward(layer: nn.Linear, factored: LinearGradientFactors | None, inputs: Tensor) -> Tensor:
    if factored and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
        apply: Any = _Linear.apply
        output: Tensor = apply(inputs, layer.weight, layer.bias, factored)
        return output
    return F.linear(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    """As torch's own, but for the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factored: LinearGradientFactors,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.factored = factored
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        gradients = gradient.reshape(-1, gradient.shape[-1])
        rows = inputs.reshape(-1, inputs.shape[-1])
        # Where this pass is to be differentiated itself, the gradient must be part of the graph.
        is_ordinary = torch.is_grad_enabled() or not _accumulates(ctx.next_functions[1][0])
        is_kept = not is_ordinary and ctx.factored.keep(rows, gradients)
        to_weight = None if is_kept else gradients.t().mm(rows)
        to_bias = gradients.sum(0) if ctx.needs_input_grad[2] else None
        return to_inputs, to_weight, to_bias, None


def _accumulates(weight: Any) -> bool:
    """Whether the pass under way adds to the gradient of a weight, given as a node of the graph.

    One by `torch.autograd.grad` adds to none, and often asks for the inputs' alone.
    """
    try:
        return weight is not None and bool(torch._C._will_engine_execute_node(weight))
    except RuntimeError:  # the weight's is what it asks for
        return False
