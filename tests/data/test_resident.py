"""A pipeline on the device gives the same batches as the one on the CPU, by fixed operations."""

from __future__ import annotations

import pytest
import torch

from paceline.data.dataset import Split, TokenTransform, Transform
from paceline.data.image_transforms import ImageTransform
from paceline.data.pipeline import EvaluationPipeline, InputPipeline
from paceline.data.resident import ResidentEvaluationPipeline, ResidentPipeline, pipeline_for
from paceline.data.sampling import GlobalBatchSampler
from paceline.data.text import windows
from tests.support.recorded_graph import RecordedGraph

TRANSFORM = ImageTransform((0.1, 0.5, 0.7), (0.2, 0.25, 0.4))
KINDS = [
    (),
    ("flip",),
    ("crop",),
    ("shift",),
    ("cutout",),
    ("crop", "flip", "cutout"),
    ("shift", "flip"),
    ("shift", "alternate_flip"),
]


def image_split(samples: int = 50) -> Split:
    generator = torch.Generator().manual_seed(9)
    images = torch.randint(256, (samples, 3, 12, 10), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(samples, dtype=torch.uint8) % 10)


def both(
    split: Split,
    transform: Transform | None,
    kinds: tuple[str, ...],
    channels_last: bool = False,
) -> tuple[InputPipeline, ResidentPipeline]:
    order = GlobalBatchSampler(len(split), 16, seed=4)
    return (
        InputPipeline(split, transform, order, kinds, seed=5, channels_last=channels_last),
        ResidentPipeline(split, transform, order, kinds, seed=5, channels_last=channels_last),
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(kinds) or "none")
def test_batches_equal_those_gathered_on_the_cpu(
    kinds: tuple[str, ...], channels_last: bool
) -> None:
    host, resident = both(image_split(), TRANSFORM, kinds, channels_last=channels_last)
    for epoch, index, part in (
        (0, 0, None),
        (0, 3, None),
        (2, 1, slice(5, 11)),
        (1, 3, slice(1, 2)),
    ):
        for expected, found in zip(
            host.batch(epoch, index, part), resident.batch(epoch, index, part), strict=True
        ):
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype
            assert found.stride() == expected.stride()


def test_images_normalized_one_by_one_equal_those_of_the_cpu() -> None:
    host, resident = both(image_split(), ImageTransform(per_image=True), ("shift",))
    assert torch.equal(host.batch(1, 1)[0], resident.batch(1, 1)[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_tokens_and_targets_per_position_are_gathered(dtype: torch.dtype) -> None:
    split = windows(torch.arange(61).to(dtype), 3)
    host, resident = both(split, TokenTransform(), ())
    for expected, found in zip(host.batch(0, 1), resident.batch(0, 1), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(kinds) or "none")
def test_repeating_the_operations_of_one_batch_gives_any_other(kinds: tuple[str, ...]) -> None:
    host, resident = both(image_split(), TRANSFORM, kinds)
    resident.seek(0, 0)
    graph = RecordedGraph()
    with graph.record():
        inputs, targets = resident.gather(slice(2, 9))
    for epoch, index in ((0, 2), (3, 1), (1, 0)):
        resident.seek(epoch, index)
        graph.replay()
        expected_inputs, expected_targets = host.batch(epoch, index, slice(2, 9))
        assert torch.equal(inputs, expected_inputs)
        assert torch.equal(targets, expected_targets)


def test_cpu_gathers_on_the_cpu() -> None:
    order = GlobalBatchSampler(50, 16, seed=4)
    pipeline = pipeline_for(image_split(), TRANSFORM, order, device=torch.device("cpu"))
    assert type(pipeline) is InputPipeline


def test_evaluation_batches_equal_those_of_the_cpu_and_can_be_repeated() -> None:
    split = image_split(23)
    expected = list(EvaluationPipeline(split, TRANSFORM, 10))
    resident = ResidentEvaluationPipeline(split, TRANSFORM, 10)
    for (inputs, targets), (found, found_targets) in zip(expected, resident, strict=True):
        assert torch.equal(found, inputs)
        assert torch.equal(found_targets, targets)
    resident.seek(0)
    graph = RecordedGraph()
    with graph.record():
        inputs, targets = resident.gather(10)
    resident.seek(10)
    graph.replay()
    assert torch.equal(inputs, expected[1][0])
    assert torch.equal(targets, expected[1][1])
