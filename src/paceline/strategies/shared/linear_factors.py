"""Gradients of linear layers, published as factors.

The weight gradient of a linear layer is a product: the transposed gradients of its outputs times
its inputs, both with one row per sample. If the batch is smaller than the layer, the factors are
much smaller than the product. Ranks therefore publish their factors, and the rank that updates some
rows of the weight multiplies the factors of all ranks. The number of multiplications is the same,
and no gradient is written, copied or summed.
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

MIN_WEIGHT_BYTES = 256 * 1024
"""Smallest weight for which factors are faster than its gradient."""


class LinearGradientFactors:
    """The factors of one layer's gradient, for all ranks of a host.

    The capacity is the number of samples at which the factors are half as large as the product.
    Samples beyond the capacity use a plain gradient, which is added to the product.
    """

    def __init__(
        self, layer: nn.Linear, segment: SharedSegment, position: int, local_rank: int, ranks: int
    ):
        self.weight = layer.weight
        self._layer = layer
        size_bytes = factor_bytes(layer)
        self._blocks = [
            _Block(layer, segment, position + rank * size_bytes) for rank in range(ranks)
        ]
        self._own = self._blocks[local_rank]
        self._rows = 0
        self._product: Tensor | None = None
        layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def keep(self, inputs: Tensor, gradients: Tensor) -> bool:
        """Store the factors of some samples; returns False if they exceed the capacity."""
        begin, end = self._rows, self._rows + len(inputs)
        if end > len(self._own.inputs):
            return False
        self._own.inputs[begin:end] = inputs
        self._own.gradients[begin:end] = gradients
        self._rows = end
        return True

    def publish(self) -> None:
        """Write the header. Call before other ranks read the factors."""
        self._own.header[0] = self._rows
        self._own.header[1] = self.weight.grad is not None

    def has_gradient(self, rank: int) -> bool:
        """Return whether a rank also has a plain gradient."""
        return bool(self._blocks[rank].header[1])

    def multiply(self, elements: slice) -> Tensor:
        """Return contiguous elements of the summed product of all ranks, in memory order."""
        width, (first, last) = self.weight.shape[1], self._rows_of(elements)
        if self._product is None:
            self._product = self.weight.new_empty(last - first, width)
        product, beta = self._product, 0
        for block in self._blocks:
            rows = block.header[0]
            if rows:
                gradients = block.gradients[:rows, first:last].t()
                torch.addmm(product, gradients, block.inputs[:rows], beta=beta, out=product)
                beta = 1
        if not beta:
            product.zero_()
        return product.view(-1)[elements.start - first * width : elements.stop - first * width]

    def square(self) -> Tensor:
        """Return the squared norm of this rank's gradient, without multiplying its factors."""
        inputs, gradients = self._own.inputs[: self._rows], self._own.gradients[: self._rows]
        square = (inputs.mm(inputs.t()) * gradients.mm(gradients.t())).sum()
        if (plain := self.weight.grad) is not None:
            square += plain.square().sum() + 2 * (gradients.mm(plain) * inputs).sum()
        return square

    def read_bytes(self, elements: slice, ranks: Iterable[int]) -> int:
        """Return the bytes that `multiply` reads from the factors of some ranks."""
        first, last = self._rows_of(elements)
        rows = sum(self._blocks[rank].header[0] for rank in ranks)
        return rows * (self.weight.shape[1] + last - first) * self.weight.element_size()

    def _rows_of(self, elements: slice) -> tuple[int, int]:
        """Return the range of weight rows that contain the elements."""
        width = self.weight.shape[1]
        return elements.start // width, -(-elements.stop // width)

    def reset(self) -> None:
        """Discard this rank's factors, after all ranks have read them."""
        self._rows = 0

    def detach(self) -> None:
        """Restore the layer's forward pass."""
        del self._layer.forward

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the model use plain linear layers.
        return _no_factors, ()

    @property
    def published_bytes(self) -> int:
        return self._rows * (sum(self.weight.shape)) * self.weight.element_size()


class _Block:
    """One rank's factors: row count, whether a plain gradient exists, and two matrices."""

    def __init__(self, layer: nn.Linear, segment: SharedSegment, position: int) -> None:
        offsets, _ = aligned_offsets(_block_sizes(layer))
        header, inputs, gradients = (position + offset for offset in offsets)
        rows, dtype = _max_rows(layer), layer.weight.dtype
        self.header = segment.integers(header, CACHE_LINE_BYTES)
        self.inputs = segment.tensor(inputs, rows * layer.in_features, dtype).view(rows, -1)
        self.gradients = segment.tensor(gradients, rows * layer.out_features, dtype).view(rows, -1)


def layers_to_factor(model: nn.Module, weights: Sequence[nn.Parameter]) -> list[nn.Linear]:
    """Return large linear layers whose trained weights no other layer uses."""
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
        and layer.weight.nbytes >= MIN_WEIGHT_BYTES
    ]


def factor_bytes(layer: nn.Linear) -> int:
    """Return the size of one rank's factors."""
    return aligned_offsets(_block_sizes(layer))[1]


def _block_sizes(layer: nn.Linear) -> list[int]:
    row_bytes = _max_rows(layer) * layer.weight.element_size()
    return [CACHE_LINE_BYTES, row_bytes * layer.in_features, row_bytes * layer.out_features]


def _max_rows(layer: nn.Linear) -> int:
    return layer.weight.numel() // (2 * (layer.in_features + layer.out_features))


def _no_factors() -> None:
    """Return None, which replaces the factors in a copied or pickled model."""


def _forward(layer: nn.Linear, factored: LinearGradientFactors | None, inputs: Tensor) -> Tensor:
    if factored and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
        apply: Any = _Linear.apply
        output: Tensor = apply(inputs, layer.weight, layer.bias, factored)
        return output
    return F.linear(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    """torch's linear function, except that factors may replace the weight gradient."""

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
        input_gradient = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        gradients = gradient.reshape(-1, gradient.shape[-1])
        rows = inputs.reshape(-1, inputs.shape[-1])
        # With create_graph, the gradient must be part of the graph.
        is_plain = torch.is_grad_enabled() or not _accumulates(ctx.next_functions[1][0])
        is_kept = not is_plain and ctx.factored.keep(rows, gradients)
        weight_gradient = None if is_kept else gradients.t().mm(rows)
        bias_gradient = gradients.sum(0) if ctx.needs_input_grad[2] else None
        return input_gradient, weight_gradient, bias_gradient, None


def _accumulates(weight: Any) -> bool:
    """Return whether the current backward pass accumulates into a weight's `grad`.

    `weight` is the weight's graph node. `torch.autograd.grad` does not accumulate, and often
    computes only the gradients of inputs.
    """
    try:
        return weight is not None and bool(torch._C._will_engine_execute_node(weight))
    except RuntimeError:  # torch.autograd.grad of the weight itself
        return False
