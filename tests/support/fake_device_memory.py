"""Device memory on the CPU: shared memory stands in for the memory that processes share on a GPU.

Work on a CPU is done when a call returns, so wrong order would not be visible in results. The fake
therefore checks that ranks wait for events that were recorded exactly as often as their own: for
the same round, and neither too early nor after the event was recorded for a later round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.communicator import Communicator
from paceline.comm.shared_gpu import DeviceGroup, SharedGpuCommunicator
from paceline.comm.shm.segment import SharedSegment, aligned_offsets
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.measure.timeline import Moment

CPU = torch.device("cpu")
SLOT_BYTES = 16 * 1024
"""Small, so that tensors need several rounds."""


class FakeDeviceMemory:
    def __init__(self, bootstrap: Communicator, size_bytes: int, events: int) -> None:
        ranks = range(bootstrap.world_size)
        begins, total = aligned_offsets([size_bytes for _ in ranks] + [8 * events for _ in ranks])
        segment = SharedSegment(bootstrap, total)
        self._slots = [segment.tensor(begins[rank], size_bytes, torch.uint8) for rank in ranks]
        recorded = [segment.integers(begins[len(ranks) + rank], 8 * events) for rank in ranks]
        self._own = recorded[bootstrap.rank]
        self._peers = [recorded[peer] for peer in bootstrap.peers]

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._slots

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def follow_caller(self) -> None:
        return

    def order_caller(self, moment: Moment) -> None:
        assert isinstance(moment, float)

    def mark(self) -> Moment:
        return perf_counter()

    def record(self, event: int) -> None:
        self._own[event] += 1

    def wait_for_peers(self, event: int) -> None:
        for peer in self._peers:
            assert peer[event] == self._own[event], "waits for the event of another round"

    def is_idle(self) -> bool:
        return True

    def unmap_peers(self) -> None:
        self._slots.clear()

    def free(self) -> None:
        return


class FakeSharedGpuCommunicator(SharedGpuCommunicator):
    """CPU tensors stand in for GPU tensors."""

    def _connect_group(self, bootstrap: Communicator) -> DeviceGroup:
        return DeviceGroup(bootstrap, FakeDeviceMemory, SLOT_BYTES)


def connect(
    communicator: Communicator,
    device: torch.device = CPU,
    kind: type[SharedGpuCommunicator] = FakeSharedGpuCommunicator,
) -> SharedGpuCommunicator:
    """Connect the ranks of a gloo communicator. Collective."""
    assert isinstance(communicator, TorchCommunicator)
    communicator._children += 1
    return kind(
        PrefixStore(f"shared_gpu/{communicator._children}", communicator._store),
        communicator.rank,
        communicator.world_size,
        address=communicator._address,
        shared_gpu=device,
        timeout_seconds=communicator.timeout_seconds,
        traffic=communicator.traffic,
    )
