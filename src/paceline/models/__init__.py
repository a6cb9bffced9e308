"""Model registry. Each entry is a callable `(sample_shape, classes, **options) -> nn.Module`.

No model uses dropout, because each worker would draw its own mask for its shard of a batch and the
result would depend on the number of workers. Statistics of batch normalization cover the samples of
one worker by default: models with it match single-worker training only with synchronized batch
normalization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from torch import nn

ModelFactory = Callable[..., "nn.Module"]

MODELS: Registry[ModelFactory] = Registry("model")
WIDTH = {"width": "factor of the number of channels or units of every hidden layer (default 1)"}
"""The option of every model of images with hidden layers."""
GPT = {
    "layers": "number of blocks",
    "width": "units of the residual stream",
    "heads": "attention heads per block; width / heads must be even",
    "context": "longest sequence (default: that of the data)",
    "checkpoint": "recompute activations in the backward pass, to save memory (default false)",
}

MODELS.register(
    "softmax", "paceline.models.softmax:softmax", "softmax regression (one linear layer)"
)
MODELS.register(
    "mlp", "paceline.models.mlp:mlp", "six hidden layers, 1024 to 32 units", options=WIDTH
)
MODELS.register(
    "lenet",
    "paceline.models.lenet:lenet",
    "two 5x5 convolutions with pooling, two linear layers",
    options=WIDTH,
)
MODELS.register(
    "cnn",
    "paceline.models.cnn:cnn",
    "two 3x3 convolutions, one pooling layer, two linear layers",
    options=WIDTH,
)
MODELS.register(
    "strided_cnn",
    "paceline.models.strided_cnn:strided_cnn",
    "a strided 5x5 and a 3x3 convolution with batch norm, two linear layers",
    options=WIDTH,
)
MODELS.register(
    "whitened_cnn",
    "paceline.models.whitened_cnn:whitened_cnn",
    "a fixed 2x2 convolution that whitens patches, six 3x3 convolutions with batch norm",
    options=WIDTH,
)
MODELS.register(
    "vgg11",
    "paceline.models.vgg:vgg11",
    "VGG-11 with batch norm, one linear layer",
    options=WIDTH,
)
MODELS.register(
    "vgg13",
    "paceline.models.vgg:vgg13",
    "VGG-13 with batch norm, one linear layer",
    options=WIDTH,
)
MODELS.register(
    "vgg16",
    "paceline.models.vgg:vgg16",
    "VGG-16 with batch norm, one linear layer",
    options=WIDTH,
)
MODELS.register(
    "vgg19",
    "paceline.models.vgg:vgg19",
    "VGG-19 with batch norm, one linear layer",
    options=WIDTH,
)
MODELS.register(
    "resnet18", "paceline.models.resnet:resnet18", "ResNet-18 for small images", options=WIDTH
)
MODELS.register(
    "resnet34", "paceline.models.resnet:resnet34", "ResNet-34 for small images", options=WIDTH
)
MODELS.register(
    "gpt-nano",
    "paceline.models.gpt:gpt_nano",
    "decoder of tokens: 3 blocks, width 48, 3 heads",
    tags=["tokens"],
    options=GPT,
)
MODELS.register(
    "gpt-micro",
    "paceline.models.gpt:gpt_micro",
    "decoder of tokens: 4 blocks, width 128, 4 heads",
    tags=["tokens"],
    options=GPT,
)
MODELS.register(
    "gpt-mini",
    "paceline.models.gpt:gpt_mini",
    "decoder of tokens: 6 blocks, width 192, 6 heads",
    tags=["tokens"],
    options=GPT,
)

TOKEN_MODELS = MODELS.tagged("tokens")
"""Registered models whose inputs are tokens; the others take images or floats."""
