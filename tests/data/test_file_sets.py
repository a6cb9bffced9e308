"""Loading of file-based datasets."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.checksums import VERDICTS_FILE
from paceline.data.dataset import Dataset, LoadRequest
from paceline.data.files import FileDataset
from paceline.errors import DataError
from tests.support.dataset_files import (
    SMALL_CIFAR10,
    SMALL_MNIST,
    SMALL_SVHN,
    SMALL_SVHN_EXTRA,
    TEST,
    TRAIN,
    idx_bytes,
    python2_batch,
    python3_batch,
    random_bytes,
    random_labels,
    write_cifar10,
    write_mnist,
    write_svhn,
)

SETS: dict[str, tuple[FileDataset, Callable[[Path], object]]] = {
    "mnist": (SMALL_MNIST, write_mnist),
    "cifar10": (SMALL_CIFAR10, write_cifar10),
    "svhn": (SMALL_SVHN, write_svhn),
    "svhn_extra": (SMALL_SVHN_EXTRA, write_svhn),
}
every_set = pytest.mark.parametrize("name", SETS)


def load(fileset: FileDataset, folder: Path, limit_bytes: int = 1 << 30) -> Dataset:
    return fileset(LoadRequest(str(folder), resident_limit_bytes=limit_bytes))


def test_mnist_matches_written_samples(tmp_path: Path) -> None:
    images, labels = write_mnist(tmp_path)
    train = load(SMALL_MNIST, tmp_path).train
    np.testing.assert_array_equal(train.inputs, images[:, None])
    np.testing.assert_array_equal(train.targets, labels)


@pytest.mark.parametrize("batch", [python2_batch, python3_batch(2), python3_batch(4)])
def test_cifar10_concatenates_batches_in_order(tmp_path: Path, batch: object) -> None:
    assert callable(batch)
    rows, labels = write_cifar10(tmp_path, batch)
    train = load(SMALL_CIFAR10, tmp_path).train
    np.testing.assert_array_equal(train.inputs, rows.reshape(-1, 3, 32, 32))
    assert train.targets.tolist() == labels


@pytest.mark.parametrize("deflated", [True, False])
def test_svhn_label_10_becomes_digit_0(tmp_path: Path, deflated: bool) -> None:
    images, digits = write_svhn(tmp_path, deflated=deflated)["test"]
    test = load(SMALL_SVHN, tmp_path).test
    np.testing.assert_array_equal(test.inputs, images)
    assert test.targets.tolist() == digits


def test_svhn_extra_is_train_followed_by_extra(tmp_path: Path) -> None:
    splits = write_svhn(tmp_path)
    train = load(SMALL_SVHN_EXTRA, tmp_path).train
    np.testing.assert_array_equal(
        train.inputs, np.concatenate([splits["train"][0], splits["extra"][0]])
    )
    assert train.targets.tolist() == splits["train"][1] + splits["extra"][1]


@every_set
def test_inputs_and_targets_keep_their_stored_dtype(tmp_path: Path, name: str) -> None:
    fileset, write = SETS[name]
    write(tmp_path)
    dataset = load(fileset, tmp_path)
    assert dataset.train.inputs.dtype == dataset.test.inputs.dtype == torch.uint8
    assert dataset.train.targets.dtype == dataset.test.targets.dtype == torch.uint8
    assert dataset.sample_shape == fileset.official.sample_shape


@every_set
@pytest.mark.parametrize("limit_bytes", [1 << 30, 0])
def test_limited_load_is_a_prefix_of_the_full_dataset(
    tmp_path: Path, name: str, limit_bytes: int
) -> None:
    fileset, write = SETS[name]
    write(tmp_path)
    whole = load(fileset, tmp_path).train
    # Spans more than one file of the datasets that have several.
    asked = min(TRAIN + 2, len(whole) - 1)
    request = LoadRequest(
        str(tmp_path), train_samples=asked, test_samples=2, resident_limit_bytes=limit_bytes
    )
    part = fileset(request)
    assert torch.equal(part.train.inputs, whole.inputs[:asked])
    assert torch.equal(part.train.targets, whole.targets[:asked])
    assert len(part.test) == 2


def test_requesting_too_many_samples_returns_all(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    dataset = SMALL_MNIST(LoadRequest(str(tmp_path), test_samples=1000))
    assert len(dataset.test) == TEST


@every_set
def test_mapped_split_has_the_same_samples(tmp_path: Path, name: str) -> None:
    fileset, write = SETS[name]
    write(tmp_path)
    resident = load(fileset, tmp_path)
    for _ in ("made", "found"):
        mapped = load(fileset, tmp_path, limit_bytes=0)
        assert torch.equal(mapped.train.inputs, resident.train.inputs)
        assert torch.equal(mapped.train.targets, resident.train.targets)
        assert torch.equal(mapped.test.inputs, resident.test.inputs)


def test_decoded_file_is_reused_for_unchanged_sources(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    load(SMALL_SVHN, tmp_path, limit_bytes=0)
    decoded = tmp_path / "svhn" / "svhn-train.decoded"
    made = decoded.stat().st_ino
    load(SMALL_SVHN, tmp_path, limit_bytes=0)
    assert decoded.stat().st_ino == made


def test_changed_source_is_decoded_again(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    load(SMALL_MNIST, tmp_path, limit_bytes=0)
    images = random_bytes(TRAIN, 28, 28, seed=99)
    source = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    source.write_bytes(gzip.compress(idx_bytes(images)))
    os.utime(source, ns=(0, 0))
    train = load(SMALL_MNIST, tmp_path, limit_bytes=0).train
    np.testing.assert_array_equal(train.inputs, images[:, None])


def test_truncated_decoded_file_is_rewritten(tmp_path: Path) -> None:
    images, _ = write_mnist(tmp_path)
    load(SMALL_MNIST, tmp_path, limit_bytes=0)
    os.truncate(tmp_path / "mnist" / "mnist-train.decoded", 5000)
    train = load(SMALL_MNIST, tmp_path, limit_bytes=0).train
    np.testing.assert_array_equal(train.inputs, images[:, None])


def test_writing_to_mapped_samples_does_not_change_the_file(tmp_path: Path) -> None:
    images, _ = write_mnist(tmp_path)
    load(SMALL_MNIST, tmp_path, limit_bytes=0).train.inputs.zero_()
    train = load(SMALL_MNIST, tmp_path, limit_bytes=0).train
    np.testing.assert_array_equal(train.inputs, images[:, None])


def test_corrupt_source_leaves_no_decoded_file(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    os.truncate(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", 1000)
    with pytest.raises(DataError):
        load(SMALL_MNIST, tmp_path, limit_bytes=0)
    assert not list((tmp_path / "mnist").glob("*decoded*.part"))
    assert not (tmp_path / "mnist" / "mnist-train.decoded").exists()


def test_unwritable_decoded_file_is_a_one_line_error(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "mnist-train.decoded").mkdir()
    with pytest.raises(DataError, match=r"cannot write .*--resident-limit-mib") as caught:
        load(SMALL_MNIST, tmp_path, limit_bytes=0)
    assert "\n" not in str(caught.value)


@every_set
def test_missing_files_error_names_folder_and_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(SETS[name][0], tmp_path)
    line = str(caught.value)
    assert f"not in {tmp_path}" in line
    assert f"`paceline data fetch {name} --data-dir {tmp_path}`" in line


@every_set
def test_truncated_file_is_a_one_line_error_with_its_path(tmp_path: Path, name: str) -> None:
    fileset, write = SETS[name]
    write(tmp_path)
    for file in fileset.official.files:
        path = tmp_path / file.path
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError) as caught:
            load(fileset, tmp_path)
        assert str(caught.value).startswith(f"{path} ")
        assert f"`paceline data fetch {name} --data-dir {tmp_path} --force`" in str(caught.value)
        assert "\n" not in str(caught.value)
        path.write_bytes(whole)


def test_train_file_in_place_of_test_file_is_rejected(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    batches = tmp_path / "cifar-10-batches-py"
    (batches / "data_batch_1").replace(batches / "test_batch")
    (batches / "data_batch_2").replace(batches / "data_batch_1")
    (batches / "data_batch_2").write_bytes((batches / "data_batch_1").read_bytes())
    with pytest.raises(DataError, match=r"test_batch has images of shape \(7, 3072\)"):
        load(SMALL_CIFAR10, tmp_path)


def test_label_outside_the_classes_is_rejected(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    labels = np.full(TRAIN, 10, np.uint8)
    path = tmp_path / "mnist" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx_bytes(labels)))
    with pytest.raises(DataError, match="has the invalid label 10"):
        load(SMALL_MNIST, tmp_path)


@pytest.mark.parametrize("labels", [[0] * 6, [*range(6), 10], [*range(6), -1], [*range(6), b"1"]])
def test_invalid_cifar10_labels_are_rejected(tmp_path: Path, labels: list[int]) -> None:
    write_cifar10(tmp_path)
    batch = python3_batch(2)(random_bytes(TRAIN, 3072), labels)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(batch)
    with pytest.raises(DataError, match=r"data_batch_3 has .*label"):
        load(SMALL_CIFAR10, tmp_path)


def test_wrong_class_names_are_rejected(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(
        python3_batch(2)(random_bytes(1), random_labels(1))
    )
    with pytest.raises(DataError, match=r"batches\.meta does not list the ten class names"):
        load(SMALL_CIFAR10, tmp_path)


def test_folder_in_place_of_a_file_counts_as_missing(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    path = tmp_path / "svhn" / "test_32x32.mat"
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"missing svhn/test_32x32\.mat"):
        load(SMALL_SVHN, tmp_path)


def test_unofficial_files_give_one_warning(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    (warning,) = load(SMALL_SVHN, tmp_path).warnings
    assert warning.startswith(f"svhn: 2 of 2 files in {tmp_path} differ from the official files")


def test_recompressed_official_files_give_no_warning(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert as_official(SMALL_MNIST, tmp_path)(LoadRequest(str(tmp_path))).warnings == ()


def test_unwritable_folder_only_disables_verdict_caching(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    # A folder with this name cannot be replaced by a file, even by root.
    (tmp_path / VERDICTS_FILE).mkdir()
    fileset = as_official(SMALL_MNIST, tmp_path)
    assert fileset(LoadRequest(str(tmp_path))).warnings == ()
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == []


def as_official(fileset: FileDataset, folder: Path) -> FileDataset:
    """Return the dataset with the files in `folder` as its official files."""

    def contents(path: str) -> str:
        return hashlib.sha256(gzip.decompress((folder / path).read_bytes())).hexdigest()

    official = fileset.official
    return dataclasses.replace(
        fileset,
        official=dataclasses.replace(
            official,
            train=tuple(
                dataclasses.replace(file, content_sha256=contents(file.path))
                for file in official.train
            ),
            test=tuple(
                dataclasses.replace(file, content_sha256=contents(file.path))
                for file in official.test
            ),
        ),
    )
