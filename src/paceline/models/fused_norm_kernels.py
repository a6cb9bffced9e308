"""Triton kernels of batch norm and GELU, after an optional 2x2 max pooling, for channels last.

Each kernel sees an image as rows of pixels with `channels` values; a program handles some rows of
`block_channels` channels. Partial sums are added in a fixed order, so results are deterministic.
"""

import triton
import triton.language as tl


@triton.jit
def _moments(sums, channel, channels, inside, rows):
    """Return mean and variance of each channel, from its sums."""
    mean = tl.load(sums + channel, mask=inside, other=0.0) / rows
    square = tl.load(sums + channels + channel, mask=inside, other=0.0) / rows
    return mean, tl.maximum(square - mean * mean, 0.0)


@triton.jit
def _first_corner(row, height, width):
    """Return the row of the upper left pixel of a patch."""
    half_height = height // 2
    half_width = width // 2
    column = row % half_width
    line = (row // half_width) % half_height
    image = row // (half_width * half_height)
    return (image * height + 2 * line) * width + 2 * column


@triton.jit(do_not_specialize=["rows", "height", "width", "rows_per_program"])
def sum_kernel(
    images, pooled, partials, rows, height, width, channels, rows_per_program,
    pools: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write sums of values and of their squares per program and channel, and the pooled images."""
    program = tl.program_id(0)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < channels
    total = tl.zeros([block_rows, block_channels], tl.float32)
    squares = tl.zeros([block_rows, block_channels], tl.float32)
    begin = program * rows_per_program
    end = tl.minimum(begin + rows_per_program, rows)
    for first in range(begin, end, block_rows):
        row = first + tl.arange(0, block_rows)
        mask = (row < end)[:, None] & inside[None, :]
        own = row.to(tl.int64)[:, None] * channels + channel[None, :]
        if pools:
            corner = _first_corner(row, height, width).to(tl.int64)
            source = images + corner[:, None] * channels + channel[None, :]
            below = source + width * channels
            top = tl.maximum(
                tl.load(source, mask=mask, other=0.0),
                tl.load(source + channels, mask=mask, other=0.0),
            )
            bottom = tl.maximum(
                tl.load(below, mask=mask, other=0.0),
                tl.load(below + channels, mask=mask, other=0.0),
            )
            largest = tl.maximum(top, bottom)
            tl.store(pooled + own, largest, mask=mask)
            value = largest.to(tl.float32)
        else:
            value = tl.load(images + own, mask=mask, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    slot = partials + program * 2 * channels + channel
    tl.store(slot, tl.sum(total, 0), mask=inside)
    tl.store(slot + channels, tl.sum(squares, 0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def apply_kernel(
    pooled, sums, bias, running_mean, running_variance, output, rows, channels, momentum, epsilon,
    block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write GELU of the normalized values; the first program updates the running statistics."""
    program = tl.program_id(0)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < channels
    row = program * block_rows + tl.arange(0, block_rows)
    mask = (row < rows)[:, None] & inside[None, :]
    own = row.to(tl.int64)[:, None] * channels + channel[None, :]
    value = tl.load(pooled + own, mask=mask, other=0.0).to(tl.float32)
    mean, variance = _moments(sums, channel, channels, inside, rows)
    normalized = (value - mean[None, :]) * (1.0 / tl.sqrt(variance + epsilon))[None, :]
    z = normalized + tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    result = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    tl.store(output + own, result.to(output.dtype.element_ty), mask=mask)
    if program == 0:
        variance = variance * rows / tl.maximum(rows - 1, 1)
        old_mean = tl.load(running_mean + channel, mask=inside, other=0.0)
        old_variance = tl.load(running_variance + channel, mask=inside, other=0.0)
        tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), mask=inside)
        tl.store(
            running_variance + channel,
            old_variance + momentum * (variance - old_variance),
            mask=inside,
        )


@triton.jit
def _gelu_gradient(gradient, z):
    density = tl.exp(-0.5 * z * z) * 0.3989422804014327
    return gradient * (0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def sum_gradients_kernel(
    gradients, pooled, sums, bias, partials, rows, channels, rows_per_program, epsilon,
    block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write sums of the gradients of z, and of them times the normalized values, per program."""
    program = tl.program_id(0)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < channels
    shift = tl.load(bias + channel, mask=inside, other=0.0)
    mean, variance = _moments(sums, channel, channels, inside, rows)
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    total = tl.zeros([block_rows, block_channels], tl.float32)
    products = tl.zeros([block_rows, block_channels], tl.float32)
    begin = program * rows_per_program
    end = tl.minimum(begin + rows_per_program, rows)
    for first in range(begin, end, block_rows):
        row = first + tl.arange(0, block_rows)
        mask = (row < end)[:, None] & inside[None, :]
        own = row.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(pooled + own, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(gradients + own, mask=mask, other=0.0).to(tl.float32)
        normalized = (value - mean[None, :]) * inverse[None, :]
        gradient = _gelu_gradient(gradient, normalized + shift[None, :])
        total += gradient
        products += gradient * normalized
    slot = partials + program * 2 * channels + channel
    tl.store(slot, tl.sum(total, 0), mask=inside)
    tl.store(slot + channels, tl.sum(products, 0), mask=inside)


@triton.jit(do_not_specialize=["rows", "height", "width"])
def gradient_kernel(
    gradients, images, pooled, sums, gradient_sums, bias, output, rows, height, width, channels,
    epsilon,
    pools: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the images; with pooling, to the first maximum of each patch."""
    program = tl.program_id(0)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < channels
    row = program * block_rows + tl.arange(0, block_rows)
    mask = (row < rows)[:, None] & inside[None, :]
    own = row.to(tl.int64)[:, None] * channels + channel[None, :]
    largest = tl.load(pooled + own, mask=mask, other=0.0)
    gradient = tl.load(gradients + own, mask=mask, other=0.0).to(tl.float32)
    mean, variance = _moments(sums, channel, channels, inside, rows)
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    normalized = (largest.to(tl.float32) - mean[None, :]) * inverse[None, :]
    shift = tl.load(bias + channel, mask=inside, other=0.0)
    gradient = _gelu_gradient(gradient, normalized + shift[None, :])
    average = tl.load(gradient_sums + channel, mask=inside, other=0.0) / rows
    slope = tl.load(gradient_sums + channels + channel, mask=inside, other=0.0) / rows
    result = (gradient - average[None, :] - normalized * slope[None, :]) * inverse[None, :]
    result = result.to(output.dtype.element_ty)
    if pools:
        corner = _first_corner(row, height, width).to(tl.int64)
        place = corner[:, None] * channels + channel[None, :]
        is_left = tl.load(images + place, mask=mask, other=0.0) == largest
        is_right = (tl.load(images + place + channels, mask=mask, other=0.0) == largest) & (
            ~is_left
        )
        is_top = is_left | is_right
        below = place + width * channels
        is_below = (tl.load(images + below, mask=mask, other=0.0) == largest) & (~is_top)
        is_last = (~is_top) & (~is_below)
        tl.store(output + place, tl.where(is_left, result, 0.0), mask=mask)
        tl.store(output + place + channels, tl.where(is_right, result, 0.0), mask=mask)
        tl.store(output + below, tl.where(is_below, result, 0.0), mask=mask)
        tl.store(output + below + channels, tl.where(is_last, result, 0.0), mask=mask)
    else:
        tl.store(output + own, result, mask=mask)
