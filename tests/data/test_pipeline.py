"""Input pipeline: the right samples, augmented the same way for any number of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.dataset import Split, TokenTransform
from paceline.data.image_transforms import (
    CROP_PAD,
    CUTOUT_SIDE,
    Augmenter,
    AugmentParams,
    ImageTransform,
    cut_out,
    draw_augment_params,
)
from paceline.data.pipeline import EvaluationPipeline, InputPipeline
from paceline.data.resident import ResidentPipeline, pipeline_for
from paceline.data.sampling import GlobalBatchSampler, shard_bounds
from paceline.data.text import windows

MEAN, STD = (0.1, 0.5, 0.7), (0.2, 0.25, 0.4)
ALL_KINDS = ("crop", "flip", "cutout")


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(9))


def image_split(samples: int = 50, shape: tuple[int, int, int] = (3, 12, 10)) -> Split:
    return Split(random_bytes(samples, *shape), torch.arange(samples) % 10)


def plain(images: Tensor) -> Tensor:
    """Reference implementation of normalization."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (images / 255 - mean) / std


def make_pipeline(split: Split, batch_size: int = 16, **options: object) -> InputPipeline:
    order = GlobalBatchSampler(len(split), batch_size, seed=4)
    return InputPipeline(split, ImageTransform(MEAN, STD), order, **options)  # type: ignore[arg-type]


def params_for(images: Tensor, epoch: int = 0) -> AugmentParams:
    samples, _, height, width = images.shape
    return draw_augment_params(1, epoch, samples, height, width)


def augmented(augmenter: Augmenter, images: Tensor, params: AugmentParams | None = None) -> Tensor:
    params = params or params_for(images)
    return augmenter.gather(images, torch.arange(len(images)), params).clone()


def test_batch_is_normalized_by_mean_and_std() -> None:
    split = image_split()
    path = make_pipeline(split)
    for index in range(path.order.batches_per_epoch):
        rows = path.order.batch(1, index)
        inputs, labels = path.batch(1, index)
        torch.testing.assert_close(inputs, plain(split.inputs[rows]))
        assert torch.equal(labels, split.targets[rows])


def test_per_image_normalization_uses_the_statistics_of_each_channel_of_an_image() -> None:
    split = image_split()
    split.inputs[3] = 7
    transform = ImageTransform(MEAN, STD, per_image=True)
    path = InputPipeline(split, transform, GlobalBatchSampler(50, 50, seed=4), channels_last=True)
    inputs, _ = path.batch(0, 0)
    pixels = split.inputs[path.order.batch(0, 0)].double()
    variance, mean = torch.var_mean(pixels, (2, 3), correction=0, keepdim=True)
    expected = (pixels - mean) / (variance + 16).sqrt()
    torch.testing.assert_close(inputs.double(), expected, rtol=1e-4, atol=1e-4)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    (tested,) = EvaluationPipeline(split, transform, batch_size=50)
    assert torch.equal(tested[0][path.order.batch(0, 0)], inputs)


def test_shift_moves_images_by_up_to_two_pixels_and_repeats_their_edges() -> None:
    images = random_bytes(40, 3, 9, 7)
    params = params_for(images)
    padded = F.pad(images.float(), [2] * 4, mode="replicate").to(torch.uint8)
    expected = [
        padded[n, :, down : down + 9, right : right + 7]
        for n, (down, right) in enumerate(zip(params.down, params.right, strict=True))
    ]
    shifted = augmented(Augmenter(["shift"]), images)
    assert torch.equal(shifted, torch.stack(expected))
    assert set(params.down) == set(params.right) == {0, 1, 2, 3, 4}
    flipped = [
        each.flip(2) if flip else each for each, flip in zip(images, params.flipped, strict=True)
    ]
    both = augmented(Augmenter(["shift", "flip"]), images)
    assert torch.equal(both, augmented(Augmenter(["shift"]), torch.stack(flipped), params))


def test_images_without_statistics_are_scaled_to_0_1() -> None:
    split = image_split()
    path = InputPipeline(split, ImageTransform(), GlobalBatchSampler(50, 16, seed=4))
    expected = split.inputs[path.order.batch(0, 0)] / 255
    torch.testing.assert_close(path.batch(0, 0)[0], expected)


def test_single_statistic_applies_to_all_channels() -> None:
    split = image_split()
    path = InputPipeline(split, ImageTransform((0.5,), (0.25,)), GlobalBatchSampler(50, 16, seed=4))
    expected = (split.inputs[path.order.batch(0, 0)] / 255 - 0.5) / 0.25
    torch.testing.assert_close(path.batch(0, 0)[0], expected)


def test_floats_are_not_normalized() -> None:
    split = Split(torch.randn(20, 7), torch.arange(20))
    path = InputPipeline(split, None, GlobalBatchSampler(20, 8, seed=0))
    assert torch.equal(path.batch(0, 1)[0], split.inputs[path.order.batch(0, 1)])


def test_doubles_are_converted_to_the_model_dtype() -> None:
    split = Split(torch.randn(20, 7, dtype=torch.float64), torch.arange(20))
    assert (
        InputPipeline(split, None, GlobalBatchSampler(20, 8, 0)).batch(0, 0)[0].dtype
        == torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64])
def test_tokens_of_any_integer_dtype_become_int64(dtype: torch.dtype) -> None:
    split = windows(random_bytes(81).to(dtype), 8)
    pipeline = InputPipeline(split, TokenTransform(), GlobalBatchSampler(10, 4, seed=0))
    rows = pipeline.order.batch(0, 0)
    inputs, targets = pipeline.batch(0, 0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, split.inputs[rows].long())
    assert torch.equal(targets, split.targets[rows].long())


def test_targets_of_any_integer_dtype_become_int64() -> None:
    split = Split(random_bytes(20, 3, 4, 4), torch.arange(20, dtype=torch.uint8))
    assert make_pipeline(split).batch(0, 0)[1].dtype == torch.int64


def test_channels_last_changes_only_the_layout() -> None:
    split = image_split()
    inputs, _ = make_pipeline(split, channels_last=True, augment=("crop",)).batch(0, 0)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(inputs, make_pipeline(split, augment=("crop",)).batch(0, 0)[0])


def test_mapped_split_gives_the_same_batches(tmp_path: Path) -> None:
    split = image_split()
    file = tmp_path / "images"
    file.write_bytes(split.inputs.numpy().tobytes())
    mapped = torch.from_file(str(file), shared=False, size=split.inputs.numel(), dtype=torch.uint8)
    over_file = make_pipeline(Split(mapped.view_as(split.inputs), split.targets), augment=ALL_KINDS)
    in_memory = make_pipeline(split, augment=ALL_KINDS)
    assert torch.equal(over_file.batch(0, 2)[0], in_memory.batch(0, 2)[0])


def test_requesting_a_batch_does_not_change_the_previous_one() -> None:
    path = make_pipeline(image_split(), augment=ALL_KINDS)
    first, _ = path.batch(0, 0)
    kept = first.clone()
    path.batch(0, 1)
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    "kinds", [(), ("crop",), ("flip",), ("alternate_flip",), ("cutout",), ALL_KINDS]
)
@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1], [5, 1, 0, 2]])
def test_shards_are_augmented_like_the_global_batch(
    kinds: tuple[str, ...], weights: list[float]
) -> None:
    split = image_split()
    alone = make_pipeline(split, augment=kinds)
    # Each worker has its own pipeline with its own history of batches.
    workers = [make_pipeline(split, augment=kinds) for _ in weights]
    for index in range(alone.order.batches_per_epoch):
        whole, labels = alone.batch(3, index)
        parts = [
            worker.batch(3, index, shard_bounds(len(labels), weights, rank))
            for rank, worker in enumerate(workers)
        ]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_empty_shard_is_an_empty_batch() -> None:
    inputs, labels = make_pipeline(image_split(), augment=ALL_KINDS).batch(0, 0, slice(4, 4))
    assert inputs.shape == (0, 3, 12, 10)
    assert labels.shape == (0,)


def test_repeated_batch_is_bit_identical() -> None:
    split = image_split()
    path = make_pipeline(split, augment=ALL_KINDS)
    before, _ = path.batch(2, 1)
    path.batch(0, 3)
    assert torch.equal(path.batch(2, 1)[0], before)
    assert torch.equal(make_pipeline(split, augment=ALL_KINDS).batch(2, 1)[0], before)


def test_alternate_flip_shows_each_sample_once_in_each_orientation_in_two_epochs() -> None:
    """By sample, not by position: the order of samples changes between the epochs."""
    split = image_split(samples=200)
    path = make_pipeline(split, batch_size=200, augment=("alternate_flip",), seed=3)
    images = plain(split.inputs)
    flipped = []
    for epoch in range(3):
        rows = path.order.permutation(epoch)
        inputs, _ = path.batch(epoch, 0)
        is_flipped = torch.empty(200, dtype=torch.bool)
        is_flipped[rows] = (inputs - images[rows].flip(3)).abs().amax((1, 2, 3)) < 1e-5
        expected = torch.where(is_flipped.view(-1, 1, 1, 1), images.flip(3), images)
        torch.testing.assert_close(inputs, expected[rows])
        flipped.append(is_flipped)
    # Five standard deviations of fair coin flips.
    assert abs(int(flipped[0].sum()) - 100) < 36
    assert torch.equal(flipped[1], ~flipped[0])
    assert torch.equal(flipped[2], flipped[0])


def test_augmentation_differs_by_seed_and_epoch() -> None:
    drawn = {
        tuple(draw_augment_params(seed, epoch, 30, 32, 32).cut_row)
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(drawn) == 25


def test_augmentation_parameters_are_uniform() -> None:
    params = draw_augment_params(0, 0, 9000, 6, 5)
    for part, below in (
        (params.top, 9), (params.left, 9), (params.flipped, 2),
        (params.cut_row, 6), (params.cut_column, 5),
    ):  # fmt: skip
        counts = np.bincount(part, minlength=below)
        assert len(counts) == below
        expected = 9000 / below
        # Five standard deviations of the uniform distribution.
        assert abs(counts - expected).max() < 5 * (expected * (1 - 1 / below)) ** 0.5


def test_transform_does_not_depend_on_other_transforms() -> None:
    images = random_bytes(40, 3, 12, 10)
    one_by_one = images
    for kind in ("flip", "crop", "cutout"):
        one_by_one = augmented(Augmenter((kind,)), one_by_one)
    assert torch.equal(augmented(Augmenter(ALL_KINDS), images), one_by_one)


def test_crop_is_a_window_of_the_zero_padded_image() -> None:
    images = random_bytes(200, 3, 12, 10)
    params = params_for(images)
    cropped = augmented(Augmenter(("crop",)), images, params)
    for sample, image in enumerate(images):
        padded = torch.zeros(3, 12 + 2 * CROP_PAD, 10 + 2 * CROP_PAD, dtype=torch.uint8)
        padded[:, CROP_PAD : CROP_PAD + 12, CROP_PAD : CROP_PAD + 10] = image
        top, left = params.top[sample], params.left[sample]
        assert torch.equal(cropped[sample], padded[:, top : top + 12, left : left + 10])


@pytest.mark.parametrize("kinds", [("crop",), ("flip",), ("cutout",), ALL_KINDS])
def test_augmenter_keeps_no_state_between_batches(kinds: tuple[str, ...]) -> None:
    images = random_bytes(8, 3, 12, 10)
    used = Augmenter(kinds)
    for samples in (30, 8, 5, 1, 2, 3):
        others = random_bytes(samples, 3, 12, 10)
        augmented(used, others, params_for(others, epoch=7))
    assert torch.equal(augmented(used, images), augmented(Augmenter(kinds), images))


def test_augmentation_does_not_modify_the_source() -> None:
    images = random_bytes(30, 3, 12, 10)
    before = images.clone()
    augmented(Augmenter(ALL_KINDS), images)
    assert torch.equal(images, before)


def test_selected_images_are_flipped() -> None:
    images = random_bytes(30, 2, 3, 8)
    params = params_for(images)
    after = augmented(Augmenter(("flip",)), images, params)
    for sample, image in enumerate(images):
        mirror = image[:, :, torch.arange(7, -1, -1)]
        assert torch.equal(after[sample], mirror if params.flipped[sample] else image)


def test_cutout_fills_only_one_square() -> None:
    images = random_bytes(1, 2, 20, 20)
    expected = images.clone()
    half = CUTOUT_SIDE // 2
    for channel, value in enumerate((77, 130)):
        expected[0, channel, 10 - half : 10 + half, 12 - half : 12 + half] = value
    fill = torch.tensor([77, 130], dtype=torch.uint8).view(1, 2, 1, 1)
    cut_out(images, np.array([10]), np.array([12]), fill)
    assert torch.equal(images, expected)


def test_cutout_is_clipped_at_the_border() -> None:
    images = torch.full((1, 1, 9, 9), 7, dtype=torch.uint8)
    cut_out(images, np.array([0]), np.array([0]), torch.zeros(1, 1, 1, 1).byte())
    assert int((images == 0).sum()) == (CUTOUT_SIDE // 2) ** 2


def test_cutout_pixels_are_zero_after_normalization() -> None:
    path = make_pipeline(image_split(), augment=("cutout",))
    untouched = make_pipeline(image_split())
    changed = path.batch(0, 0)[0] != untouched.batch(0, 0)[0]
    # Half a uint8 step in units of the smallest std.
    assert path.batch(0, 0)[0][changed].abs().max() <= 0.5 / 255 / min(STD) + 1e-5


def test_evaluation_yields_every_sample_once_in_order() -> None:
    split = image_split(23)
    batches = list(EvaluationPipeline(split, ImageTransform(MEAN, STD), batch_size=10))
    assert [len(labels) for _, labels in batches] == [10, 10, 3]
    torch.testing.assert_close(torch.cat([inputs for inputs, _ in batches]), plain(split.inputs))
    assert torch.equal(torch.cat([labels for _, labels in batches]), split.targets)


def test_evaluation_does_not_modify_float_inputs() -> None:
    split = Split(torch.randn(6, 3), torch.arange(6))
    before = split.inputs.clone()
    list(EvaluationPipeline(split, None, batch_size=4))
    assert torch.equal(split.inputs, before)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [ALL_KINDS, ("shift", "alternate_flip")])
@pytest.mark.parametrize("fraction", [0.5, 0.0])
def test_gpu_batches_equal_cpu_batches(
    fraction: float, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.resident._MAX_GPU_MEMORY_FRACTION", fraction)
    split = image_split()
    on_cpu = make_pipeline(split, augment=kinds)
    on_gpu = pipeline_for(
        split, ImageTransform(MEAN, STD), on_cpu.order, kinds, device=torch.device("cuda")
    )
    assert isinstance(on_gpu, ResidentPipeline) == (fraction > 0)
    for epoch, index in ((0, 0), (0, 3), (1, 1)):
        inputs, labels = on_gpu.batch(epoch, index, slice(3, 9))
        expected, expected_labels = on_cpu.batch(epoch, index, slice(3, 9))
        assert inputs.is_cuda
        torch.testing.assert_close(inputs.cpu(), expected)
        assert torch.equal(labels.cpu(), expected_labels)
