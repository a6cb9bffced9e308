"""The real dataset files: class counts, statistics and verification."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.cli.data import verify_sets
from paceline.data import DATASETS
from paceline.data.dataset import Dataset, LoadRequest
from paceline.data.image_transforms import ImageTransform
from paceline.data.manifest import OFFICIAL_SETS

pytestmark = pytest.mark.real_data

NAMES = ("mnist", "cifar10", "svhn")

# From the publications of the datasets; for SVHN, the count of each digit from 0 to 9.
TRAIN_COUNTS = {
    "mnist": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "cifar10": [5000] * 10,
    "svhn": [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659],
}


@pytest.fixture(scope="session")
def linked_data(real_data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the real files in a writable folder."""
    folder = tmp_path_factory.mktemp("real")
    for name in NAMES:
        for file in OFFICIAL_SETS[name].files:
            (folder / file.path).parent.mkdir(exist_ok=True)
            (folder / file.path).symlink_to(real_data_dir / file.path)
    return folder


@pytest.fixture(scope="module", params=NAMES)
def dataset(request: pytest.FixtureRequest, linked_data: Path) -> Dataset:
    return DATASETS.load(request.param)(LoadRequest(str(linked_data)))


def test_class_counts_match_published_counts(dataset: Dataset) -> None:
    assert torch.bincount(dataset.train.targets).tolist() == TRAIN_COUNTS[dataset.name]


def test_manifest_mean_and_std_match_the_training_set(dataset: Dataset) -> None:
    values = torch.arange(256, dtype=torch.float64) / 255
    transform = dataset.transform
    assert isinstance(transform, ImageTransform)
    for channel, (mean, std) in enumerate(zip(transform.mean, transform.std, strict=True)):
        counts = torch.bincount(dataset.train.inputs[:, channel].flatten(), minlength=256)
        share = counts / counts.sum()
        measured = (share * values).sum()
        deviation = (share * (values - measured) ** 2).sum().sqrt()
        # Unofficial copies are JPEG-recompressed, which smooths the images slightly.
        tolerance = 0.003 if dataset.warnings else 0.0001
        assert measured.item() == pytest.approx(mean, abs=tolerance)
        assert deviation.item() == pytest.approx(std, abs=tolerance)


def test_real_files_verify(linked_data: Path) -> None:
    assert verify_sets([OFFICIAL_SETS[name] for name in NAMES], linked_data) == 0


def test_mapped_svhn_equals_resident_svhn(linked_data: Path) -> None:
    resident = DATASETS.load("svhn")(LoadRequest(str(linked_data)))
    mapped = DATASETS.load("svhn")(LoadRequest(str(linked_data), resident_limit_bytes=0))
    assert torch.equal(resident.test.inputs, mapped.test.inputs)
    assert torch.equal(resident.train.targets, mapped.train.targets)
