"""Datasets by name. An entry is a `Loader`: LoadRequest -> Dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.data.dataset import Loader

DATASETS: Registry[Loader] = Registry("data")
DATASETS.register(
    "digits", "paceline.data.digits:DIGITS", "drawn house numbers, 32 x 32 colour; no files"
)
DATASETS.register(
    "plain_digits", "paceline.data.digits:PLAIN_DIGITS", "drawn digits, 28 x 28 grey; no files"
)
DATASETS.register("mnist", "paceline.data.mnist:MNIST", "handwritten digits, 28 x 28 grey")
DATASETS.register(
    "fashion_mnist", "paceline.data.mnist:FASHION_MNIST", "articles of clothing, 28 x 28 grey"
)
DATASETS.register("cifar10", "paceline.data.cifar10:CIFAR10", "ten kinds of things, 32 x 32 colour")
DATASETS.register("svhn", "paceline.data.svhn:SVHN", "house numbers' digits, 32 x 32 colour")
DATASETS.register(
    "svhn_extra", "paceline.data.svhn:SVHN_EXTRA", "svhn with its 531,131 easier extra samples"
)
