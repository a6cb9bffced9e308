"""Loader for datasets that are read from downloaded files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data.checksums import Verdict, verify_file
from paceline.data.dataset import Dataset, DatasetInfo, LoadRequest, Split
from paceline.data.image_transforms import ImageTransform
from paceline.data.manifest import CorruptFileError, DatasetManifest, ManifestFile, data_folder
from paceline.data.storage import Chunk, mapped_split, resident_split
from paceline.errors import DataError


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a split and the number of samples that it must hold."""

    path: Path
    samples: int


Reader = Callable[[Sequence[Source], int], Iterator[Chunk]]
"""Yields the first N samples of the files of a split; raises CorruptFileError."""


@dataclass(frozen=True, slots=True)
class FileDataset:
    """A `Loader` for the files of one dataset."""

    official: DatasetManifest
    read: Reader

    @property
    def outline(self) -> DatasetInfo:
        official = self.official
        return DatasetInfo(
            official.sample_shape, official.classes, official.train_samples, official.test_samples
        )

    def __call__(self, request: LoadRequest) -> Dataset:
        folder = data_folder(request.folder)
        official = self.official
        try:
            self._check_all_present(folder, request.folder)
            train = self._load(
                "train", official.train, folder, official.train_samples, request.train_samples,
                request.resident_limit_bytes,
            )  # fmt: skip
            test = self._load(
                "test", official.test, folder, official.test_samples, request.test_samples,
                request.resident_limit_bytes,
            )  # fmt: skip
            warnings = self._warnings(folder)
        except CorruptFileError as error:
            raise DataError(self.advice(error, request.folder)) from None
        except OSError as error:
            raise DataError(_cannot_read(error, folder)) from None
        return Dataset(
            name=official.name,
            train=train,
            test=test,
            classes=official.classes,
            transform=ImageTransform(official.mean, official.std),
            warnings=warnings,
        )

    def check_readable(self, folder: Path) -> None:
        """Read and discard all samples. Raises CorruptFileError, or DataError if reading fails."""
        for files, samples in (
            (self.official.train, self.official.train_samples),
            (self.official.test, self.official.test_samples),
        ):
            for _ in self._checked(_locate(files, folder), samples):
                pass

    def advice(self, error: CorruptFileError, folder: str | None) -> str:
        """Return a one-line message: which file is corrupt, why, and the command to replace it."""
        return f"{error}: replace it with `{self._fetch_command(folder)} --force`"

    def _load(
        self,
        split: str,
        files: Sequence[ManifestFile],
        folder: Path,
        samples: int,
        requested: int | None,
        limit_bytes: int,
    ) -> Split:
        sources = _locate(files, folder)
        shape = self.official.sample_shape
        used = samples if requested is None else min(requested, samples)
        if used * math.prod(shape) <= limit_bytes:
            return resident_split(self._checked(sources, used), used, shape)
        paths = [source.path for source in sources]
        cache = paths[0].with_name(f"{self.official.name}-{split}.decoded")
        split_data = mapped_split(
            cache, paths, lambda: self._checked(sources, samples), samples, shape
        )
        return split_data.head(used)

    def _checked(self, sources: Sequence[Source], samples: int) -> Iterator[Chunk]:
        """Yield the chunks of the reader after checking that all labels are valid classes."""
        last = sources[-1].path
        try:
            for images, labels in self.read(sources, samples):
                if labels.size and int(labels.max()) >= self.official.classes:
                    raise CorruptFileError(last, f"has the invalid label {labels.max()}")
                yield images, labels
        except OSError as error:
            raise DataError(_cannot_read(error, last)) from None

    def _check_all_present(self, folder: Path, requested_folder: str | None) -> None:
        missing = [file.path for file in self.official.files if not (folder / file.path).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(
                f"{self.official.name} is not in {folder} (missing {missing[0]}{more}): "
                f"fetch it with `{self._fetch_command(requested_folder)}`"
            )

    def _fetch_command(self, folder: str | None) -> str:
        where = f" --data-dir {shlex.quote(folder)}" if folder else ""
        return f"paceline data fetch {self.official.name}{where}"

    def _warnings(self, folder: Path) -> tuple[str, ...]:
        others = [
            file.path
            for file in self.official.files
            if verify_file(file, folder) is not Verdict.OFFICIAL
        ]
        if not others:
            return ()
        return (
            f"{self.official.name}: {len(others)} of {len(self.official.files)} files in {folder} "
            "differ from the official files; compare results only with runs on the same files",
        )


def _locate(files: Sequence[ManifestFile], folder: Path) -> list[Source]:
    return [Source(folder / file.path, file.samples) for file in files]


def _cannot_read(error: OSError, path: Path) -> str:
    return f"cannot read {error.filename or path}: {error.strerror or error}"
