"""Device and threads of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
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
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of(config))
    is_pinned = config.pin and local_rank is not None
    try:
        with (
            _deterministic_kernels,
            pinned(local_rank or 0, config.nproc_per_node) if is_pinned else nullcontext(),
        ):
            yield
    finally:
        torch.set_num_threads(threads)


class _DeterministicKernels:
    """Turns kernels off whose results differ from run to run, while any thread needs that.

    A worker and a server that are threads of one process end in any order.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._deterministic = torch.backends.cudnn.deterministic
                self._has_cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cudnn.deterministic = True
                # Its gradients differ from run to run; torch has other fused kernels.
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.backends.cudnn.deterministic = self._deterministic
                torch.backends.cuda.enable_cudnn_sdp(self._has_cudnn_attention)


_deterministic_kernels = _DeterministicKernels()


def threads_of(config: RunConfig) -> int:
    """Return --threads, or an equal part of the usable cores."""
    return config.threads or max(1, cores_usable() // _workers_sharing_cores(config))


def _workers_sharing_cores(config: RunConfig) -> int:
    spec = parse_recorded(config.cluster) if config.cluster else None
    if spec is None or spec.cpus_of(config.node_rank, cores_usable()) is not None:
        return config.nproc_per_node
    # Emulated nodes without a CPU quota share the cores of this machine.
    return spec.nodes * config.nproc_per_node
