"""Metric registry. Each entry is a class of `training/metrics.py`."""

from __future__ import annotations

from typing import Any

from paceline.registry import Registry

METRICS: Registry[Any] = Registry("metric")

METRICS.register(
    "accuracy", "paceline.training.metrics:accuracy", "fraction of correct predictions"
)
METRICS.register(
    "perplexity",
    "paceline.training.metrics:perplexity",
    "exp(loss), where the loss is a cross-entropy",
)
METRICS.register(
    "bits_per_byte",
    "paceline.training.metrics:bits_per_byte",
    "loss / ln 2, where the loss is the cross-entropy of bytes of text",
)
