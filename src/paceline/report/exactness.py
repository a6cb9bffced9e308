"""Whether a run computes what one worker computes, up to rounding, or something else."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import RunConfig
from paceline.report.cells import RunGroup

LOSSLESS_CODECS = frozenset(("none",))


def deviation(config: RunConfig) -> str | None:
    """How a run differs from synchronous training on the same batches; None where it is exact."""
    codec = str(config.options.get("codec", "none"))
    if codec not in LOSSLESS_CODECS:
        return f"codec {codec} sends lossy gradients"
    if ":" in config.strategy:
        return "a user-defined strategy is not known to be exact"
    if config.strategy == "easgd":
        return "workers train independently around a common center"
    if config.workers == 1:
        return None
    if config.strategy == "local_sgd" and not _averages_every_step(config):
        return "workers train independently between averages"
    if config.strategy == "parameter_server":
        mode = config.options.get("mode", "sync")
        return None if mode == "sync" else f"mode={mode} applies stale gradients"
    return None


def _averages_every_step(config: RunConfig) -> bool:
    """Then the mean of the weights is a step with the mean gradient, if a step is linear in it."""
    is_linear = config.optimizer == "sgd" and config.clip_norm is None and not config.shares
    return is_linear and str(config.options.get("every", "")) == "1"


def is_exact(cell: RunGroup) -> bool:
    return deviation(cell.config) is None


def deviations(cells: Sequence[RunGroup]) -> list[tuple[RunGroup, str]]:
    """The approximate ones, each with how it deviates."""
    found = ((cell, deviation(cell.config)) for cell in cells if cell.runs)
    return [(cell, text) for cell, text in found if text is not None]
