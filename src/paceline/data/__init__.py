"""Datasets by name. An entry is a `Loader`: DataRequest -> Dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.data.dataset import Loader

DATASETS: Registry[Loader] = Registry("data")
