"""Synchronized batch normalization: statistics over the global batch.

Ranks all-reduce sums and sample counts in the forward and backward pass, so the result equals that
of a single worker on the whole batch. torch.nn.SyncBatchNorm supports GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator


def convert_sync_batch_norm(model: nn.Module, communicator: Communicator) -> nn.Module:
    """Replace all batch-norm layers of a model with synchronized ones that share their weights."""
    converted: dict[nn.Module, SyncBatchNorm] = {}
    # A layer that is used more than once must remain a single layer.
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            continue
        if layer not in converted:
            converted[layer] = _convert(layer, communicator)
        if layer is model:
            return converted[layer]
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, converted[layer])
    return model


def _convert(
    layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, communicator: Communicator
) -> SyncBatchNorm:
    converted = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    converted.communicator = communicator
    converted.weight, converted.bias = layer.weight, layer.bias
    converted.running_mean, converted.running_var = layer.running_mean, layer.running_var
    converted.num_batches_tracked = layer.num_batches_tracked
    return converted


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization over the samples of all ranks."""

    communicator: Communicator
    has_samples: bool = True
    """False if this rank has no samples in the batch and computes a placeholder."""
    exposed_communication: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Returns a context manager that measures its block as communication."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm: expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or self.communicator.world_size == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self
        )
        self._track(mean, variance, float(count))
        assert isinstance(output, Tensor)
        return output

    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)

    def all_reduce(self, sums: Tensor) -> None:
        with self.exposed_communication():
            self.communicator.all_reduce(sums, "buffers").wait()


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: SyncBatchNorm,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = torch.promote_types(x.dtype, torch.float32)
        values = x.to(wide)
        # In double precision, because the variance is a small difference of large sums.
        sums = torch.cat(
            [
                values.sum(dims, dtype=torch.float64),
                values.square().sum(dims, dtype=torch.float64),
                torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device),
            ]
        )
        if not layer.has_samples:
            sums.zero_()
        layer.all_reduce(sums)
        total, squares = sums[:-1].chunk(2)
        count = sums[-1]
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        inverse = (variance + layer.eps).rsqrt()
        shape = [1, -1, *(1 for _ in dims[1:])]
        normalized = (values - mean.to(wide).view(shape)) * inverse.to(wide).view(shape)
        ctx.save_for_backward(normalized, inverse, count, *([] if weight is None else [weight]))
        ctx.dims, ctx.shape, ctx.layer, ctx.has_samples = dims, shape, layer, layer.has_samples
        if weight is not None and bias is not None:
            output = normalized * weight.view(shape) + bias.view(shape)
        else:
            # The backward pass needs `normalized`, and the next layer may modify its input.
            output = normalized.clone()
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normalized, inverse, count, *rest = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        dims, shape = ctx.dims, ctx.shape
        bias_gradient = gradient.sum(dims)
        weight_gradient = (gradient * normalized).sum(dims)
        sums = torch.stack([bias_gradient, weight_gradient]).double()
        ctx.layer.all_reduce(sums)
        mean_gradient, mean_product = (sums / count).to(normalized.dtype)
        centered = gradient
        if ctx.has_samples:
            # Only samples that contribute to the statistics get a gradient through them.
            centered = gradient - mean_gradient.view(shape) - normalized * mean_product.view(shape)
        scale = inverse.to(normalized.dtype) * rest[0] if rest else inverse.to(normalized.dtype)
        x_gradient = (centered * scale.view(shape)).to(gradients[0].dtype)
        if not rest:
            return x_gradient, None, None, None
        return x_gradient, weight_gradient, bias_gradient, None
