"""Memory and events on one GPU that several processes share (CUDA IPC).

Each rank allocates memory on the GPU and exports it; the other ranks map it. The kernels of
different processes run in no particular order, so each rank records an interprocess event after a
stage of its work, and the others order their streams behind it. An event must be recorded before
another rank waits for it, which only the CPU can ensure: ranks tell each other in shared memory
what they have submitted (shm/collectives.py).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, gather_json
from paceline.measure.timeline import Moment


class DeviceMemory(Protocol):
    """Memory of a device that all ranks map, and a stream of this rank that works on it."""

    @property
    def slots(self) -> Sequence[Tensor]:
        """The bytes of each rank."""

    def stream(self) -> AbstractContextManager[Any]:
        """Submit the work of a `with` block to the stream."""

    def follow_caller(self) -> None:
        """Order the stream behind the caller's current stream."""

    def order_caller(self, moment: Moment) -> None:
        """Order the caller's current stream behind a mark."""

    def mark(self) -> Moment:
        """Mark the work of the stream so far."""

    def record(self, event: int) -> None:
        """Record an event after the work of the stream so far, for the other ranks."""

    def wait_for_peers(self, event: int) -> None:
        """Order the stream behind this event of all other ranks, which have recorded it."""

    def close(self) -> None:
        """Unmap the memory of the other ranks."""


class CudaIpcMemory:
    """Memory on a GPU. Creating it is collective."""

    slots: list[Tensor]

    def __init__(
        self, bootstrap: Communicator, device: torch.device, size_bytes: int, events: int
    ) -> None:
        """Raises RuntimeError on all ranks if they cannot share memory on one GPU."""
        self._device, self._rank = device, bootstrap.rank
        self._stream = torch.cuda.Stream(device)
        failure, exported = None, []
        try:
            own = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            self._events = [torch.cuda.Event(interprocess=True) for _ in range(events)]
            exported = [
                str(torch.cuda.get_device_properties(device).uuid),
                _encode(own.untyped_storage()._share_cuda_()),
                [_encode((event.ipc_handle(),)) for event in self._events],
            ]
        except RuntimeError as error:
            failure = str(error).splitlines()[0]
        ranks = broadcast_json(bootstrap, gather_json(bootstrap, [failure, exported]))
        _raise_first(failure for failure, _ in ranks)
        if len({uuid for _, (uuid, *_) in ranks}) > 1:
            raise RuntimeError("the workers use different GPUs")
        try:
            self.slots = [
                own if rank == bootstrap.rank else _map_memory(memory, device)
                for rank, (_, (_, memory, _)) in enumerate(ranks)
            ]
            self._peer_events = [
                [torch.cuda.Event.from_ipc_handle(device, *_decode(each)) for each in handles]
                for rank, (_, (_, _, handles)) in enumerate(ranks)
                if rank != bootstrap.rank
            ]
        except RuntimeError as error:
            failure = str(error).splitlines()[0]
        _raise_first(broadcast_json(bootstrap, gather_json(bootstrap, failure)))

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def follow_caller(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def order_caller(self, moment: Moment) -> None:
        assert isinstance(moment, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(moment)

    def mark(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def record(self, event: int) -> None:
        self._events[event].record(self._stream)

    def wait_for_peers(self, event: int) -> None:
        for events in self._peer_events:
            self._stream.wait_event(events[event])

    def close(self) -> None:
        self.slots, self._events, self._peer_events = [], [], []
        # Also what peers have released; otherwise torch's counters of them remain in /dev/shm.
        torch.cuda.ipc_collect()


def _map_memory(exported: list[Any], device: torch.device) -> Tensor:
    _, *arguments = _decode(exported)
    # The GPU may have another index in the other process.
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *arguments)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _raise_first(failures: Any) -> None:
    for failure in failures:
        if failure is not None:
            raise RuntimeError(failure)


def _encode(values: Sequence[Any]) -> list[Any]:
    """Replace bytes by text, which JSON can contain."""
    return [
        {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for value in values
    ]


def _decode(values: list[Any]) -> list[Any]:
    return [
        base64.b64decode(value["base64"]) if isinstance(value, dict) else value for value in values
    ]
