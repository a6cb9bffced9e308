"""Take the official files, and nothing else, out of a fetched archive."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from paceline.data.catalogue import OfficialFile
from paceline.data.checksums import sha256_of
from paceline.data.damage import DamageError
from paceline.errors import DataError

_MAX_MEMBERS = 64
_OTHER_BYTES = 1 << 22
_CHUNK_BYTES = 1 << 20


def unpack(archive: Path, files: Sequence[OfficialFile], folder: Path) -> None:
    """Write `files` below `folder`, each under its own name only once its checksum is right.

    Only names from the catalogue are ever written. An archive with a path that leads elsewhere, a
    link, or more than the official files' bytes raises DamageError.
    """
    limit_bytes = sum(file.size_bytes for file in files) + _OTHER_BYTES
    wanted = {file.path: file for file in files}
    try:
        with (
            _Bounded(archive, limit_bytes) as inflated,
            tarfile.open(fileobj=inflated, mode="r|") as members,
        ):
            for count, member in enumerate(members, start=1):
                _refuse_unsafe(archive, member, count)
                file = wanted.pop(member.name, None)
                content = members.extractfile(member) if file is not None else None
                if file is not None and content is not None:
                    _write(archive, content, file, folder)
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise DamageError(archive, f"is not a sound archive ({error})") from None
    except OSError as error:
        raise DataError(
            f"cannot unpack {archive}: {error.filename or folder}: {error.strerror}"
        ) from None
    if wanted:
        raise DamageError(archive, f"lacks {min(wanted)}")


def _refuse_unsafe(archive: Path, member: tarfile.TarInfo, count: int) -> None:
    if count > _MAX_MEMBERS:
        raise DamageError(archive, f"has more than {_MAX_MEMBERS} members")
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise DamageError(archive, f"has the member {member.name!r}, which leads out of its folder")
    if not (member.isreg() or member.isdir()):
        raise DamageError(archive, f"has the member {member.name!r}, which is no plain file")


def _write(archive: Path, content: IO[bytes], file: OfficialFile, folder: Path) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.part")
    try:
        with temporary.open("wb") as output:
            while chunk := content.read(_CHUNK_BYTES):
                output.write(chunk)
            output.flush()
            os.fsync(output.fileno())
        if sha256_of(temporary) != file.sha256:
            raise DamageError(archive, f"holds a {file.path} that is not the official one")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class _Bounded(gzip.GzipFile):
    """Contents that end in DamageError where a bomb would go on."""

    def __init__(self, archive: Path, limit_bytes: int) -> None:
        super().__init__(archive, "rb")
        self._archive, self._left = archive, limit_bytes

    def read(self, size: int | None = -1) -> bytes:
        asked = self._left + 1 if size is None or size < 0 else min(size, self._left + 1)
        data = super().read(asked)
        self._left -= len(data)
        if self._left < 0:
            raise DamageError(self._archive, "holds far more than the official files")
        return data
