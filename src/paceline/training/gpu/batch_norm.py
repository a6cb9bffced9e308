"""Fast batch normalization of bf16 channels-last activations on a GPU.

torch uses cuDNN for other activations. Its own kernels for these take a third of a ResNet's step,
several times as long as reading and writing the memory. The Triton kernels here are faster.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import error_line
from paceline.measure.timeline import is_capturing

logger = logging.getLogger("paceline")

_TILE_ROWS = 64
_SUM_TILE_ROWS = 32
_TOTAL_TILE_ROWS = 128
_MIN_ROWS_EACH = 128
_MAX_PROGRAMS = 512
"""Of a sum over all rows: enough to keep every processor of a large GPU busy. One program adds up
the sums of all, so there should not be many more."""


def use_fast_batch_norm(model: nn.Module) -> bool:
    """Let the 2D batch-norm layers of a model use the fast kernels; return whether any does.

    Weights and buffers stay the same. Inputs that the kernels do not support, and evaluation, use
    torch's implementation as before.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    layers = [layer for layer in model.modules() if type(layer) is nn.BatchNorm2d]
    for layer in layers:
        # The layer may be referenced from several places, so it must remain the same object.
        layer.__class__ = FastBatchNorm2d
    return bool(layers)


class FastBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d that normalizes by Triton kernels where they support its input."""

    is_fast = True
    """False after the kernels could not be built, for example without a C compiler."""

    def forward(self, input: Tensor) -> Tensor:
        if self.is_fast and self._is_supported(input):
            try:
                return self._normalize(input)
            except Exception as error:
                # A capture follows steps that have built the kernels.
                if isinstance(error, torch.OutOfMemoryError) or is_capturing():
                    raise
                # Nothing was computed: the first kernel builds like the others.
                self.is_fast = False
                logger.warning("batch norm uses torch's kernels: %s", error_line(error))
        return super().forward(input)

    def _is_supported(self, input: Tensor) -> bool:
        return (
            self.training
            and self.affine
            and self.track_running_stats
            and self.momentum is not None
            and input.is_cuda
            and input.dim() == 4
            and input.dtype == torch.bfloat16
            and self.weight.dtype == torch.float32
            and input.is_contiguous(memory_format=torch.channels_last)
            # torch rejects a single value per channel. Offsets are 32-bit integers.
            and self.num_features < input.numel() < 2**31
        )

    def _normalize(self, input: Tensor) -> Tensor:
        result: Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.num_batches_tracked,
            self.eps,
            self.momentum,
        )
        return result


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        batches: Tensor,
        eps: float,
        momentum: float,
    ) -> Tensor:
        from paceline.training.gpu import batch_norm_kernels as kernels

        work = _Work(x)
        mean, invstd = torch.empty_like(weight), torch.empty_like(weight)
        kernels.sum_kernel[work.sum_grid](
            x, work.sums, work.rows, work.channels, work.rows_each, block=_SUM_TILE_ROWS
        )
        kernels.statistics_kernel[work.channel_grid](
            x, work.sums, mean, invstd, running_mean, running_var, batches,
            work.rows, work.channels, work.programs, eps, momentum,
            block=_TOTAL_TILE_ROWS, num_warps=8,
        )  # fmt: skip
        y = torch.empty_like(x)
        kernels.normalize_kernel[work.tile_grid](
            x, y, weight, bias, mean, invstd, work.rows, work.channels, block=_TILE_ROWS
        )
        context.save_for_backward(x, weight, mean, invstd)
        return y

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from paceline.training.gpu import batch_norm_kernels as kernels

        x, weight, mean, invstd = context.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        work = _Work(x)
        weight_gradient, bias_gradient = torch.empty_like(weight), torch.empty_like(weight)
        kernels.gradient_sum_kernel[work.sum_grid](
            x, dy, work.sums, mean, invstd,
            work.rows, work.channels, work.rows_each, block=_SUM_TILE_ROWS,
        )  # fmt: skip
        kernels.gradient_total_kernel[work.channel_grid](
            work.sums, weight_gradient, bias_gradient,
            work.channels, work.programs, block=_TOTAL_TILE_ROWS, num_warps=8,
        )  # fmt: skip
        dx = torch.empty_like(x)
        kernels.input_gradient_kernel[work.tile_grid](
            x, dy, dx, weight, mean, invstd, weight_gradient, bias_gradient,
            work.rows, work.channels, block=_TILE_ROWS,
        )  # fmt: skip
        return dx, weight_gradient, bias_gradient, None, None, None, None, None


class _Work:
    """How the kernels divide an activation among programs."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        channel_tiles = -(-self.channels // 64)
        programs = max(1, min(_MAX_PROGRAMS // channel_tiles, self.rows // _MIN_ROWS_EACH))
        self.rows_each = -(-self.rows // programs)
        self.programs = -(-self.rows // self.rows_each)
        self.sums = torch.empty(
            self.programs, 2, self.channels, dtype=torch.float32, device=x.device
        )
        self.sum_grid = (self.programs, channel_tiles)
        self.channel_grid = (channel_tiles,)
        self.tile_grid = (-(-self.rows // _TILE_ROWS), channel_tiles)
