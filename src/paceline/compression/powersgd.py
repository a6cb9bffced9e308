"""Codec `powersgd`: the gradient M (n x m) of a weight matrix as a product of two thin matrices.

Each step performs one power iteration, with Q (r x m) from the previous step:

    P = sum over workers of M Q^T      first Sum, n r numbers
    P <- orthonormal columns           identical on every worker, because P is
    Q = sum over workers of P^T M      second Sum, m r numbers
    result = P Q                       the rest of M stays pending (error feedback)

Sums of thin matrices are thin, so unlike int8 and topk this needs no Gather, and traffic does not
grow with the number of workers. Q is kept between steps: gradients change slowly, so the iteration
converges to the leading singular vectors. Tensors that would not get smaller (biases, small
matrices) are sent uncompressed in the first Sum.

Replicas must stay bit-identical, so everything computed from a sum uses element-wise arithmetic in
a fixed order: matrix products and reductions of libraries may round differently with other thread
counts or processors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.compression.codec import Codec, Exchange, Shapes, State, WireBytes, summed
from paceline.compression.error_feedback import ErrorFeedback, clone_all
from paceline.config.conversion import check_option
from paceline.errors import CheckpointError


class PowerSGD(Codec):
    """Low-rank compression; `rank` is the number of columns of P and rows of Q."""

    compresses_matrices = True

    def __init__(self, *, rank: int = 2) -> None:
        check_option("rank", rank, minimum=1, maximum=10**6)
        self.rank = rank
        self._feedback = ErrorFeedback()
        self._starts: dict[str, Tensor] = {}

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        if not any(map(self._is_thinner, shapes)):
            return (yield from summed(gradient))
        pending = self._feedback.add(key, gradient)
        matrices, plain = self._views(pending, shapes)

        products = [m @ q.T for m, q in zip(matrices, self._start(key, matrices), strict=True)]
        sums = _split_like(plain + products, (yield from summed(_concatenate(plain + products))))
        plain_sums, bases = sums[: len(plain)], [orthonormal(p) for p in sums[len(plain) :]]

        rights = [p.T @ m for m, p in zip(matrices, bases, strict=True)]
        for matrix, basis, right in zip(matrices, bases, rights, strict=True):
            matrix.addmm_(basis, right, alpha=-1)
        for vector in plain:
            vector.zero_()
        right_sum = yield from summed(_concatenate(rights))
        self._starts[key] = right_sum.clone()

        matrix_totals, plain_totals = self._views(gradient, shapes)
        for vector, values in zip(plain_totals, plain_sums, strict=True):
            vector.copy_(values)
        for matrix, basis, right in zip(
            matrix_totals, bases, _split_like(rights, right_sum), strict=True
        ):
            _multiply_into(matrix, basis, right)
        return gradient

    def _is_thinner(self, shape: Sequence[int]) -> bool:
        rows, columns = _matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns

    def _views(self, flat: Tensor, shapes: Shapes) -> tuple[list[Tensor], list[Tensor]]:
        """Split a flat gradient into views: matrices to compress, and all other tensors."""
        matrices: list[Tensor] = []
        plain: list[Tensor] = []
        for shape, part in zip(shapes, torch.split(flat, [*map(math.prod, shapes)]), strict=True):
            if self._is_thinner(shape):
                matrices.append(part.view(_matrix_shape(shape)))
            else:
                plain.append(part)
        return matrices, plain

    def _start(self, key: str, matrices: list[Tensor]) -> list[Tensor]:
        """Return the starting Q of the iteration: the last one with normalized rows.

        A row that is zero (from a zero gradient) or non-finite restarts at random values.
        """
        starts = [_random_start(key, i, m, self.rank) for i, m in enumerate(matrices)]
        if key in self._starts:
            last = self._starts[key].to(matrices[0].device)
            if last.numel() != sum(start.numel() for start in starts):
                raise CheckpointError(
                    f"codec state of {key} has different matrices or another rank:"
                    " resume with the original bucket size and rank"
                )
            for start, previous in zip(starts, _split_like(starts, last), strict=True):
                largest = previous.abs().amax(1, keepdim=True)
                usable = largest.isfinite() & (largest > 0)
                start.copy_(torch.where(usable, previous / largest, start))
        return starts

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        matrices = [_matrix_shape(shape) for shape in shapes if self._is_thinner(shape)]
        if not matrices:
            return WireBytes(sums=(elements * element_bytes,))
        plain = elements - sum(rows * columns for rows, columns in matrices)
        first = plain + self.rank * sum(rows for rows, _ in matrices)
        second = self.rank * sum(columns for _, columns in matrices)
        return WireBytes(sums=(first * element_bytes, second * element_bytes))

    def rescale(self, factor: float) -> None:
        self._feedback.rescale(factor)

    def state_dict(self) -> State:
        return {"pending": self._feedback.state(), "starts": clone_all(self._starts)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._feedback.load(state["pending"])
        self._starts = clone_all(state["starts"])


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns (Gram-Schmidt); zero columns stay zero."""
    basis: list[Tensor] = []
    for column in columns.unbind(1):
        rest = _unit(column)
        # Subtracting nearly all of a column leaves mostly rounding error; a second pass removes it.
        for _ in range(2 if basis else 0):
            for direction in basis:
                rest = rest - _sum(rest * direction) * direction
            rest = _unit(rest)
        basis.append(rest)
    return torch.stack(basis, 1)


def _unit(vector: Tensor) -> Tensor:
    """Return the normalized vector, or zeros; scaled first so that squares stay in range."""
    largest = vector.abs().amax()
    scaled = torch.where(largest == 0, vector, vector / largest)
    length = _sum(scaled * scaled).sqrt()
    return torch.where(length == 0, scaled, scaled / length)


def _sum(vector: Tensor) -> Tensor:
    """Sum the entries pairwise, in an order that is the same on every machine."""
    vector = pad(vector, (0, (1 << (len(vector) - 1).bit_length()) - len(vector)))
    while len(vector) > 1:
        left, right = vector.chunk(2)
        vector = left + right
    return vector[0]


def _multiply_into(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute target = left @ right as a sum of outer products."""
    term = torch.empty_like(target)
    target.zero_()
    for column, row in zip(left.T.contiguous(), right, strict=True):
        target += torch.mul(column[:, None], row, out=term)


def _random_start(key: str, index: int, matrix: Tensor, rank: int) -> Tensor:
    """Return random values that depend only on the key and index of the matrix."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {index}".encode()))
    start = torch.rand(rank, matrix.shape[1], generator=generator, dtype=matrix.dtype) - 0.5
    return start.to(matrix.device)


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns): the first dimension is the rows; a vector is a single row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _split_like(tensors: list[Tensor], flat: Tensor) -> list[Tensor]:
    """Invert `_concatenate`: return the parts of `flat` in the shapes of the tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
