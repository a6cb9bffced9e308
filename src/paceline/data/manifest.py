"""The official files of each dataset: download addresses, sizes and checksums.

The checksums are those published by the dataset authors or by widely used loaders; each was
confirmed by at least two independent sources. This module does not import torch.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataError

FOLDER_VARIABLE = "PACELINE_DATA"


@dataclass(frozen=True, slots=True)
class ManifestFile:
    path: str
    """Relative to the data folder."""
    size_bytes: int
    sha256: str
    samples: int = 0
    """0 for a file that describes the dataset and holds no samples."""
    content_sha256: str | None = None
    """Checksum of the uncompressed content of a .gz file; recognizes recompressed copies."""
    addresses: tuple[str, ...] = ()
    """URLs in the order they are tried; empty if the file is part of the archive."""


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    name: str
    train: tuple[ManifestFile, ...]
    test: tuple[ManifestFile, ...]
    train_samples: int
    test_samples: int
    sample_shape: tuple[int, ...]
    """(channels, height, width)."""
    mean: tuple[float, ...]
    """Per channel, over all pixels of the training set scaled to [0, 1]."""
    std: tuple[float, ...]
    classes: int = 10
    largest_class: float = 0.1
    """Share of the most frequent class in the test set: the accuracy of a constant guess."""
    archive: ManifestFile | None = None
    terms: str | None = None
    """Terms of use, if the authors state any."""

    @property
    def files(self) -> tuple[ManifestFile, ...]:
        return tuple(dict.fromkeys(self.train + self.test))

    @property
    def download_bytes(self) -> int:
        files = (self.archive,) if self.archive else self.files
        return sum(file.size_bytes for file in files)

    def is_in(self, folder: Path) -> bool:
        """Return whether all files are in the data folder, compressed or unpacked."""
        return all(
            any((folder / path).is_file() for path in (file.path, file.path.removesuffix(".gz")))
            for file in self.files
        )


def data_folder(folder: str | None = None) -> Path:
    """Return `folder` if given, else $PACELINE_DATA, else ~/.cache/paceline."""
    chosen = folder or os.environ.get(FOLDER_VARIABLE) or "~/.cache/paceline"
    try:
        return Path(chosen).expanduser()
    except RuntimeError:
        raise DataError(
            f"no home folder for {chosen}: use --data-dir or set {FOLDER_VARIABLE}"
        ) from None


def check_free_space(folder: Path, needed_bytes: int, advice: str) -> None:
    """Raise DataError before a write that would fail only after minutes."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise DataError(
            f"{folder} has {_size_text(free_bytes)} free but needs {_size_text(needed_bytes)}:"
            f" {advice}"
        )


def _size_text(size_bytes: float) -> str:
    units = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
    unit = next((name for name, size in units.items() if size_bytes < 1000 * size), "TB")
    return f"{size_bytes / units[unit]:,.1f} {unit}"


class CorruptFileError(Exception):
    """A file has invalid content. `FileDataset` turns it into a one-line message for the user."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason


def check_max_size(path: Path, limit_bytes: int) -> None:
    """Raise CorruptFileError, before reading the file, if it is larger than any valid one."""
    size_bytes = path.stat().st_size
    if size_bytes > limit_bytes:
        raise CorruptFileError(
            path, f"is too large: {size_bytes} bytes, expected at most {limit_bytes}"
        )


_MNIST_URLS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
_FASHION_URLS = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_CIFAR_URLS = ("https://www.cs.toronto.edu/~kriz/",)
_SVHN_URLS = ("http://ufldl.stanford.edu/housenumbers/",)


def _file(
    folder: str,
    name: str,
    size_bytes: int,
    sha256: str,
    samples: int = 0,
    base_urls: tuple[str, ...] = (),
    content_sha256: str | None = None,
) -> ManifestFile:
    path = f"{folder}/{name}" if folder else name
    addresses = tuple(url + name for url in base_urls)
    return ManifestFile(path, size_bytes, sha256, samples, content_sha256, addresses)


MNIST = DatasetManifest(
    name="mnist",
    train=(
        _file(
            "mnist",
            "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            60000,
            _MNIST_URLS,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        _file(
            "mnist",
            "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            60000,
            _MNIST_URLS,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
    ),
    test=(
        _file(
            "mnist",
            "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            10000,
            _MNIST_URLS,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        _file(
            "mnist",
            "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            10000,
            _MNIST_URLS,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    train_samples=60000,
    test_samples=10000,
    sample_shape=(1, 28, 28),
    mean=(0.1307,),
    std=(0.3081,),
    largest_class=0.1135,
)

FASHION_MNIST = DatasetManifest(
    name="fashion_mnist",
    train=(
        _file(
            "fashion_mnist",
            "train-images-idx3-ubyte.gz",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            60000,
            _FASHION_URLS,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        _file(
            "fashion_mnist",
            "train-labels-idx1-ubyte.gz",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            60000,
            _FASHION_URLS,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
    ),
    test=(
        _file(
            "fashion_mnist",
            "t10k-images-idx3-ubyte.gz",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            10000,
            _FASHION_URLS,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        _file(
            "fashion_mnist",
            "t10k-labels-idx1-ubyte.gz",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            10000,
            _FASHION_URLS,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    train_samples=60000,
    test_samples=10000,
    sample_shape=(1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
)

_CIFAR_FOLDER = "cifar-10-batches-py"
_CIFAR_META = _file(
    _CIFAR_FOLDER,
    "batches.meta",
    158,
    "f962466ef690d46b226450fb9aadc74ba4bc64a76aa526b5827fe4bc5c7125cb",
)
_CIFAR_TRAIN = (
    (31035704, "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd"),
    (31035320, "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8"),
    (31035999, "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9"),
    (31035696, "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b"),
    (31035623, "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154"),
)

CIFAR10 = DatasetManifest(
    name="cifar10",
    train=(
        *(
            _file(_CIFAR_FOLDER, f"data_batch_{number}", size_bytes, sha256, 10000)
            for number, (size_bytes, sha256) in enumerate(_CIFAR_TRAIN, start=1)
        ),
        _CIFAR_META,
    ),
    test=(
        _file(
            _CIFAR_FOLDER,
            "test_batch",
            31035526,
            "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
            10000,
        ),
        _CIFAR_META,
    ),
    train_samples=50000,
    test_samples=10000,
    sample_shape=(3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    archive=_file(
        "",
        "cifar-10-python.tar.gz",
        170498071,
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        base_urls=_CIFAR_URLS,
    ),
)

_SVHN_TRAIN = _file(
    "svhn",
    "train_32x32.mat",
    182040794,
    "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    73257,
    _SVHN_URLS,
)
_SVHN_TEST = _file(
    "svhn",
    "test_32x32.mat",
    64275384,
    "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    26032,
    _SVHN_URLS,
)
_SVHN_EXTRA = _file(
    "svhn",
    "extra_32x32.mat",
    1329278602,
    "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
    531131,
    _SVHN_URLS,
)
_SVHN_TERMS = "the authors permit non-commercial use only"

SVHN = DatasetManifest(
    name="svhn",
    train=(_SVHN_TRAIN,),
    test=(_SVHN_TEST,),
    train_samples=73257,
    test_samples=26032,
    sample_shape=(3, 32, 32),
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    largest_class=5099 / 26032,
    terms=_SVHN_TERMS,
)

# Uses the statistics of `svhn`, so that models trained on either dataset are comparable.
SVHN_EXTRA = DatasetManifest(
    name="svhn_extra",
    train=(_SVHN_TRAIN, _SVHN_EXTRA),
    test=(_SVHN_TEST,),
    train_samples=73257 + 531131,
    test_samples=26032,
    sample_shape=(3, 32, 32),
    mean=SVHN.mean,
    std=SVHN.std,
    largest_class=SVHN.largest_class,
    terms=_SVHN_TERMS,
)

OFFICIAL_SETS = {item.name: item for item in (MNIST, FASHION_MNIST, CIFAR10, SVHN, SVHN_EXTRA)}
