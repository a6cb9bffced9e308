"""Whitened CNN: a convolutional network that learns color images in few epochs on a GPU.

Its first layer is not trained: it decorrelates the pixels of 2x2 patches, with filters that are the
principal components of patches of the training set (as in arXiv 2404.00498).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.build import Width, image_shape, scaled
from paceline.models.fused_norm import norm_gelu

PATCH = 2
MIN_SIDE = 17
"""One pixel is removed and an eighth of the rest is left: batch norm needs more than one value."""

VARIANCE_EPSILON = 5e-4
"""Added to the variance of a component, so that whitening does not amplify noise."""
STATISTICS_MOMENTUM = 0.4
"""Of the running statistics of batch norm: a short training has few batches to average."""
LOGIT_SCALE = 1 / 9


def whitened_cnn(sample_shape: tuple[int, ...], classes: int, *, width: Width = 1) -> nn.Module:
    """A whitening layer, three blocks of two 3x3 convolutions, one linear layer."""
    channels, _, _ = image_shape("whitened_cnn", sample_shape, MIN_SIDE)
    return WhitenedCNN(channels, classes, [scaled(count, width) for count in (64, 256, 256)])


class WhitenedCNN(nn.Module):
    init_samples = 2000
    """Training samples that `initialize_from` needs."""

    def __init__(self, channels: int, classes: int, widths: list[int]) -> None:
        super().__init__()
        # Each component has a filter of either sign, because the activation is not symmetric.
        whitened = 2 * channels * PATCH**2
        # Without a bias to train, the backward pass ends before this layer and its large output.
        self.whiten = nn.Conv2d(channels, whitened, PATCH, bias=False)
        self.whiten.weight.requires_grad_(False)
        self.blocks = nn.Sequential(
            *(
                _Block(inputs, outputs)
                for inputs, outputs in zip([whitened, *widths], widths, strict=False)
            )
        )
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(F.gelu(self.whiten(images)))
        pooled = F.max_pool2d(features, features.shape[2:]).flatten(1)
        logits: Tensor = self.head(pooled) * LOGIT_SCALE
        return logits

    @torch.no_grad()
    def initialize_from(self, images: Tensor) -> None:
        """Set the filters of the first layer to whiten the patches of these images."""
        variances, components = _principal_components(images)
        scale = (variances + VARIANCE_EPSILON).rsqrt().view(-1, 1, 1, 1)
        filters = components.reshape(-1, *self.whiten.weight.shape[1:]) * scale
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def _principal_components(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return variances and unit vectors, one per row, of the patches of all images."""
    patches = images.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    values = patches.permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2).double()
    covariance = values @ values.T / values.shape[1]
    variances, vectors = torch.linalg.eigh(covariance)
    return variances.flip(0), vectors.T.flip(0)


class _Block(nn.Module):
    """Two convolutions; the image is halved after the first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs)
        self.first_norm = _norm(outputs)
        self.second = _convolution(outputs, outputs)
        self.second_norm = _norm(outputs)

    def forward(self, images: Tensor) -> Tensor:
        halved = norm_gelu(self.first(images), self.first_norm, pools=True)
        return norm_gelu(self.second(halved), self.second_norm, pools=False)


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first filters pass the input channels on."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:inputs])
    return convolution


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=STATISTICS_MOMENTUM)
    # The next layer can learn the scale; a fixed one trains faster.
    norm.weight.requires_grad_(False)
    return norm
