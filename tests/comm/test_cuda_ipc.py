"""Export and mapping of GPU memory, with fakes of CUDA's calls. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.cuda_ipc import CudaIpcMemory

CPU = torch.device("cpu")
SIZE_BYTES, EVENTS = 4096, 6
WORLD_SIZE = 3


class FakeCuda:
    """What processes export, by handle."""

    def __init__(self) -> None:
        self.exported: dict[bytes, Any] = {}
        self.references: dict[int, int] = {}
        """Torch's counter of each export of memory. It frees memory whose counters are all 0, and a
        counter below 0 wraps around."""
        self._numbers = count(1)

    def export(self, value: object, size: int) -> bytes:
        handle = next(self._numbers).to_bytes(size, "little")
        self.exported[handle] = value
        return handle

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        handle, counter = self.export(storage, 66), next(self._numbers)
        self.references[counter] = 1
        return 0, handle, storage.nbytes(), 0, b"/torch_1_2_0", counter, b"e" * 64, True

    def map(
        self,
        _index: int,
        handle: bytes,
        size_bytes: int,
        _offset: int,
        counters: bytes,
        counter: int,
        *_: object,
    ) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = self.exported[handle]
        assert storage.nbytes() == size_bytes
        # Torch does so when the rank unmaps the memory.
        self.release(counters, counter)
        return storage

    def release(self, counters: bytes, counter: int) -> None:
        assert counters == b"/torch_1_2_0"
        self.references[counter] -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class Event:
        def __init__(self, **_: object) -> None:
            self.recorded = 0

        def ipc_handle(self) -> bytes:
            return fake.export(self, 64)

        @staticmethod
        def from_ipc_handle(_device: torch.device, handle: bytes) -> object:
            return fake.exported[handle]

        def record(self, _stream: object) -> None:
            self.recorded += 1

    class Stream:
        def __init__(self, _device: torch.device) -> None:
            self.waited: list[object] = []

        def wait_event(self, event: object) -> None:
            self.waited.append(event)

    properties: Callable[[object], object] = lambda _: SimpleNamespace(uuid="GPU-1")  # noqa: E731
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "device": lambda _: nullcontext(),
        "get_device_properties": properties,
        "ipc_collect": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda self: fake.share(self))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(fake.map))
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", staticmethod(fake.release)
    )
    return fake


def test_every_rank_maps_the_memory_of_all_others(cuda: FakeCuda) -> None:
    def write_and_read(communicator: Communicator) -> list[int]:
        memory = CudaIpcMemory(communicator, CPU, SIZE_BYTES, EVENTS)
        memory.slots[communicator.rank].fill_(communicator.rank + 1)
        communicator.barrier().wait()
        return [int(slots.min()) for slots in memory.slots]

    assert in_process.run(WORLD_SIZE, write_and_read) == [[1, 2, 3]] * WORLD_SIZE
    assert set(cuda.references.values()) == {0}


def test_stream_waits_for_the_events_of_all_peers(cuda: FakeCuda) -> None:
    def wait(communicator: Communicator) -> list[int]:
        memory: Any = CudaIpcMemory(communicator, CPU, SIZE_BYTES, EVENTS)
        memory.record(communicator.rank)
        communicator.barrier().wait()
        for event in range(WORLD_SIZE):
            memory.wait_for_peers(event)
        return [event.recorded for event in memory._stream.waited]

    # Each rank has recorded only the event of its own number.
    assert in_process.run(WORLD_SIZE, wait) == [
        [0, 0, 1, 0, 0, 1],
        [1, 0, 0, 0, 0, 1],
        [1, 0, 0, 1, 0, 0],
    ]


def error_of(communicator: Communicator) -> str:
    try:
        CudaIpcMemory(communicator, CPU, SIZE_BYTES, EVENTS)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_failure_to_map_is_one_line_on_all_ranks(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid argument\nand more")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(fail))
    errors = in_process.run(WORLD_SIZE, error_of)
    assert errors == ["CUDA error: invalid argument"] * WORLD_SIZE
    assert set(cuda.references.values()) == {0}


def test_failure_to_open_an_event_releases_all_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks fail after they have mapped the memory of one peer, but not yet that of the other."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", staticmethod(fail))
    assert in_process.run(WORLD_SIZE, error_of) == ["CUDA error: invalid argument"] * WORLD_SIZE
    assert set(cuda.references.values()) == {0}


def test_ranks_on_different_gpus_do_not_share_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count()
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=f"GPU-{next(numbers)}")
    )
    errors = in_process.run(WORLD_SIZE, error_of)
    assert errors == ["the workers use different GPUs"] * WORLD_SIZE
    assert set(cuda.references.values()) == {0}
