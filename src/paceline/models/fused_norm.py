"""Batch norm and GELU, after an optional 2x2 max pooling, in few passes over the data on a GPU.

torch reads and writes the images once or more for each of these operations, which takes longer than
the convolutions between them. The Triton kernels of fused_norm_kernels.py give the same results up
to rounding. Without a GPU, in evaluation or under torch.compile, torch's operations are used.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import error_line

logger = logging.getLogger("paceline")

BLOCK_ROWS, BLOCK_CHANNELS = 32, 64
PROGRAMS = 512
"""Programs that sum over pixels: enough to fill a GPU."""


def norm_gelu(images: Tensor, norm: nn.Module, *, pools: bool) -> Tensor:
    """Return GELU of the normalized images; with `pools`, of 2x2 max pooling of them.

    `norm` is a batch norm layer whose scale is 1.
    """
    if _can_fuse(images, norm):
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.num_batches_tracked is not None
        try:
            output = _fused(images, norm, pools)
        except Exception as error:
            # A capture follows steps that have built the kernels.
            if isinstance(error, torch.OutOfMemoryError) or _is_capturing():
                raise
            # Nothing was computed: the first kernel builds like the others.
            norm.is_fusible = False  # type: ignore[assignment]  # not a tensor
            logger.warning("whitened_cnn uses torch's kernels: %s", error_line(error))
        else:
            norm.num_batches_tracked.add_(1)
            return output
    return F.gelu(norm(F.max_pool2d(images, 2) if pools else images))


def _fused(images: Tensor, norm: nn.BatchNorm2d, pools: bool) -> Tensor:
    output: Tensor = _NormGelu.apply(  # type: ignore[no-untyped-call]
        images, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps, pools
    )
    return output


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _can_fuse(images: Tensor, norm: nn.Module) -> bool:
    # False after the kernels could not be built, for example without a C compiler.
    return getattr(norm, "is_fusible", True) and _is_supported(images, norm)


def _is_supported(images: Tensor, norm: nn.Module) -> bool:
    return (
        images.is_cuda
        and norm.training
        # Synchronized batch norm is another class, with statistics of all workers.
        and isinstance(norm, nn.BatchNorm2d)
        and images.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
        and _has_triton()
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _NormGelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_variance: Tensor,
        momentum: float,
        epsilon: float,
        pools: bool,
    ) -> Tensor:
        from paceline.models import fused_norm_kernels as kernels

        samples, channels, height, width = images.shape
        pooled = images
        if pools:
            pooled = _empty(images, (samples, channels, height // 2, width // 2))
        rows = pooled.numel() // channels
        partials, rows_per_program = _partials(pooled, rows)
        kernels.sum_kernel[_grid(PROGRAMS, channels)](
            images, pooled, partials, rows, height, width, channels, rows_per_program,
            pools, BLOCK_ROWS, BLOCK_CHANNELS,
        )  # fmt: skip
        sums = partials.sum(0)
        output = torch.empty_like(pooled)
        kernels.apply_kernel[_grid(-(-rows // BLOCK_ROWS), channels)](
            pooled, sums, bias, running_mean, running_variance, output, rows, channels,
            momentum, epsilon, BLOCK_ROWS, BLOCK_CHANNELS,
        )  # fmt: skip
        ctx.save_for_backward(images, pooled, sums, bias)
        ctx.epsilon, ctx.pools = epsilon, pools
        return output

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        from paceline.models import fused_norm_kernels as kernels

        images, pooled, sums, bias = ctx.saved_tensors
        channels, height, width = images.shape[1:]
        gradients = gradients.contiguous(memory_format=torch.channels_last)
        rows = pooled.numel() // channels
        partials, rows_per_program = _partials(pooled, rows)
        kernels.sum_gradients_kernel[_grid(PROGRAMS, channels)](
            gradients, pooled, sums, bias, partials, rows, channels, rows_per_program,
            ctx.epsilon, BLOCK_ROWS, BLOCK_CHANNELS,
        )  # fmt: skip
        gradient_sums = partials.sum(0)
        output = torch.empty_like(images)
        if ctx.pools:
            # Pixels that pooling drops.
            output[:, :, height // 2 * 2 :] = 0
            output[:, :, :, width // 2 * 2 :] = 0
        kernels.gradient_kernel[_grid(-(-rows // BLOCK_ROWS), channels)](
            gradients, images, pooled, sums, gradient_sums, bias, output, rows, height, width,
            channels, ctx.epsilon, ctx.pools, BLOCK_ROWS, BLOCK_CHANNELS,
        )  # fmt: skip
        return output, gradient_sums[0], None, None, None, None, None


def _empty(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(
        shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last
    )


def _partials(pooled: Tensor, rows: int) -> tuple[Tensor, int]:
    """Return memory for two sums per program and channel, and the rows of a program."""
    rows_per_program = -(-rows // (PROGRAMS * BLOCK_ROWS)) * BLOCK_ROWS
    shape = (PROGRAMS, 2, pooled.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=pooled.device), rows_per_program


def _grid(programs: int, channels: int) -> tuple[int, int]:
    return programs, -(-channels // BLOCK_CHANNELS)
