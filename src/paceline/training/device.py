"""Device and threads of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from paceline.config import RunConfig
from paceline.config.cluster_spec import parse_recorded
from paceline.errors import ConfigError
from paceline.measure.machine import cores_usable
from paceline.training.process import pinned


def choose_device(config: RunConfig, local_rank: int = 0) -> torch.device:
    """Return the GPU of a local rank; ranks share GPUs if a node has fewer GPUs than workers."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["--device: there is no CUDA device here; use cpu or auto"])
    use_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if not use_gpu:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU works on a stream of its own; no effect on a CPU.

    CUDA graphs cannot be captured on the default stream, and all work on one stream needs no
    synchronization.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


@contextmanager
def computing(config: RunConfig, local_rank: int | None = None) -> Iterator[None]:
    """Apply threads, determinism and core pinning of the config, and restore them afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.backends.cudnn.deterministic
    has_cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    torch.set_num_threads(threads_of(config))
    torch.backends.cudnn.deterministic = True
    # Its gradients differ from run to run; torch has other fused kernels.
    torch.backends.cuda.enable_cudnn_sdp(False)
    is_pinned = config.pin and local_rank is not None
    try:
        with pinned(local_rank or 0, config.nproc_per_node) if is_pinned else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn_attention)


def threads_of(config: RunConfig) -> int:
    """Return --threads, or an equal part of the usable cores."""
    return config.threads or max(1, cores_usable() // _workers_sharing_cores(config))


def _workers_sharing_cores(config: RunConfig) -> int:
    spec = parse_recorded(config.cluster) if config.cluster else None
    if spec is None or spec.cpus_of(config.node_rank, cores_usable()) is not None:
        return config.nproc_per_node
    # Emulated nodes without a CPU quota share the cores of this machine.
    return spec.nodes * config.nproc_per_node
