"""The state of a run as plain containers of host tensors: all that a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_SCALARS = (int, float, bool, str, type(None))


def without_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state to be written while nothing changes it; tensors are copied only where they must be:
    off a device, and out of a larger storage, which would otherwise be written whole."""
    return _plain_dict(state, "state", _compact)


def _compact(_path: str, tensor: Tensor) -> Tensor:
    host = tensor.cpu()
    if host.untyped_storage().nbytes() > host.numel() * host.element_size():
        host = host.clone()
    return host


class HostBuffers:
    """Copies of states, one after another in the same memory: each overwrites the one before."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state as it is now, untouched by later changes of the original's tensors."""
        reusable, self._buffers = self._buffers, {}
        copied: dict[tuple[Any, ...], Tensor] = {}

        def copy(path: str, tensor: Tensor) -> Tensor:
            layout = (tensor.dtype, tensor.shape, tensor.stride())
            # Weights that are tied under several names are copied, and written, once.
            place = (tensor.device, tensor.data_ptr(), *layout)
            if place not in copied:
                key = (path, tensor.device.type, *layout)
                buffer = reusable.get(key)
                if buffer is None:
                    buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                copied[place] = self._buffers[key] = buffer.copy_(tensor)
            return copied[place]

        return _plain_dict(state, "state", copy)


def _plain(value: Any, path: str, host: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensor = value.detach()
        # A parameter detaches to a plain tensor; what does not would need its class to be loaded.
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            raise TypeError(f"{path} is a {type(value).__name__}: a checkpoint holds plain tensors")
        return host(path, tensor)
    if isinstance(value, Mapping):
        return _plain_dict(value, path, host)
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{path}[{i}]", host) for i, item in enumerate(value))
    # The exact type counts: numpy's float64 is a float, and would be written as numpy's.
    if type(value) in _SCALARS:
        return value
    raise TypeError(
        f"{path} is a {type(value).__name__}: a checkpoint holds dicts, lists and tuples of "
        "tensors, numbers, text and None"
    )


def _plain_dict(
    mapping: Mapping[Any, Any], path: str, host: Callable[[str, Tensor], Tensor]
) -> dict[Any, Any]:
    for key in mapping:
        if type(key) not in (str, int):
            raise TypeError(f"{path} has the key {key!r}: a checkpoint's keys are text or integers")
    return {key: _plain(value, f"{path}[{key!r}]", host) for key, value in mapping.items()}
