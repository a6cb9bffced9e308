"""Memory and events on one GPU that several processes share (CUDA IPC).

Each rank allocates memory on the GPU and exports it; the other ranks map it. The kernels of
different processes run in no particular order, so each rank records an interprocess event after a
stage of its work, and the others order their streams behind it. An event must be recorded before
another rank waits for it, which only the CPU can ensure: ranks publish in shared memory what they
have submitted (shm/collectives.py).
"""

from __future__ import annotations

import atexit
import base64
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
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

    def is_idle(self) -> bool:
        """Return whether the device has done all work of the stream."""

    def unmap_peers(self) -> None:
        """Unmap the memory of the other ranks, while the stream is idle."""

    def free(self) -> None:
        """Free the memory of this rank, after all others have unmapped it."""


class CudaIpcMemory:
    """Memory on a GPU. Creating it is collective."""

    slots: list[Tensor]

    def __init__(
        self, bootstrap: Communicator, device: torch.device, size_bytes: int, events: int
    ) -> None:
        """Raises RuntimeError on all ranks if they cannot share memory on one GPU."""
        self._device = device
        self._own: Tensor | None = None
        self._events: list[torch.cuda.Event] = []
        self._peer_events: list[list[torch.cuda.Event]] = []
        self._unmapped: list[list[Any]] = []
        """Memory that other ranks have exported for this one and that it has not mapped."""
        self.slots = []
        try:
            self._connect(bootstrap, size_bytes, events)
        except RuntimeError:
            self.unmap_peers()
            for memory in self._unmapped:
                _release_memory(memory)
            # Other ranks may still map this rank's memory.
            bootstrap.barrier().wait()
            self.free()
            raise
        self._last = torch.cuda.Event()

    def _connect(self, bootstrap: Communicator, size_bytes: int, events: int) -> None:
        device = self._device
        failure, exported = None, []
        try:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream(device)
                exported = self._export(bootstrap, size_bytes, events)
        except RuntimeError as error:
            failure = str(error).splitlines()[0]
        ranks = broadcast_json(bootstrap, gather_json(bootstrap, [failure, exported]))
        own = bootstrap.rank
        self._unmapped = [
            exported[-1][own]
            for peer, (_, exported) in enumerate(ranks)
            if exported and peer != own
        ]
        _raise_first(failure for failure, _ in ranks)
        if len({uuid for _, (uuid, *_) in ranks}) > 1:
            raise RuntimeError("the workers use different GPUs")
        try:
            with torch.cuda.device(device):
                self._map([exported for _, exported in ranks], own)
        except RuntimeError as error:
            failure = str(error).splitlines()[0]
        _raise_first(broadcast_json(bootstrap, gather_json(bootstrap, failure)))

    def _export(self, bootstrap: Communicator, size_bytes: int, events: int) -> list[Any]:
        """Allocate memory and events; return what other processes need to map them."""
        self._own = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self._events = [torch.cuda.Event(interprocess=True) for _ in range(events)]
        atexit.unregister(unlink_event_files)
        atexit.register(unlink_event_files)
        storage = self._own.untyped_storage()
        return [
            str(torch.cuda.get_device_properties(self._device).uuid),
            [_encode((event.ipc_handle(),)) for event in self._events],
            # Torch frees exported memory only if exactly one process has mapped and released it, so
            # each peer gets its own export.
            [
                None if rank == bootstrap.rank else _encode(storage._share_cuda_())
                for rank in range(bootstrap.world_size)
            ],
        ]

    def _map(self, ranks: list[list[Any]], own_rank: int) -> None:
        for rank, (_, handles, memory) in enumerate(ranks):
            if rank == own_rank:
                assert self._own is not None
                self.slots.append(self._own)
                continue
            self.slots.append(_map_memory(memory[own_rank], self._device))
            self._unmapped.remove(memory[own_rank])
            self._peer_events.append(
                [torch.cuda.Event.from_ipc_handle(self._device, *_decode(each)) for each in handles]
            )

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def follow_caller(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def order_caller(self, moment: Moment) -> None:
        assert isinstance(moment, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(moment)

    def mark(self) -> Moment:
        event = self._last = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def record(self, event: int) -> None:
        self._events[event].record(self._stream)

    def wait_for_peers(self, event: int) -> None:
        for events in self._peer_events:
            self._stream.wait_event(events[event])

    def is_idle(self) -> bool:
        return bool(self._last.query())

    def unmap_peers(self) -> None:
        # In place, because the buffers of collectives use the list too.
        self.slots.clear()
        self._peer_events.clear()

    def free(self) -> None:
        self._own = None
        self._events.clear()
        # Removes torch's file of reference counts from /dev/shm.
        torch.cuda.ipc_collect()


def unlink_event_files() -> None:
    """Unlink the files of this process's interprocess events, when it exits.

    CUDA does so itself, but not for a process that ends by `os._exit`, as workers do. Afterward, no
    other process can open an event of this one.
    """
    for path in Path("/dev/shm").glob(f"cuda.shm.*.{os.getpid():x}.*"):
        with suppress(OSError):
            path.unlink()


def _map_memory(exported: list[Any], device: torch.device) -> Tensor:
    _, *arguments = _decode(exported)
    # The GPU may have another index in the other process.
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *arguments)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _release_memory(exported: list[Any]) -> None:
    """Let the process that exported memory free it, instead of mapping it."""
    _, _, _, _, counters, position, *_ = _decode(exported)
    torch.UntypedStorage._release_ipc_counter_cuda(counters, position)


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
