"""Loss scaling: a step that is passed over leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import odd_weights as odd
from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.sync.single import Single


@pytest.fixture
def unfilled_memory_shows() -> Iterator[None]:
    """torch then fills memory that is not written to with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unfilled_memory_shows")
@pytest.mark.parametrize("clip_norm", [None, 1e9])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_an_overflow_in_the_first_step_does_not_spoil_the_second(
    optimizer: str, clip_norm: float | None
) -> None:
    def work(communicator: Communicator) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled = odd.build(communicator, optimizer, scaler=scaler, clip_norm=clip_norm)
        strategy = odd.attached(Single(), scaled)
        hook = scaled.trainable[0].register_hook(lambda gradient: gradient * float("inf"))
        odd.train(strategy, range(1))
        hook.remove()
        odd.train(strategy, range(2))
        plain = odd.attached(Single(), odd.build(communicator, optimizer))
        odd.train(plain, range(2))
        # Scales are powers of two, so that scaling and unscaling round nothing.
        assert torch.equal(odd.weights_of(strategy), odd.weights_of(plain))

    in_process.run(1, work)
