"""Memory of a worker: what it has allocated counts, not what it keeps or shares with others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.measure.memory import SAMPLED_STEPS, WorkerMemory, allocated_bytes, shared_bytes

MIB = 2**20
SLACK = MIB
"""Other threads of the test process may allocate."""

needs_mallinfo = pytest.mark.skipif(allocated_bytes() is None, reason="needs glibc 2.33")


def tensor_of(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes, dtype=torch.uint8)


def is_near(size_bytes: int | None, expected: int) -> bool:
    return size_bytes is not None and abs(size_bytes - expected) < SLACK


@needs_mallinfo
def test_freed_memory_does_not_count() -> None:
    before = allocated_bytes() or 0
    held = tensor_of(40 * MIB)
    assert is_near(allocated_bytes(), before + 40 * MIB)
    del held
    assert is_near(allocated_bytes(), before)


@needs_mallinfo
def test_worker_has_the_memory_of_its_setup_of_each_part_of_a_step_and_of_the_peak() -> None:
    data = tensor_of(50 * MIB)
    memory = WorkerMemory(torch.device("cpu"))
    weights = tensor_of(20 * MIB)
    memory.setup_done()
    for step in range(SAMPLED_STEPS + 1):
        activations = tensor_of((30 if step < SAMPLED_STEPS else 90) * MIB)
        if memory.is_sampling:
            memory.sample("forward")
        del activations
        gradients = tensor_of(20 * MIB)
        if memory.is_sampling:
            memory.sample("backward")
            if step == 0:
                state = tensor_of(10 * MIB)
            memory.sample("update")
        del gradients
    memory.steps_done()
    evaluated = tensor_of(200 * MIB)
    memory.steps_done()
    assert not memory.is_sampling
    expected = {
        "setup_bytes": 20,
        "forward_bytes": 20 + 10 + 30,
        "backward_bytes": 20 + 10 + 20,
        "update_bytes": 20 + 10 + 20,
        "peak_bytes": 60,
    }
    found = memory.to_dict()
    assert found.keys() == expected.keys()
    for name, mib in expected.items():
        assert is_near(found[name], mib * MIB), name
    del data, weights, state, evaluated


def test_worker_that_ended_before_its_first_step_has_no_peak() -> None:
    memory = WorkerMemory(torch.device("cpu"))
    memory.steps_done()
    assert memory.to_dict()["peak_bytes"] is None


def test_part_of_shared_memory_is_that_of_the_kernel(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps_rollup"
    smaps.write_text("5630-7fff ---p 0 00:00 0   [rollup]\nRss: 1672 kB\nPss_Shmem:   300 kB\n")
    assert shared_bytes(smaps) == 300 * 1024
    assert shared_bytes(tmp_path / "absent") == 0
