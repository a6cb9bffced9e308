"""Error bounds of the lossy codecs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.compression import create
from paceline.compression.powersgd import orthonormal
from paceline.compression.testing import exchange_all_ranks

WORLD = 3


def gradients(elements: int, seed: int = 0, world: int = WORLD) -> list[Tensor]:
    """Return entries over several orders of magnitude, as in real gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(elements, generator=generator)
        * torch.exp(2 * torch.randn(elements, generator=generator))
        for _ in range(world)
    ]


def exchange(name: str, inputs: list[Tensor], **options: str) -> Tensor:
    codecs = [create(name, options) for _ in inputs]
    return exchange_all_ranks(codecs, "layer", [g.clone() for g in inputs]).results[0]


def exact_sum(inputs: list[Tensor]) -> Tensor:
    return torch.stack(inputs).double().sum(0)


@pytest.mark.parametrize(("name", "unit_roundoff"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-12, 1e12])
def test_half_precision_rounds_each_entry_and_addition_once(
    name: str, unit_roundoff: float, magnitude: float
) -> None:
    inputs = [gradient * magnitude for gradient in gradients(5000)]
    error = (exchange(name, inputs).double() - exact_sum(inputs)).abs()
    magnitudes = torch.stack(inputs).double().abs().sum(0)
    # One rounding of each entry and two additions: (1 + u)^3 - 1. Below the normal range of fp16,
    # spacing is 2^-24 of the scaled sum, itself at least 2^14, and three roundings are half of it.
    underflow = 1.5 * 2.0**-38 * sum(float(gradient.abs().max()) for gradient in inputs)
    assert (error <= ((1 + unit_roundoff) ** 3 - 1) * magnitudes + underflow).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_is_exact_for_small_integers(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randint(-64, 65, (999,), generator=generator).float() for _ in range(3)]
    assert torch.equal(exchange(name, inputs), exact_sum(inputs).float())


def test_fp16_does_not_overflow() -> None:
    inputs = [torch.tensor([65504.0 * 4, 1.0, -65504.0 * 2]) for _ in range(4)]
    assert torch.equal(exchange("fp16", inputs), torch.tensor([65504.0 * 16, 4.0, -65504.0 * 8]))


def test_int8_error_is_at_most_half_a_scale_per_worker() -> None:
    inputs = gradients(2048)
    error = (exchange("int8", inputs, chunk="256").double() - exact_sum(inputs)).abs()
    scales = sum(gradient.double().view(-1, 256).abs().amax(1) / 127 for gradient in inputs)
    assert isinstance(scales, Tensor)
    # float32 arithmetic adds a few rounding errors of values up to 127 scales.
    bound = scales * (0.5 + 127 * 2.0**-21)
    assert (error.view(-1, 256) <= bound[:, None]).all()


def test_int8_chunks_do_not_share_a_scale() -> None:
    """A chunk of large values does not round an adjacent chunk of small values to zero."""
    large, small = torch.full((64,), 1000.0), torch.linspace(-1e-3, 1e-3, 64)
    result = exchange("int8", [torch.cat([large, small])], chunk="64")
    torch.testing.assert_close(result[64:], small, rtol=0, atol=0.51 * 1e-3 / 127)


def test_int8_keeps_subnormal_entries_until_they_can_be_sent() -> None:
    codec = create("int8", {})
    gradient = torch.full((10,), 1e-37)
    steps = 40
    sent = sum(
        exchange_all_ranks([codec], "layer", [gradient.clone()]).results[0].double()
        for _ in range(steps)
    )
    assert isinstance(sent, Tensor)
    torch.testing.assert_close(
        sent + codec.state_dict()["pending"]["layer"].double(),
        gradient.double() * steps, rtol=1e-5, atol=0,
    )  # fmt: skip
    assert (sent > 0).all()


@pytest.mark.parametrize("magnitude", [1e-36, 1e-37, 1e-39, 2.5e-43])
def test_int8_never_sends_more_than_the_gradient(magnitude: float) -> None:
    """Subnormal scales have no usable inverse."""
    gradient = torch.linspace(-magnitude, magnitude, 100)
    result = exchange("int8", [gradient])
    assert (result * gradient.sign() >= 0).all()
    assert (result.abs() <= gradient.abs() * 1.01 + magnitude / 127).all()


def test_topk_sends_only_the_largest_entries_exactly() -> None:
    inputs = gradients(1000)
    expected = torch.zeros(1000)
    for gradient in inputs:
        largest = gradient.abs().argsort(descending=True)[:100]
        expected[largest] += gradient[largest]
    assert torch.equal(exchange("topk", inputs, ratio="0.1"), expected)


def test_topk_with_ratio_1_is_exact() -> None:
    inputs = gradients(101)
    assert torch.equal(exchange("topk", inputs, ratio="1"), inputs[0] + inputs[1] + inputs[2])


@pytest.mark.parametrize(("rows", "columns"), [(40, 30), (30, 40), (200, 9)])
def test_powersgd_is_exact_for_low_rank_gradients(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, 2, generator=generator)
    inputs = [(left @ torch.randn(2, columns, generator=generator)).flatten() for _ in range(WORLD)]
    codecs = [create("powersgd", {"rank": "2"}) for _ in inputs]
    expected = exact_sum(inputs).float()
    outcome = exchange_all_ranks(codecs, "layer", inputs, ((rows, columns),))
    torch.testing.assert_close(outcome.results[0], expected, rtol=1e-4, atol=1e-4)


def test_powersgd_sends_vectors_and_small_matrices_exactly() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = [
        torch.randint(-9, 9, (30 * 30 + 50 + 6,), generator=generator).float() for _ in range(WORLD)
    ]
    shapes = ((50,), (30, 30), (2, 3))
    codecs = [create("powersgd", {}) for _ in inputs]
    expected = exact_sum(inputs).float()
    result = exchange_all_ranks(codecs, "bucket", inputs, shapes).results[0]
    plain = [*range(50), *range(950, 956)]
    assert torch.equal(result[plain], expected[plain])


def test_powersgd_converges_to_the_best_approximation_of_a_constant_matrix() -> None:
    """Without error feedback, repeated power iteration finds the leading subspace."""
    generator = torch.Generator().manual_seed(3)
    u = torch.linalg.qr(torch.randn(30, 20, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q
    spectrum = 0.5 ** torch.arange(20.0)
    matrix = u @ torch.diag(spectrum) @ v.T
    best = u[:, :2] @ torch.diag(spectrum[:2]) @ v[:, :2].T
    codec = create("powersgd", {"rank": "2"})
    for _ in range(20):
        state = codec.state_dict()
        codec.load_state_dict({**state, "pending": {}})
        gradient = matrix.clone().flatten()
        result = exchange_all_ranks([codec], "layer", [gradient], ((30, 20),)).results[0]
    torch.testing.assert_close(result.view(30, 20), best, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_nearly_dependent_columns_become_orthonormal(scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    columns = torch.randn(1000, 4, generator=generator)
    columns[:, 2] = columns[:, 0] + 1e-6 * columns[:, 3]
    basis = orthonormal(columns * scale)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), rtol=0, atol=1e-5)


def test_orthonormal_keeps_zero_columns() -> None:
    columns = torch.zeros(10, 2)
    columns[3, 1] = 5.0
    expected = torch.zeros(10, 2)
    expected[3, 1] = 1.0
    assert torch.equal(orthonormal(columns), expected)
