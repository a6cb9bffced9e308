"""Loss scaling: skipped steps and changes of the scale do not affect the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.strategies import create_strategy
from paceline.strategies.strategy import SingleProcess
from tests.support import odd_shapes as odd
from tests.support.worker_pool import WorkerPool

INPUTS = torch.arange(1.0, 9.0) / 7


@pytest.fixture
def fill_uninitialized_memory() -> Iterator[None]:
    """Makes torch fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fill_uninitialized_memory")
@pytest.mark.parametrize("clip_norm", [None, 1e9])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_overflow_in_the_first_step_does_not_affect_the_second(
    optimizer: str, clip_norm: float | None
) -> None:
    def work(communicator: Communicator) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled = odd.build(communicator, optimizer, scaler=scaler, clip_norm=clip_norm)
        strategy = odd.attached(SingleProcess(), scaled)
        hook = scaled.trainable[0].register_hook(lambda gradient: gradient * float("inf"))
        odd.train(strategy, range(1))
        hook.remove()
        odd.train(strategy, range(2))
        plain = odd.attached(SingleProcess(), odd.build(communicator, optimizer))
        odd.train(plain, range(2))
        # Scales are powers of two, so scaling and unscaling are exact.
        assert torch.equal(odd.weights_of(strategy), odd.weights_of(plain))

    in_process.run(1, work)


@pytest.mark.parametrize("strategy", ["allreduce", "overlap"])
@pytest.mark.parametrize(
    "options", [{"codec": "topk", "ratio": "0.125"}, {"codec": "int8"}], ids=["topk", "int8"]
)
def test_codec_residuals_follow_the_loss_scale(strategy: str, options: dict[str, str]) -> None:
    """Sent gradients and residuals add up to all gradients at a growing scale."""
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


CODECS = {
    "int8": {"codec": "int8", "chunk": "4"},
    "topk": {"codec": "topk", "ratio": "0.125"},
    "powersgd": {"codec": "powersgd", "rank": "1"},
}


def codec_training(
    communicator: Communicator,
    strategy: str,
    options: dict[str, str],
    skipped_steps: tuple[int, ...],
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Return weights and codec state after six steps, some after an overflow on rank 1."""
    model = nn.Linear(8, 6, bias=False)
    model.weight.data.copy_(torch.arange(48.0).sin().view(6, 8))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    make = partial(torch.optim.SGD, lr=0.01)
    replica = odd.build(communicator, make, model, scaler=scaler)
    chosen = odd.attached(create_strategy(strategy, options), replica)

    def step(factor: float) -> None:
        inputs = INPUTS.roll(3 * communicator.rank) * (1 + communicator.rank)
        loss = replica.forward(inputs).square().sum() / communicator.world_size
        replica.is_last_microbatch = True
        chosen.backward(loss * factor)
        chosen.step()

    for number in range(6):
        if number in skipped_steps:
            step(float("inf") if communicator.rank == 1 else 1.0)
        step(1.0)
    if 6 in skipped_steps:
        step(float("inf") if communicator.rank == 1 else 1.0)
    state = chosen.state_dict()["codec"]
    pending = {key: value / scaler.get_scale() for key, value in state["pending"].items()}
    directions = {key: value / value.abs().amax() for key, value in state.get("starts", {}).items()}
    weights = model.weight.detach().clone()
    chosen.finish()
    return weights, {"pending": pending, "starts": directions}


def check_skipped_steps_leave_no_trace(
    run: Callable[[tuple[int, ...]], list[tuple[Tensor, dict[str, dict[str, Tensor]]]]],
) -> None:
    # Scales are powers of two, so scaling and unscaling are exact.
    for (weights, state), (skipped_weights, skipped_state) in zip(
        run(()), run((0, 3, 6)), strict=True
    ):
        assert torch.equal(skipped_weights, weights)
        torch.testing.assert_close(skipped_state, state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("strategy", "more"), [("allreduce", {}), ("allreduce", {"flat": "true"}), ("overlap", {})]
)
@pytest.mark.parametrize("codec", CODECS)
def test_skipped_step_does_not_change_the_codec(
    codec: str, strategy: str, more: dict[str, str]
) -> None:
    def run(steps: tuple[int, ...]) -> list[tuple[Tensor, dict[str, dict[str, Tensor]]]]:
        options = {**CODECS[codec], **more}
        return in_process.run(2, lambda each: codec_training(each, strategy, options, steps))

    check_skipped_steps_leave_no_trace(run)


@pytest.mark.parametrize("codec", CODECS)
def test_step_skipped_by_ddp_does_not_change_the_codec(codec: str) -> None:
    with WorkerPool(2) as pool:
        check_skipped_steps_leave_no_trace(
            lambda steps: pool.run(2, codec_training, "ddp", CODECS[codec], steps, fresh=True)
        )
