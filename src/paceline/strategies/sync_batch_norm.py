"""Batch normalisation over the whole global batch: workers share their sums.

With statistics of its own part only, a worker normalises differently from one that trains alone on
the whole batch, and the more so the smaller its part. Here sums and counts are added up over the
workers, forward and backward, so the result is that of one worker. torch has it for GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator


def convert_sync_batch_norm(model: nn.Module, communicator: Communicator) -> nn.Module:
    """Let every batch-norm layer of a model normalise over all workers; weights are kept."""
    made: dict[nn.Module, SyncBatchNorm] = {}
    # A layer may be used in several places, and is then one layer in all of them still.
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            continue
        if layer not in made:
            made[layer] = _shared(layer, communicator)
        if layer is model:
            return made[layer]
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, made[layer])
    return model


def _shared(
    layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, communicator: Communicator
) -> SyncBatchNorm:
    shared = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    shared.communicator = communicator
    shared.weight, shared.bias = layer.weight, layer.bias
    shared.running_mean, shared.running_var = layer.running_mean, layer.running_var
    shared.num_batches_tracked = layer.num_batches_tracked
    return shared


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    communicator: Communicator
    counts: bool = True
    """Whether this worker's samples belong to the batch, or stand in for a share it has not got."""
    exchanging: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Around communication, so that it is accounted for as such."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs samples and channels, got {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or self.communicator.world_size == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
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

    def sum_over_workers(self, sums: Tensor) -> None:
        with self.exchanging():
            self.communicator.all_reduce(sums, "buffers").wait()


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: SyncBatchNorm,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        over = [dim for dim in range(x.dim()) if dim != 1]
        wide = torch.promote_types(x.dtype, torch.float32)
        values = x.to(wide)
        # In double precision, since the difference of two sums cancels.
        sums = torch.cat(
            [
                values.sum(over, dtype=torch.float64),
                values.square().sum(over, dtype=torch.float64),
                torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device),
            ]
        )
        if not layer.counts:
            sums.zero_()
        layer.sum_over_workers(sums)
        total, squares = sums[:-1].chunk(2)
        count = sums[-1]
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        inverse = (variance + layer.eps).rsqrt()
        shape = [1, -1, *(1 for _ in over[1:])]
        normal = (values - mean.to(wide).view(shape)) * inverse.to(wide).view(shape)
        ctx.save_for_backward(normal, inverse, count, *([] if weight is None else [weight]))
        ctx.over, ctx.shape, ctx.layer, ctx.counts = over, shape, layer, layer.counts
        if weight is not None and bias is not None:
            output = normal * weight.view(shape) + bias.view(shape)
        else:
            # The backward pass needs `normal`, and a later layer may change its input in place.
            output = normal.clone()
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse, count, *rest = ctx.saved_tensors
        gradient = gradients[0].to(normal.dtype)
        over, shape = ctx.over, ctx.shape
        bias_gradient = gradient.sum(over)
        weight_gradient = (gradient * normal).sum(over)
        sums = torch.stack([bias_gradient, weight_gradient]).double()
        ctx.layer.sum_over_workers(sums)
        mean_gradient, mean_product = (sums / count).to(normal.dtype)
        centred = gradient
        if ctx.counts:
            # Only samples that moved the mean and the variance get a gradient through them.
            centred = gradient - mean_gradient.view(shape) - normal * mean_product.view(shape)
        scale = inverse.to(normal.dtype) * rest[0] if rest else inverse.to(normal.dtype)
        x_gradient = (centred * scale.view(shape)).to(gradients[0].dtype)
        if not rest:
            return x_gradient, None, None, None
        return x_gradient, weight_gradient, bias_gradient, None
