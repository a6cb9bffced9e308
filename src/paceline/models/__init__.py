"""Models by name. An entry is a callable `(sample_shape, classes) -> nn.Module`.

No model here has dropout: each worker would draw its own mask for its own share of a batch, so
the result would depend on the number of workers. Batch normalisation is part of what vgg and resnet
are, and takes its statistics over the samples that one worker sees: with these models, unlike the
others, several workers compute what one does only if the statistics are taken over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from torch import nn

ModelFactory = Callable[[tuple[int, ...], int], "nn.Module"]

MODELS: Registry[ModelFactory] = Registry("model")

MODELS.register(
    "softmax", "paceline.models.softmax:softmax", "softmax regression: one linear layer"
)
MODELS.register("mlp", "paceline.models.mlp:mlp", "six hidden layers, 1024 halving to 32")
MODELS.register(
    "lenet", "paceline.models.lenet:lenet", "two 5x5 convolutions with pooling, two linear layers"
)
MODELS.register(
    "cnn", "paceline.models.cnn:cnn", "two 3x3 convolutions, one pooling, two linear layers"
)
MODELS.register("vgg11", "paceline.models.vgg:vgg11", "VGG-11 with batch norm, one linear layer")
MODELS.register("vgg13", "paceline.models.vgg:vgg13", "VGG-13 with batch norm, one linear layer")
MODELS.register("vgg16", "paceline.models.vgg:vgg16", "VGG-16 with batch norm, one linear layer")
MODELS.register("vgg19", "paceline.models.vgg:vgg19", "VGG-19 with batch norm, one linear layer")
MODELS.register("resnet18", "paceline.models.resnet:resnet18", "ResNet-18 for small images")
MODELS.register("resnet34", "paceline.models.resnet:resnet34", "ResNet-34 for small images")
