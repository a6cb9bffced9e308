"""Gradients that are the same each time on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNORDERED = ("ScaledDotProduct", "Embedding")
"""Operations whose kernels add gradients in the order in which thread blocks are done. Of those for
attention, cuDNN's cannot be made deterministic; it is off while paceline trains."""


def fix_order_of_sums(output: Tensor) -> None:
    """Make the backward pass of attention or an embedding, which returned `output`, deterministic.

    Deterministic algorithms are required for this operation only: others would fail or become
    slower.
    """
    if torch.compiler.is_compiling() or not output.requires_grad:
        return
    node = output.grad_fn
    if node is not None and node.name().startswith("Slice"):
        # Heads whose width is not a multiple of 8 are padded.
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith(UNORDERED):
        return
    before = _Determinism.current()
    node.register_prehook(lambda _: _Determinism(True, False, False).apply())
    node.register_hook(lambda *_: before.apply())


@dataclass(frozen=True, slots=True)
class _Determinism:
    """torch's settings, without `use_deterministic_algorithms`, which imports its compiler."""

    is_required: bool
    warns_only: bool
    fills_new_memory: bool

    @classmethod
    def current(cls) -> _Determinism:
        return cls(
            torch._C._get_deterministic_algorithms(),
            torch._C._get_deterministic_algorithms_warn_only(),
            torch._C._get_deterministic_fill_uninitialized_memory(),
        )

    def apply(self) -> None:
        torch._C._set_deterministic_algorithms(self.is_required, warn_only=self.warns_only)
        torch._C._set_deterministic_fill_uninitialized_memory(self.fills_new_memory)
