"""Loss scaling leaves no trace: neither a step that is passed over, nor a scale that changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import odd_weights as odd
from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.sync.options import create_strategy
from paceline.sync.single import Single

INPUTS = torch.arange(1.0, 9.0) / 7


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


@pytest.mark.parametrize("strategy", ["allreduce", "overlap"])
@pytest.mark.parametrize(
    "options", [{"codec": "topk", "ratio": "0.125"}, {"codec": "int8"}], ids=["topk", "int8"]
)
def test_what_a_codec_holds_back_follows_the_loss_scale(
    strategy: str, options: dict[str, str]
) -> None:
    """What was sent and what is held back are together all the gradients, at a growing scale."""
    steps, rate = 6, 1.0

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        model = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(model.weight)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        make = partial(torch.optim.SGD, lr=rate)
        replica = odd.build(communicator, make, model, scaler=scaler)
        chosen = odd.attached(create_strategy(strategy, options), replica)
        for _ in range(steps):
            chosen.backward(model(INPUTS).sum() / communicator.world_size)
            chosen.step()
        held_back = chosen.state_dict()["codec"]["pending"]["0"] / scaler.get_scale()
        chosen.finish()
        return model.weight.detach().flatten(), held_back

    results = in_process.run(2, work)
    sent = -results[0][0] / rate
    held_back = sum(pending for _, pending in results)
    torch.testing.assert_close(sent + held_back, steps * INPUTS)
