"""`paceline.join`: a user's own loop, alone and together."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import from_mapping
from paceline.errors import UsageError
from paceline.strategies import create_strategy
from paceline.training.batches import Samples
from paceline.training.session import Session

SAMPLES, BATCH = 50, 16
"""The last batch of an epoch has two samples: too few for three workers."""

CPU = torch.device("cpu")


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES) % 3


SEEDING = Lock()
"""The workers are threads, and the generator of random numbers is one for all of them."""


def model() -> nn.Module:
    with SEEDING:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def together(workers: int, work: Callable[[Session], Any], strategy: str) -> list[Any]:
    """One result for each worker; the workers are threads."""

    def one(communicator: Communicator) -> Any:
        rank_info = replace(
            SINGLE_PROCESS,
            rank=communicator.rank,
            local_rank=communicator.rank,
            world_size=workers,
            local_world_size=workers,
        )
        config = from_mapping({"strategy": strategy, "nproc_per_node": workers})
        chosen = create_strategy(strategy, {})
        session = Session(config, rank_info, communicator, chosen, CPU)
        result = work(session)
        session.finish()
        return result

    return in_process.run(workers, one)


def train(session: Session, epochs: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    own = model()
    # All but the first begin with other weights: rank 0 broadcasts its own.
    if session.rank:
        nn.init.zeros_(next(own.parameters()))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    trained, _, batches = session.prepare(own, optimizer, tensors(), batch_size=BATCH)
    for _ in range(epochs):
        for inputs, labels in batches:
            session.backward(F.cross_entropy(trained(inputs), labels))
            session.step()
    return own, session.account()


def bare_loop(epochs: int = 2) -> nn.Module:
    """The same training without paceline, but for the order of the samples."""
    from paceline.data.sampling import GlobalBatchSampler

    own, (inputs, labels) = model(), tensors()
    order = GlobalBatchSampler(SAMPLES, BATCH, seed=0)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for index in range(order.batches_per_epoch):
            chosen = order.batch(epoch, index)
            optimizer.zero_grad()
            F.cross_entropy(own(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
    return own


@pytest.mark.parametrize("strategy", ["allreduce", "ring", "overlap"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_learns_what_the_bare_loop_learns(
    workers: int, strategy: str
) -> None:
    expected = bare_loop().state_dict()
    for own, _ in together(workers, train, strategy):
        for name, weights in own.state_dict().items():
            torch.testing.assert_close(weights, expected[name], rtol=1e-4, atol=1e-6)


def test_alone_no_launcher_is_needed() -> None:
    with paceline.join("overlap", out=None, bucket_mib=1) as session:
        own, _ = train(session)
    assert (session.rank, session.world_size, session.is_first) == (0, 1, True)
    expected = bare_loop().state_dict()
    for name, weights in own.state_dict().items():
        torch.testing.assert_close(weights, expected[name], rtol=1e-4, atol=1e-6)


def dealt(session: Session) -> list[list[int]]:
    """The samples of this worker, epoch by epoch."""
    own = nn.Linear(1, 1)
    numbers = torch.arange(SAMPLES)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    _, _, batches = session.prepare(own, optimizer, (numbers,), batch_size=BATCH)
    assert len(batches) == 4
    epochs = []
    for _ in range(2):
        chosen = []
        for (part,) in batches:
            chosen += part.tolist()[: batches.own_samples]
        epochs.append(chosen)
    return epochs


def test_every_sample_is_dealt_once_an_epoch_and_the_next_pass_is_another_epoch() -> None:
    by_worker = together(3, dealt, "allreduce")
    first, second = ([n for worker in by_worker for n in worker[epoch]] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second


class Pairs(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([float(number)]), "y": torch.tensor(number)}


@pytest.mark.parametrize("dataset", [Pairs(), TensorDataset(torch.arange(SAMPLES))], ids=type)
def test_datasets_of_torch_are_dealt_as_tensors_are(dataset: Samples) -> None:
    def first_batch(samples: Samples) -> Any:
        with paceline.join("allreduce", out=None) as session:
            own = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            return next(iter(session.prepare(own, optimizer, samples, batch_size=BATCH)[2]))

    batch = first_batch(dataset)
    numbers = batch["y"] if isinstance(batch, dict) else batch[0]
    assert torch.equal(numbers, first_batch((torch.arange(SAMPLES),))[0])


def test_the_account_adds_up() -> None:
    accounts = [account for _, account in together(2, train, "allreduce")]
    for account in accounts:
        assert sum(account["phases"].values()) == pytest.approx(account["wall_seconds"])
        assert account["phases"]["forward"] > 0
        assert account["phases"]["backward"] > 0
    assert sum(account["samples"] for account in accounts) == 2 * SAMPLES
    weights = sum(weight.numel() for weight in model().parameters())
    assert accounts[0]["traffic"]["gradients"]["bytes_sent"] >= 8 * weights * 4


def test_the_model_can_be_copied_saved_and_compiled() -> None:
    torch._dynamo.reset()
    with paceline.join("single", out=None) as team:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        trained, _, batches = team.prepare(net, optimizer, tensors(), batch_size=BATCH)
        copied = copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))
        counter = CompileCounter()
        compiled = torch.compile(trained, fullgraph=True, backend=counter, dynamic=False)
        sizes = set()
        for inputs, labels in batches:
            sizes.add(len(inputs))
            for each in copied:
                each(inputs)
            team.backward(F.cross_entropy(compiled(inputs), labels))
            team.step()
    assert counter.frame_count == len(sizes)
    assert not trained._forward_pre_hooks


@pytest.mark.parametrize("batch_size", [0, SAMPLES + 1])
def test_an_impossible_batch_is_rejected(batch_size: int) -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with (
        pytest.raises(UsageError, match=r"batch_size: must be 1 \(workers\) to 50 \(samples\)"),
        paceline.join("allreduce", out=None) as session,
    ):
        session.prepare(own, optimizer, tensors(), batch_size=batch_size)


def test_an_unknown_strategy_option_is_rejected() -> None:
    with pytest.raises(UsageError, match="-o speed: strategy ring has no such option"):
        paceline.join("ring", speed=3).__enter__()


def test_a_strategy_with_servers_is_rejected() -> None:
    with pytest.raises(UsageError, match="does not support custom loops"):
        paceline.join("parameter_server").__enter__()


def test_the_package_offers_join_without_loading_torch() -> None:
    program = (
        "import paceline, sys; assert 'join' in paceline.__all__; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
