"""A dataset that is read from its official files: the one loader behind all of them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data.checksums import Verdict, verify_file
from paceline.data.dataset import Dataset, DatasetInfo, LoadRequest, Split
from paceline.data.manifest import CorruptFileError, DatasetManifest, ManifestFile, data_folder
from paceline.data.storage import Chunk, mapped_split, resident_split
from paceline.errors import DataError


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a split, where it lies, and how many samples it must hold."""

    path: Path
    samples: int


Reader = Callable[[Sequence[Source], int], Iterator[Chunk]]
"""Yields the first so many samples of a split's files, or raises CorruptFileError."""


@dataclass(frozen=True, slots=True)
class FileDataset:
    """A `Loader` for one official set."""

    official: DatasetManifest
    read: Reader

    @property
    def outline(self) -> DatasetInfo:
        own = self.official
        return DatasetInfo(own.sample_shape, own.classes, own.train_samples, own.test_samples)

    def __call__(self, request: LoadRequest) -> Dataset:
        folder = data_folder(request.folder)
        official = self.official
        try:
            self._refuse_missing(folder, request.folder)
            train = self._load(
                "train", official.train, folder, official.train_samples, request.train_samples,
                request.resident_limit_bytes,
            )  # fmt: skip
            test = self._load(
                "test", official.test, folder, official.test_samples, request.test_samples,
                request.resident_limit_bytes,
            )  # fmt: skip
            warnings = self._warnings(folder)
        except CorruptFileError as damage:
            raise DataError(self.advice(damage, request.folder)) from None
        except OSError as error:
            raise DataError(_cannot_read(error, folder)) from None
        return Dataset(
            name=official.name,
            train=train,
            test=test,
            classes=official.classes,
            mean=official.mean,
            std=official.std,
            warnings=warnings,
        )

    def check_readable(self, folder: Path) -> None:
        """Read all samples, keep none. Raises CorruptFileError, or DataError if reading fails."""
        for files, samples in (
            (self.official.train, self.official.train_samples),
            (self.official.test, self.official.test_samples),
        ):
            for _ in self._checked(_locate(files, folder), samples):
                pass

    def advice(self, damage: CorruptFileError, folder: str | None) -> str:
        """The line for users: what is wrong with which file, and the command that mends it."""
        return f"{damage}: replace it with `{self._fetch_command(folder)} --force`"

    def _load(
        self,
        split: str,
        files: Sequence[ManifestFile],
        folder: Path,
        samples: int,
        wanted: int | None,
        limit_bytes: int,
    ) -> Split:
        sources = _locate(files, folder)
        shape = self.official.sample_shape
        used = samples if wanted is None else min(wanted, samples)
        if used * math.prod(shape) <= limit_bytes:
            return resident_split(self._checked(sources, used), used, shape)
        paths = [source.path for source in sources]
        cache = paths[0].with_name(f"{self.official.name}-{split}.decoded")
        whole = mapped_split(cache, paths, lambda: self._checked(sources, samples), samples, shape)
        return whole.head(used)

    def _checked(self, sources: Sequence[Source], samples: int) -> Iterator[Chunk]:
        """What the reader yields, once the labels are known to be classes."""
        last = sources[-1].path
        try:
            for images, labels in self.read(sources, samples):
                if labels.size and int(labels.max()) >= self.official.classes:
                    raise CorruptFileError(last, f"has the label {labels.max()}, which is no class")
                yield images, labels
        except OSError as error:
            raise DataError(_cannot_read(error, last)) from None

    def _refuse_missing(self, folder: Path, asked: str | None) -> None:
        missing = [file.path for file in self.official.files if not (folder / file.path).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(
                f"{self.official.name} is not in {folder} (no {missing[0]}{more}): "
                f"fetch it with `{self._fetch_command(asked)}`"
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
            "are not the official bytes; compare results only with others on these same files",
        )


def _locate(files: Sequence[ManifestFile], folder: Path) -> list[Source]:
    return [Source(folder / file.path, file.samples) for file in files]


def _cannot_read(error: OSError, path: Path) -> str:
    return f"cannot read {error.filename or path}: {error.strerror or error}"
