"""What this machine cannot run, told before a cell is started."""

from __future__ import annotations

from functools import cache

from paceline.config import RunConfig
from paceline.data.manifest import OFFICIAL_SETS, data_folder
from paceline.errors import ClusterError


def unable(config: RunConfig) -> str | None:
    """Why a run cannot be done here; None: nothing is known to be in its way."""
    if config.cluster is not None and (reason := _without_clusters()):
        return f"no emulated cluster: {reason}"
    if config.device == "cuda" and not _has_gpu():
        return "no GPU that torch can use"
    return _missing_data(config)


def _missing_data(config: RunConfig) -> str | None:
    """What other hosts have is theirs to know."""
    known = OFFICIAL_SETS.get(config.data)
    folder = data_folder(config.data_dir)
    if known is None or config.hosts or known.is_in(folder):
        return None
    return f"{config.data} is not in {folder}: paceline data fetch {config.data}"


@cache
def _without_clusters() -> str | None:
    from paceline.emulation import cluster

    try:
        cluster.check_possible()
    except ClusterError as error:
        return str(error)
    return None


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
