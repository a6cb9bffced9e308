"""The Muon optimizer: orthogonalized updates of matrices, AdamW for vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.config import from_mapping
from paceline.strategies import create_strategy
from paceline.training.muon import ADAM_UPDATE_RMS, Muon, orthogonalize, orthogonalize_batch


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(start: Tensor, gradients: list[Tensor], **settings: Any) -> Tensor:
    weight = nn.Parameter(start.clone())
    optimizer = Muon([weight], **settings)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(6, 75), (75, 6), (16, 16), (1, 9)])
def test_orthogonalized_matrix_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = random_tensor(*shape)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    # The result has the singular vectors of the matrix, so the projection on them is diagonal.
    values = left.T @ orthogonalize(matrix) @ right.T
    diagonal = values.diagonal()
    assert bool(((diagonal > 0.5) & (diagonal < 1.3)).all())
    assert float((values - diagonal.diag()).abs().max()) < 1e-3


def test_orthogonalization_in_bf16_is_close_to_fp32() -> None:
    """Within the rounding of bf16, which has eight bits, in five iterations."""
    matrix = random_tensor(16, 75)
    exact, rounded = orthogonalize(matrix), orthogonalize(matrix, torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert float((rounded - exact).norm() / exact.norm()) < 0.02


def test_a_batch_of_any_shapes_is_orthogonalized_like_each_matrix() -> None:
    shapes = [(6, 75), (75, 6), (16, 16), (1, 9), (10, 256)]
    matrices = [random_tensor(*shape, seed=number) for number, shape in enumerate(shapes)]
    matrices.append(torch.zeros(3, 4))
    updates = orthogonalize_batch(matrices, torch.float32)
    for matrix, update in zip(matrices, updates, strict=True):
        torch.testing.assert_close(update, orthogonalize(matrix), atol=1e-4, rtol=1e-3)


def test_zero_gradient_gives_no_update() -> None:
    start = random_tensor(4, 5)
    assert torch.equal(stepped(start, [torch.zeros(4, 5)]), start)


@pytest.mark.parametrize("shape", [(8, 80), (80, 8)])
def test_update_of_a_matrix_has_the_size_of_an_adam_update(shape: tuple[int, int]) -> None:
    gradient = 1e-3 * random_tensor(*shape)
    update = stepped(torch.zeros(shape), [gradient], lr=1.0)
    rms = float(update.square().mean().sqrt())
    assert rms == pytest.approx(ADAM_UPDATE_RMS, rel=0.3)


def test_convolution_kernel_is_a_matrix_with_a_row_per_output_channel() -> None:
    start, gradients = (
        random_tensor(6, 3, 5, 5),
        [random_tensor(6, 3, 5, 5, seed=n) for n in (1, 2)],
    )
    expected = stepped(start.flatten(1), [each.flatten(1) for each in gradients], lr=0.1)
    assert torch.equal(stepped(start, gradients, lr=0.1).flatten(1), expected)
    # The memory format of weights and gradients changes only the order of additions.
    layout = torch.channels_last
    last = stepped(
        start.to(memory_format=layout),
        [each.to(memory_format=layout) for each in gradients],
        lr=0.1,
    )
    torch.testing.assert_close(last.flatten(1), expected)


def test_vectors_are_updated_by_adamw() -> None:
    start, gradients = random_tensor(7), [random_tensor(7, seed=n) for n in range(1, 6)]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([weight], **settings)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(stepped(start, gradients, **settings), weight.detach())


def test_loaded_state_is_on_the_device_of_its_weight() -> None:
    """Checkpoints are loaded to main memory, and the kernel for a GPU reads `step` there."""
    weight = nn.Parameter(random_tensor(3))
    optimizer = Muon([weight])
    weight.grad = random_tensor(3, seed=1)
    optimizer.step()
    elsewhere = Muon([nn.Parameter(torch.empty(3, device="meta"))])
    elsewhere.load_state_dict(optimizer.state_dict())
    (state,) = elsewhere.state.values()
    assert {name: value.device.type for name, value in state.items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), "meta"
    )


def test_weight_decay_shrinks_a_matrix_independently_of_the_gradient() -> None:
    start = random_tensor(4, 5)
    decayed = stepped(start, [torch.zeros(4, 5)], lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(decayed, start * 0.95)


@pytest.mark.parametrize("strategy", ["parameter_server", "sharded", "shared", "fsdp"])
def test_strategies_that_update_shards_reject_muon(strategy: str) -> None:
    config = from_mapping({"optimizer": "muon", "strategy": strategy, "nproc_per_node": 2})
    (problem,) = create_strategy(strategy, {}).check(config)
    assert problem == f"--optimizer muon: not supported by strategy {strategy}; use adamw"
