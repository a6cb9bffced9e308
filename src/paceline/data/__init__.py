"""Dataset registry. Each entry is a `Loader`, a callable LoadRequest -> Dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.data.dataset import Loader

DATASETS: Registry[Loader] = Registry("data")
DATASETS.register(
    "digits", "paceline.data.digits:DIGITS", "synthetic house numbers, 32x32 color; needs no files"
)
DATASETS.register(
    "plain_digits",
    "paceline.data.digits:PLAIN_DIGITS",
    "synthetic digits, 28x28 grayscale; needs no files",
)
DATASETS.register(
    "text",
    "paceline.data.text:load_text",
    "your own UTF-8 text, a file or a folder of files, as byte tokens",
    argument="PATH",
    tags=["text"],
)
DATASETS.register(
    "stories",
    "paceline.data.stories:STORIES",
    "synthetic stories with agreement across distance, as byte tokens; needs no files",
    tags=["text"],
)
DATASETS.register("mnist", "paceline.data.mnist:MNIST", "handwritten digits, 28x28 grayscale")
DATASETS.register(
    "fashion_mnist", "paceline.data.mnist:FASHION_MNIST", "clothing articles, 28x28 grayscale"
)
DATASETS.register("cifar10", "paceline.data.cifar10:CIFAR10", "ten object classes, 32x32 color")
DATASETS.register("svhn", "paceline.data.svhn:SVHN", "digits from house numbers, 32x32 color")
DATASETS.register(
    "svhn_extra", "paceline.data.svhn:SVHN_EXTRA", "svhn plus its 531,131 easier extra samples"
)

TEXT_DATASETS = DATASETS.tagged("text")
"""Registered datasets whose tokens are bytes of text."""
