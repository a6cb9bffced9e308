"""What this machine cannot run, told before a cell is started."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from paceline.config import RunConfig
from paceline.data.catalogue import OFFICIAL_SETS, data_folder
from paceline.errors import ClusterError, ConfigError


def unable(config: RunConfig) -> str | None:
    """Why a run cannot be done here; None: nothing is known to be in its way."""
    if config.cluster is not None and (reason := _without_clusters()):
        return f"no emulated cluster: {reason}"
    if config.device == "cuda" and not _has_gpu():
        return "no GPU that torch can use"
    return None


def check_data(configs: Iterable[RunConfig]) -> None:
    """Refuse a study whose datasets are not here; what other hosts have is theirs to know."""
    wanted = {
        (config.data, config.data_dir)
        for config in configs
        if config.data in OFFICIAL_SETS and not config.hosts
    }
    missing = [
        f"--data {name}: its files are not in {folder}: paceline data fetch {name}"
        for name, given in sorted(wanted, key=str)
        if not OFFICIAL_SETS[name].is_in(folder := data_folder(given))
    ]
    if missing:
        raise ConfigError(missing)


@cache
def _without_clusters() -> str | None:
    from paceline.cluster import emulated

    try:
        emulated.check_possible()
    except ClusterError as error:
        return str(error)
    return None


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
