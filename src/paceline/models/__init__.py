"""Models by name. An entry is a callable `(sample_shape, classes) -> nn.Module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from torch import nn

ModelFactory = Callable[[tuple[int, ...], int], "nn.Module"]

MODELS: Registry[ModelFactory] = Registry("model")
