"""Copies of a run's state for checkpoints: plain containers and tensors in host memory.

`without_copy` serves a write that training waits for. `SnapshotBuffers` serves a writer thread: the
state may change as soon as its snapshot is taken.

State on a GPU is cloned there, in the order of the training stream, so training continues at once.
The writer thread then copies the clones to pinned memory on a stream of its own. The clones need as
much GPU memory as the state, until they are in host memory. If there is too little, the state is
copied to host memory directly, and training waits for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

State = Mapping[str, Any]
_Copy = Callable[[str, Tensor], Tensor]

_MAX_FREE_FRACTION = 0.5
"""Fraction of the free GPU memory that clones may use: training may need the rest."""
_SCALARS = (int, float, bool, str, type(None))


def without_copy(state: State) -> dict[str, Any]:
    """Return the state for an immediate write.

    Only tensors on a device, or in a larger storage, which torch.save would write completely, are
    copied.
    """
    return _plain_dict(state, "state", _compact)


def _compact(_path: str, tensor: Tensor) -> Tensor:
    host = tensor.cpu()
    if host.untyped_storage().nbytes() > host.numel() * host.element_size():
        host = host.clone()
    return host


def cloned(state: State) -> dict[str, Any]:
    """Return a copy of the state on the devices of its tensors; tied tensors are copied once."""
    return _plain_dict(state, "state", _once(lambda _, tensor: tensor.clone()))


class SideStream(Protocol):
    """Copies clones from a device to host memory while the device trains."""

    def has_room(self, size_bytes: int) -> bool:
        """Return whether the device has memory to spare for clones."""

    def mark(self) -> None:
        """Mark the end of the clones in the order of the training stream."""

    def after_mark(self) -> AbstractContextManager[None]:
        """Return the context of copies, of any thread: after the mark, and complete at its end."""


class CudaSideStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._cloned = torch.cuda.Event()

    def has_room(self, size_bytes: int) -> bool:
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return size_bytes <= free_bytes * _MAX_FREE_FRACTION

    def mark(self) -> None:
        self._cloned.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def after_mark(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._cloned)
            yield
        self._stream.synchronize()


def side_stream_for(device: torch.device) -> SideStream | None:
    """Return a stream for copies from a GPU; None for the CPU, whose tensors need none."""
    return CudaSideStream(device) if device.type == "cuda" else None


class Snapshot:
    """A state as it was when the snapshot was taken."""

    def __init__(
        self, state: dict[str, Any], complete: Callable[[State], dict[str, Any]] | None = None
    ) -> None:
        self._state = state
        self._complete = complete

    def in_host_memory(self) -> dict[str, Any]:
        """Return the state, after copying it from the device if necessary; for any thread."""
        if self._complete is not None:
            # The clones are released, because nothing else refers to them.
            self._state, self._complete = self._complete(self._state), None
        return self._state


class SnapshotBuffers:
    """Takes snapshots; each overwrites the host memory of the previous one."""

    def __init__(
        self, side_stream_for: Callable[[torch.device], SideStream | None] = side_stream_for
    ) -> None:
        self.clone_bytes = 0
        """Peak GPU memory of clones."""
        self._side_stream_for = functools.cache(side_stream_for)
        self._host: dict[tuple[Any, ...], Tensor] = {}

    @property
    def host_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self._host.values())

    def take(self, state: State) -> Snapshot:
        """Copy the state, which may change afterwards."""
        stream, size_bytes = self._device_state(state)
        if stream is not None and stream.has_room(size_bytes):
            # If another process took the memory in the meantime, training waits for the copy.
            with contextlib.suppress(torch.OutOfMemoryError):
                clones = cloned(state)
                stream.mark()
                self.clone_bytes = max(self.clone_bytes, size_bytes)
                return Snapshot(clones, functools.partial(self._copy_beside, stream))
        return Snapshot(self._copy(state))

    def _device_state(self, state: State) -> tuple[SideStream | None, int]:
        """Return the stream for the state's device, and the bytes that are there."""
        found: list[tuple[SideStream, int]] = []

        def count(_path: str, tensor: Tensor) -> Tensor:
            if (stream := self._side_stream_for(tensor.device)) is not None:
                found.append((stream, tensor.nbytes))
            return tensor

        _plain_dict(state, "state", _once(count))
        return (found[0][0] if found else None), sum(size_bytes for _, size_bytes in found)

    def _copy_beside(self, stream: SideStream, clones: State) -> dict[str, Any]:
        with stream.after_mark():
            return self._copy(clones, non_blocking=True)

    def _copy(self, state: State, *, non_blocking: bool = False) -> dict[str, Any]:
        reusable, self._host = self._host, {}

        def copy(path: str, tensor: Tensor) -> Tensor:
            key = (path, tensor.device.type, *_layout(tensor))
            buffer = reusable.get(key)
            if buffer is None:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._host[key] = buffer
            return buffer.copy_(tensor, non_blocking=non_blocking)

        return _plain_dict(state, "state", _once(copy))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _once(copy: _Copy) -> _Copy:
    """Copy tied weights, and so write them, once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_once(path: str, tensor: Tensor) -> Tensor:
        source = (tensor.device, tensor.data_ptr(), *_layout(tensor))
        if source not in copies:
            copies[source] = copy(path, tensor)
        return copies[source]

    return copy_once


def _plain_dict(mapping: Mapping[Any, Any], path: str, copy: _Copy) -> dict[Any, Any]:
    for key in mapping:
        if type(key) not in (str, int):
            raise TypeError(f"{path} has the key {key!r}: a checkpoint's keys are text or integers")
    return {key: _plain(value, f"{path}[{key!r}]", copy) for key, value in mapping.items()}


def _plain(value: Any, path: str, copy: _Copy) -> Any:
    if isinstance(value, Tensor):
        tensor = value.detach()
        # Loading a tensor subclass would require its class.
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            raise TypeError(f"{path} is a {type(value).__name__}: a checkpoint holds plain tensors")
        return copy(path, tensor)
    if isinstance(value, Mapping):
        return _plain_dict(value, path, copy)
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{path}[{i}]", copy) for i, item in enumerate(value))
    # Compare exact types: numpy.float64 is a float, but would be pickled as a numpy type.
    if type(value) in _SCALARS:
        return value
    raise TypeError(
        f"{path} is a {type(value).__name__}: a checkpoint holds dicts, lists and tuples of "
        "tensors, numbers, text and None"
    )
