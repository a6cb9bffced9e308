"""Contract tests that every codec passes."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from paceline.compression import CODECS, create
from paceline.compression.codec import Codec, drive
from paceline.compression.testing import exchange_all_ranks

WORLDS = (1, 2, 3, 4)
SIZES = (0, 1, 7, 1009, 2500)
"""Empty, single, prime, and larger than a chunk of int8."""

SHAPES = ((40, 5, 5), (40,), (30, 30), (2, 2), ())
"""A convolution, a bias, a square matrix, a matrix too small to compress, a scalar."""

SHAPED_ELEMENTS = 40 * 25 + 40 + 900 + 4 + 1

every_codec = pytest.mark.parametrize("name", CODECS.names())
every_world = pytest.mark.parametrize("world", WORLDS)


def make_codecs(name: str, world: int) -> list[Codec]:
    return [create(name, {}) for _ in range(world)]


def gradients(world: int, elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(elements * 10 + world)
    return [torch.randn(elements, generator=generator, dtype=dtype) / world for _ in range(world)]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@every_codec
@every_world
@pytest.mark.parametrize("elements", SIZES)
def test_results_are_bit_identical_on_all_workers(name: str, world: int, elements: int) -> None:
    codecs = make_codecs(name, world)
    for step in range(3):
        given = [gradient * (step + 1) for gradient in gradients(world, elements)]
        results = exchange_all_ranks(codecs, "layer", given).results
        assert all(torch.equal(result, results[0]) for result in results)


@every_codec
@every_world
def test_results_with_shapes_are_bit_identical_on_all_workers(name: str, world: int) -> None:
    codecs = make_codecs(name, world)
    for step in range(3):
        given = [gradient * (step + 1) for gradient in gradients(world, SHAPED_ELEMENTS)]
        results = exchange_all_ranks(codecs, "bucket", given, SHAPES).results
        assert all(torch.equal(result, results[0]) for result in results)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", SIZES)
def test_result_has_the_size_and_dtype_of_the_gradient(
    name: str, dtype: torch.dtype, elements: int
) -> None:
    result = exchange_all_ranks(
        make_codecs(name, 2), "layer", gradients(2, elements, dtype)
    ).results[0]
    assert (result.shape, result.dtype) == ((elements,), dtype)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", SIZES)
def test_wire_bytes_match_the_requests(name: str, dtype: torch.dtype, elements: int) -> None:
    moved = exchange_all_ranks(
        make_codecs(name, 3), "layer", gradients(3, elements, dtype)
    ).wire_bytes
    assert create(name, {}).wire_bytes(elements, dtype.itemsize) == moved


@every_codec
def test_wire_bytes_with_shapes_match_the_requests(name: str) -> None:
    given = gradients(3, SHAPED_ELEMENTS)
    moved = exchange_all_ranks(make_codecs(name, 3), "bucket", given, SHAPES).wire_bytes
    assert create(name, {}).wire_bytes(SHAPED_ELEMENTS, 4, SHAPES) == moved


@every_codec
@every_world
def test_zero_gradients_sum_to_zero(name: str, world: int) -> None:
    given = [torch.zeros(SHAPED_ELEMENTS) for _ in range(world)]
    result = exchange_all_ranks(make_codecs(name, world), "bucket", given, SHAPES).results[0]
    assert torch.equal(result, torch.zeros(SHAPED_ELEMENTS))


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [3, 1010])
def test_non_finite_gradient_makes_the_result_non_finite(
    name: str, bad: float, position: int
) -> None:
    given = gradients(3, SHAPED_ELEMENTS)
    given[1][position] = bad
    result = exchange_all_ranks(make_codecs(name, 3), "bucket", given, SHAPES).results[0]
    assert not result[position].isfinite()


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_does_not_affect_later_steps(name: str, bad: float) -> None:
    codecs = make_codecs(name, 2)
    good = gradients(2, SHAPED_ELEMENTS)
    exchange_all_ranks(codecs, "bucket", copies(good), SHAPES)
    spoilt = copies(good)
    spoilt[0].fill_(bad)
    exchange_all_ranks(codecs, "bucket", spoilt, SHAPES)
    result = exchange_all_ranks(codecs, "bucket", copies(good), SHAPES).results[0]
    assert result.isfinite().all()


@every_codec
def test_zero_gradient_does_not_affect_later_steps(name: str) -> None:
    codec = create(name, {})
    exchange_all_ranks([codec], "bucket", [torch.zeros(SHAPED_ELEMENTS)], SHAPES)
    good = gradients(1, SHAPED_ELEMENTS)
    expected = exchange_all_ranks([create(name, {})], "bucket", copies(good), SHAPES).results[0]
    result = exchange_all_ranks([codec], "bucket", copies(good), SHAPES).results[0]
    assert torch.equal(result, expected)


@every_codec
@pytest.mark.parametrize("magnitude", [1e30, 1e-30, 1e-34])
def test_huge_and_tiny_gradients_keep_their_magnitude(name: str, magnitude: float) -> None:
    codecs = make_codecs(name, 2)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        given = [torch.randn(SHAPED_ELEMENTS, generator=generator) * magnitude for _ in range(2)]
        result = exchange_all_ranks(codecs, "bucket", given, SHAPES).results[0]
        assert magnitude / 10 < float(result.abs().amax()) < magnitude * 100


@every_codec
def test_keys_do_not_share_state(name: str) -> None:
    alone, beside = create(name, {}), create(name, {})
    for step in range(3):
        gradient = gradients(1, SHAPED_ELEMENTS)[0] * (step + 1)
        exchange_all_ranks([beside], "other", [gradient * 3], SHAPES)
        expected = exchange_all_ranks([alone], "bucket", [gradient.clone()], SHAPES).results[0]
        result = exchange_all_ranks([beside], "bucket", [gradient.clone()], SHAPES).results[0]
        assert torch.equal(result, expected)


@every_codec
@every_world
def test_restored_state_continues_bit_identically(name: str, world: int) -> None:
    codecs = make_codecs(name, world)
    given = gradients(world, SHAPED_ELEMENTS)
    for _ in range(3):
        exchange_all_ranks(codecs, "bucket", copies(given), SHAPES)
    restored = make_codecs(name, world)
    for codec, original in zip(restored, codecs, strict=True):
        file = io.BytesIO()
        torch.save(original.state_dict(), file)
        codec.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for _ in range(3):
        expected = exchange_all_ranks(codecs, "bucket", copies(given), SHAPES).results
        results = exchange_all_ranks(restored, "bucket", copies(given), SHAPES).results
        assert all(map(torch.equal, results, expected))


@every_codec
def test_saved_state_does_not_change_in_later_steps(name: str) -> None:
    codec = create(name, {})
    gradient = gradients(1, SHAPED_ELEMENTS)[0]
    exchange_all_ranks([codec], "bucket", [gradient.clone()], SHAPES)
    state = codec.state_dict()
    before = {memory: {key: t.clone() for key, t in state[memory].items()} for memory in state}
    exchange_all_ranks([codec], "bucket", [gradient.clone()], SHAPES)
    for memory, tensors in state.items():
        assert all(torch.equal(tensor, before[memory][key]) for key, tensor in tensors.items())


@every_codec
def test_drive_performs_the_requests_of_one_worker(name: str) -> None:
    gradient = gradients(1, SHAPED_ELEMENTS)[0]
    expected = exchange_all_ranks([create(name, {})], "b", [gradient.clone()], SHAPES).results[0]
    exchange = create(name, {}).exchange("b", gradient.clone(), SHAPES)
    assert torch.equal(drive(exchange, lambda tensor: tensor, lambda tensor: [tensor]), expected)


@every_codec
def test_results_do_not_depend_on_thread_count(name: str) -> None:
    """Workers with different thread counts must compute identical results."""
    # Long enough that libraries split the reduction of one column over threads.
    shapes = ((60_000, 5),)
    given = gradients(1, 300_000)[0]
    answers: list[Tensor] = []
    first = create(name, {}).exchange("layer", given.clone(), shapes)

    def recorded(tensor: Tensor) -> Tensor:
        answers.append(tensor.clone())
        return tensor

    result = drive(first, recorded, lambda tensor: [recorded(tensor)])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        replay = iter(answers)
        again = create(name, {}).exchange("layer", given.clone(), shapes)
        repeated = drive(again, lambda _: next(replay), lambda _: [next(replay)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(repeated, result)


def test_only_none_is_lossless() -> None:
    assert [name for name in CODECS.names() if create(name, {}).lossless] == ["none"]


@every_world
@pytest.mark.parametrize("elements", SIZES)
def test_lossless_codecs_sum_integers_exactly(world: int, elements: int) -> None:
    generator = torch.Generator().manual_seed(world)
    given = [torch.randint(-1000, 1000, (elements,), generator=generator) for _ in range(world)]
    expected = torch.stack(given).sum(0).float()
    for name in CODECS.names():
        if create(name, {}).lossless:
            floats = [gradient.float() for gradient in given]
            result = exchange_all_ranks(make_codecs(name, world), "layer", floats).results[0]
            assert torch.equal(result, expected)
