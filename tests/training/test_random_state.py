"""Random states and strategy states are saved and restored independently of the visible GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.training import run_state
from paceline.training.run_state import Progress
from tests.support import toy_replicas as toy

CPU = torch.device("cpu")


class CudaTensorStrategy(GradientAveraging):
    """Its state holds one tensor, which the test moves to a CUDA device or marks as such."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.arange(4.0)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        self.memory = loaded["memory"]


def gathered_state(world_size: int, device: str = "cpu") -> dict[str, Any]:
    """What rank 0 gets from a gather of `world_size` ranks."""

    def work(communicator: Communicator) -> dict[str, Any] | None:
        strategy = CudaTensorStrategy()
        strategy.setup(toy.replica(communicator, toy.sgd()))
        strategy.memory = (strategy.memory + communicator.rank).to(device)
        return run_state.gather(strategy.replica, strategy, Progress(), {})

    first = in_process.run(world_size, work)[0]
    assert first is not None
    return first


def test_strategy_states_saved_on_a_gpu_that_rank_0_lacks_are_loaded_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:7")
    memories = [each["memory"] for each in gathered_state(2)["strategies"]]
    assert [memory.device for memory in memories] == [CPU, CPU]
    assert [memory.tolist() for memory in memories] == [[0, 1, 2, 3], [1, 2, 3, 4]]


class FakeGpus:
    """Stands in for torch's CUDA generators: one random state per visible device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
        self.states = [torch.tensor([device], dtype=torch.uint8) for device in range(visible)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: visible > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "get_rng_state", self._get)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self._set)

    def _get(self, device: torch.device) -> Tensor:
        return self.states[device.index]

    def _set(self, new: Tensor, device: torch.device | int) -> None:
        self.states[device if isinstance(device, int) else device.index] = new


def values(states: list[Tensor]) -> list[int]:
    return [int(each.item()) for each in states]


def test_each_rank_saves_and_restores_only_the_random_state_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeGpus(monkeypatch, visible=4)
    saved = run_state.random_state(torch.device("cuda", 2))
    gpus = FakeGpus(monkeypatch, visible=4)
    gpus.states = [torch.tensor([100], dtype=torch.uint8)] * 4
    run_state.restore_random_state(saved, torch.device("cuda", 2), rank=2)
    assert values(gpus.states) == [100, 100, 2, 100]


def test_random_state_is_restored_with_fewer_visible_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeGpus(monkeypatch, visible=4)
    saved = run_state.random_state(torch.device("cuda", 3))
    gpus = FakeGpus(monkeypatch, visible=1)
    run_state.restore_random_state(saved, torch.device("cuda", 0), rank=3)
    assert values(gpus.states) == [3]


@pytest.mark.parametrize(
    ("saved", "visible", "device", "rank", "expected"),
    [
        (4, 4, 2, 2, [50, 51, 12, 53]),
        (4, 1, 0, 3, [13]),
        (4, 2, 1, 3, [50, 13]),
        (2, 4, 3, 3, [50, 51, 52, 11]),
    ],
    ids=["as many", "one", "fewer", "more"],
)
def test_older_checkpoint_with_a_list_of_gpu_states_is_restored_by_rank(
    saved: int,
    visible: int,
    device: int,
    rank: int,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a list has one state per device that was visible then: device N was rank N's."""
    older = {
        "cpu": torch.get_rng_state(),
        "gpus": [torch.tensor([10 + index], dtype=torch.uint8) for index in range(saved)],
    }
    gpus = FakeGpus(monkeypatch, visible)
    gpus.states = [torch.tensor([50 + index], dtype=torch.uint8) for index in range(visible)]
    run_state.restore_random_state(older, torch.device("cuda", device), rank)
    assert values(gpus.states) == expected


def test_checkpoint_with_more_gpu_states_than_visible_gpus_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = gathered_state(1)
    one = torch.tensor([9], dtype=torch.uint8)
    for random in (saved["random"], saved["owns"][0]["random"]):
        random["gpus"] = [one] * 4
    FakeGpus(monkeypatch, visible=1)

    def work(communicator: Communicator) -> int:
        strategy = CudaTensorStrategy()
        strategy.setup(toy.replica(communicator, toy.sgd()))
        return run_state.restore(saved, strategy.replica, strategy)[0].iteration

    assert in_process.run(1, work) == [0]


@pytest.mark.parametrize("kind", ["own", "list"])
def test_gpu_states_are_ignored_on_the_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.tensor([9], dtype=torch.uint8)
    cpu_state = torch.Generator().manual_seed(5).get_state()
    saved: dict[str, Any] = {"cpu": cpu_state}
    saved |= {"gpu": one} if kind == "own" else {"gpus": [one, one]}
    gpus = FakeGpus(monkeypatch, visible=1)
    before = torch.get_rng_state()
    try:
        run_state.restore_random_state(saved, CPU, rank=0)
        assert torch.equal(torch.get_rng_state(), cpu_state)
    finally:
        torch.set_rng_state(before)
    assert values(gpus.states) == [0]


def test_checkpoint_of_a_cpu_run_has_no_gpu_state() -> None:
    assert set(run_state.random_state(CPU)) == {"cpu"}


@pytest.mark.gpu
def test_strategy_states_on_cuda_are_gathered_on_the_cpu() -> None:
    memories = [each["memory"] for each in gathered_state(2, device="cuda:0")["strategies"]]
    assert [memory.device for memory in memories] == [CPU, CPU]
    assert [memory.tolist() for memory in memories] == [[0, 1, 2, 3], [1, 2, 3, 4]]


@pytest.mark.gpu
def test_gpu_repeats_its_random_numbers_after_a_restore() -> None:
    device = torch.device("cuda", 0)
    torch.rand(3, device=device)
    saved = run_state.random_state(device)
    expected = torch.rand(8, device=device)
    run_state.restore_random_state(saved, device, rank=0)
    assert torch.equal(torch.rand(8, device=device), expected)


@pytest.mark.gpu
def test_list_of_more_gpu_states_than_visible_devices_is_restored() -> None:
    """As rank 2 of a run on more GPUs, whose own state was the third of the list."""
    device = torch.device("cuda", 0)
    torch.rand(3, device=device)
    own = torch.cuda.get_rng_state(device)
    expected = torch.rand(8, device=device)
    other = torch.cuda.get_rng_state(device)
    count = torch.cuda.device_count() + 2
    older = {"cpu": torch.get_rng_state(), "gpus": [other, other, own] + [other] * count}
    run_state.restore_random_state(older, device, rank=2)
    assert torch.equal(torch.rand(8, device=device), expected)
