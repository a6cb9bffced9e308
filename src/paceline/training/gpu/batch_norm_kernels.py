"""Triton kernels of batch normalization for channels-last activations.

Activations are a matrix with one row per pixel and one column per channel. Sums over the rows are
computed in two steps, without atomic operations, so that results are the same in every run.
"""

import triton
import triton.language as tl

CHANNELS = tl.constexpr(64)
"""Columns of a tile."""


@triton.jit
def sum_kernel(x, sums, rows, channels, rows_each, block: tl.constexpr):
    """Per channel and program: sum and sum of squares of the distances from the first row."""
    program = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = column < channels
    # Distances from a typical value keep the variance exact where the mean is large.
    first = tl.load(x + column, mask=is_channel, other=0.0).to(tl.float32)
    total = tl.zeros((block, CHANNELS), tl.float32)
    squares = tl.zeros((block, CHANNELS), tl.float32)
    begin = program * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, block):
        row = start + tl.arange(0, block)
        mask = (row < end)[:, None] & is_channel[None, :]
        value = tl.load(x + row[:, None] * channels + column[None, :], mask=mask, other=0.0)
        distance = tl.where(mask, value.to(tl.float32) - first[None, :], 0.0)
        total += distance
        squares += distance * distance
    out = sums + program * 2 * channels + column
    tl.store(out, tl.sum(total, 0), mask=is_channel)
    tl.store(out + channels, tl.sum(squares, 0), mask=is_channel)


@triton.jit
def add_up(sums, column, channels, programs, block: tl.constexpr):
    """Return both sums of all programs, per channel."""
    first = tl.zeros((block, CHANNELS), tl.float32)
    second = tl.zeros((block, CHANNELS), tl.float32)
    for start in range(0, programs, block):
        program = start + tl.arange(0, block)
        mask = (program < programs)[:, None] & (column < channels)[None, :]
        at = sums + program[:, None] * 2 * channels + column[None, :]
        first += tl.load(at, mask=mask, other=0.0)
        second += tl.load(at + channels, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def statistics_kernel(
    x, sums, mean_out, invstd_out, running_mean, running_var, batches,
    rows, channels, programs, eps, momentum, block: tl.constexpr,
):  # fmt: skip
    """Mean and inverse standard deviation, and the running statistics."""
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = column < channels
    total, squares = add_up(sums, column, channels, programs, block)
    distance = total / rows
    variance = tl.maximum(squares / rows - distance * distance, 0.0)
    first = tl.load(x + column, mask=is_channel, other=0.0).to(tl.float32)
    mean = first + distance
    tl.store(mean_out + column, mean, mask=is_channel)
    tl.store(invstd_out + column, 1.0 / tl.sqrt(variance + eps), mask=is_channel)
    before = tl.load(running_mean + column, mask=is_channel, other=0.0)
    tl.store(running_mean + column, before + momentum * (mean - before), mask=is_channel)
    unbiased = variance * rows / tl.maximum(rows - 1, 1)
    before = tl.load(running_var + column, mask=is_channel, other=0.0)
    tl.store(running_var + column, before + momentum * (unbiased - before), mask=is_channel)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def normalize_kernel(x, y, weight, bias, mean, invstd, rows, channels, block: tl.constexpr):
    row = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = column < channels
    scale = tl.load(weight + column, mask=is_channel, other=0.0) * tl.load(
        invstd + column, mask=is_channel, other=0.0
    )
    shift = tl.load(bias + column, mask=is_channel, other=0.0)
    center = tl.load(mean + column, mask=is_channel, other=0.0)
    mask = (row < rows)[:, None] & is_channel[None, :]
    at = row[:, None] * channels + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    result = (value - center[None, :]) * scale[None, :] + shift[None, :]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gradient_sum_kernel(
    x, dy, sums, mean, invstd, rows, channels, rows_each, block: tl.constexpr
):  # fmt: skip
    """Per channel and program: sum of dy, and of dy times the normalized input."""
    program = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = column < channels
    center = tl.load(mean + column, mask=is_channel, other=0.0)
    total = tl.zeros((block, CHANNELS), tl.float32)
    products = tl.zeros((block, CHANNELS), tl.float32)
    begin = program * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, block):
        row = start + tl.arange(0, block)
        mask = (row < end)[:, None] & is_channel[None, :]
        at = row[:, None] * channels + column[None, :]
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        total += gradient
        products += gradient * (value - center[None, :])
    scale = tl.load(invstd + column, mask=is_channel, other=0.0)
    out = sums + program * 2 * channels + column
    tl.store(out, tl.sum(total, 0), mask=is_channel)
    tl.store(out + channels, tl.sum(products, 0) * scale, mask=is_channel)


@triton.jit
def gradient_total_kernel(
    sums, weight_gradient, bias_gradient, channels, programs, block: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = column < channels
    total, products = add_up(sums, column, channels, programs, block)
    tl.store(bias_gradient + column, total, mask=is_channel)
    tl.store(weight_gradient + column, products, mask=is_channel)


@triton.jit
def input_gradient_kernel(
    x, dy, dx, weight, mean, invstd, weight_gradient, bias_gradient,
    rows, channels, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = column < channels
    center = tl.load(mean + column, mask=is_channel, other=0.0)
    scale = tl.load(invstd + column, mask=is_channel, other=0.0)
    factor = tl.load(weight + column, mask=is_channel, other=0.0) * scale
    mean_gradient = tl.load(bias_gradient + column, mask=is_channel, other=0.0) / rows
    slope = tl.load(weight_gradient + column, mask=is_channel, other=0.0) * scale / rows
    mask = (row < rows)[:, None] & is_channel[None, :]
    at = row[:, None] * channels + column[None, :]
    gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    result = (
        gradient - mean_gradient[None, :] - (value - center[None, :]) * slope[None, :]
    ) * factor[None, :]
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
