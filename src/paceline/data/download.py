"""Download the official files of a dataset: resume, retry, verify and unpack.

A partial download is kept as `NAME.part` and resumed by the next attempt. All addresses of a file
serve the same bytes, so a partial file from one address can be continued from another; the checksum
of the complete file decides. A file gets its final name only after verification.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import http.client
import os
import re
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from paceline.data.checksums import Verdict, mark_official, sha256_of, verify_file
from paceline.data.manifest import (
    FOLDER_VARIABLE,
    CorruptFileError,
    DatasetManifest,
    ManifestFile,
    check_free_space,
)
from paceline.errors import DataError

ProgressCallback = Callable[[str, int, int], None]
"""Receives a file name, the number of its bytes on disk, and its total size in bytes."""

_CHUNK_BYTES = 1 << 18
_SPARE_BYTES = 64 << 20
"""Disk space that a download leaves free."""
_MAX_MEMBERS = 64
_MAX_EXTRA_BYTES = 1 << 22
_UNPACK_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to retry an address and when to move on to the next one."""

    timeout_seconds: float = 30.0
    fruitless_attempts: int = 4
    """Maximum number of consecutive attempts without progress."""
    attempts: int = 200
    pause_seconds: float = 1.0
    """Before the second attempt; doubles with each further attempt without progress."""


class DownloadError(DataError):
    """No address is reachable and serves the official file."""


def fetch(
    official: DatasetManifest,
    folder: Path,
    on_progress: ProgressCallback,
    *,
    force: bool = False,
    retry: RetryPolicy | None = None,
) -> int:
    """Download the files of a dataset that are missing; returns the number of downloaded files.

    An existing file that differs from the official one is replaced only with `force`, because it
    may be the only copy of a modified version.
    """
    try:
        verdicts = {file: verify_file(file, folder) for file in official.files}
    except OSError as error:
        raise DataError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    others = [file.path for file, verdict in verdicts.items() if verdict is Verdict.OTHER]
    if others and not force:
        raise DataError(
            f"{folder / others[0]} exists and differs from the official file: "
            "replace it with --force, or check with `paceline data verify` if it is readable"
        )
    needed = [file for file, verdict in verdicts.items() if verdict is not Verdict.OFFICIAL]

    def download_file(file: ManifestFile) -> Path:
        target = folder / file.path
        try:
            download(file, target, on_progress, retry)
        except DownloadError as error:
            raise DataError(f"{error}; {_manual_instructions(official, folder)}") from None
        return target

    if needed and official.archive is not None:
        _fetch_from_archive(official.archive, needed, folder, download_file)
    else:
        for file in needed:
            download_file(file)
    for file in needed:
        mark_official(file, folder)
    return len(needed)


def _manual_instructions(official: DatasetManifest, folder: Path) -> str:
    """Return instructions for a machine without network access."""
    where = f"manually into {folder} (or set --data-dir or {FOLDER_VARIABLE})"
    check = f"`paceline data verify {official.name}`"
    if official.archive is None:
        names = ", ".join(file.path for file in official.files)
        return f"put {names} {where} and run {check}"
    unpacking = f"`paceline data fetch {official.name}` to unpack it"
    return f"put {official.archive.path} {where} and run {unpacking}, then {check}"


def _fetch_from_archive(
    archive: ManifestFile,
    needed: list[ManifestFile],
    folder: Path,
    download_file: Callable[[ManifestFile], Path],
) -> None:
    path = folder / archive.path
    is_downloaded = verify_file(archive, folder) is not Verdict.OFFICIAL
    if is_downloaded:
        download_file(archive)
    try:
        unpack(path, needed, folder)
    except CorruptFileError as error:
        raise DataError(f"{error}: delete it and fetch again") from None
    # Keep an archive that the user put there; delete one that was downloaded only for unpacking.
    if is_downloaded:
        path.unlink(missing_ok=True)


class _AddressError(Exception):
    """This address does not serve the file; try the next one."""


class _TransientError(Exception):
    """An attempt failed and may succeed when repeated."""


def download(
    file: ManifestFile,
    target: Path,
    on_progress: ProgressCallback,
    retry: RetryPolicy | None = None,
) -> None:
    """Download a file to `target`; raises DownloadError if no address serves the official file."""
    retry = retry or RetryPolicy()
    part = target.with_name(target.name + ".part")
    failures = []

    def report(done_bytes: int) -> None:
        on_progress(target.name, done_bytes, file.size_bytes)

    try:
        with _open_exclusive(part) as output:
            needed_bytes = file.size_bytes - _size(output) + _SPARE_BYTES
            check_free_space(part.parent, needed_bytes, "free disk space or use another --data-dir")
            for address in file.addresses:
                try:
                    _download_from(address, file, output, part, report, retry)
                except _AddressError as failure:
                    failures.append(f"{address}: {failure}")
                    continue
                output.flush()
                os.fsync(output.fileno())
                part.replace(target)
                return
    except OSError as error:
        raise DataError(_write_error(part, error)) from None
    raise DownloadError(f"cannot download {target.name}: {'; '.join(failures)}")


@contextmanager
def _open_exclusive(part: Path) -> Iterator[BinaryIO]:
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process is writing {part}: wait for it to finish") from None
        yield output
    if part.exists() and not part.stat().st_size:
        part.unlink()


def _write_error(part: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"no space left in {part.parent}: free disk space and fetch again to resume"
    return f"cannot write {part}: {error.strerror or error}; use another --data-dir"


def _download_from(
    address: str,
    file: ManifestFile,
    output: BinaryIO,
    part: Path,
    report: Callable[[int], None],
    retry: RetryPolicy,
) -> None:
    """Download from one address into `output` until the checksum matches."""
    fruitless = 0
    cause = ""
    for _ in range(retry.attempts):
        before = _size(output)
        if before > file.size_bytes:
            output.truncate(0)
            before = 0
        try:
            if before < file.size_bytes:
                _receive(address, file.size_bytes, output, report, retry.timeout_seconds)
        except _TransientError as error:
            cause = str(error)
        if _size(output) == file.size_bytes:
            if sha256_of(part) == file.sha256:
                return
            output.truncate(0)
            if not before:
                raise _AddressError("serves a file with a wrong checksum")
            # The earlier partial file may have been wrong: start over.
            continue
        fruitless = 0 if _size(output) > before else fruitless + 1
        if fruitless >= retry.fruitless_attempts:
            raise _AddressError(cause)
        time.sleep(retry.pause_seconds * 2**fruitless / 2)
    raise _AddressError(f"gave up after {retry.attempts} attempts ({cause})")


def _receive(
    address: str,
    size_bytes: int,
    output: BinaryIO,
    report: Callable[[int], None],
    timeout_seconds: float,
) -> None:
    """Append the missing bytes, or start over if the server ignores the requested range."""
    start = _size(output)
    request = urllib.request.Request(address, headers={"User-Agent": "paceline"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with _network_errors(output), urllib.request.urlopen(request, timeout=timeout_seconds) as reply:
        if reply.status != http.client.PARTIAL_CONTENT:
            if start:
                output.truncate(0)
            start = 0
        elif not re.match(rf"bytes {start}-", reply.headers.get("Content-Range", "")):
            raise _AddressError("resumes at the wrong offset")
        announced = reply.headers.get("Content-Length", "")
        if announced.isdigit() and start + int(announced) != size_bytes:
            raise _AddressError(f"serves {start + int(announced)} bytes, expected {size_bytes}")
        while chunk := reply.read1(_CHUNK_BYTES):
            start += len(chunk)
            if start > size_bytes:
                output.truncate(0)
                raise _AddressError(f"serves more than {size_bytes} bytes")
            _write(output, chunk)
            report(start)
    if start < size_bytes:
        raise _TransientError("connection lost")


class _DiskError(Exception):
    """Wraps a disk error, to tell it from a network error, which is also an OSError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _write(output: BinaryIO, chunk: bytes) -> None:
    try:
        output.write(chunk)
        output.flush()
    except OSError as error:
        raise _DiskError(error) from None


@contextmanager
def _network_errors(output: BinaryIO) -> Iterator[None]:
    try:
        yield
    except _DiskError as wrapped:
        raise wrapped.error from None
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            output.truncate(0)
        elif error.code < 500 and error.code not in (408, 429):
            raise _AddressError(f"returned HTTP {error.code} {error.reason}") from None
        raise _TransientError(f"returned HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise _TransientError(f"unreachable ({error.reason})") from None
    except (OSError, http.client.HTTPException) as error:
        raise _TransientError(f"connection lost ({type(error).__name__})") from None


def _size(output: BinaryIO) -> int:
    return os.fstat(output.fileno()).st_size


def unpack(archive: Path, files: Sequence[ManifestFile], folder: Path) -> None:
    """Extract `files` into `folder`; each gets its final name only after its checksum matches.

    Only files from the manifest are written. Raises CorruptFileError if the archive contains a path
    outside its folder, a link, or much more data than the official files.
    """
    limit_bytes = sum(file.size_bytes for file in files) + _MAX_EXTRA_BYTES
    wanted = {file.path: file for file in files}
    try:
        with (
            _BoundedGzipFile(archive, limit_bytes) as inflated,
            tarfile.open(fileobj=inflated, mode="r|") as members,
        ):
            for count, member in enumerate(members, start=1):
                _check_member(archive, member, count)
                file = wanted.pop(member.name, None)
                content = members.extractfile(member) if file is not None else None
                if file is not None and content is not None:
                    _write_member(archive, content, file, folder)
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise CorruptFileError(archive, f"is not a valid archive ({error})") from None
    except OSError as error:
        raise DataError(
            f"cannot unpack {archive}: {error.filename or folder}: {error.strerror}"
        ) from None
    if wanted:
        raise CorruptFileError(archive, f"does not contain {min(wanted)}")


def _check_member(archive: Path, member: tarfile.TarInfo, count: int) -> None:
    if count > _MAX_MEMBERS:
        raise CorruptFileError(archive, f"contains more than {_MAX_MEMBERS} members")
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise CorruptFileError(archive, f"contains {member.name!r}, a path outside its folder")
    if not (member.isreg() or member.isdir()):
        raise CorruptFileError(archive, f"contains {member.name!r}, which is not a regular file")


def _write_member(archive: Path, content: IO[bytes], file: ManifestFile, folder: Path) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.part")
    try:
        with temporary.open("wb") as output:
            while chunk := content.read(_UNPACK_CHUNK_BYTES):
                output.write(chunk)
            output.flush()
            os.fsync(output.fileno())
        if sha256_of(temporary) != file.sha256:
            raise CorruptFileError(
                archive, f"contains a {file.path} that differs from the official file"
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class _BoundedGzipFile(gzip.GzipFile):
    """Raises CorruptFileError if the content is larger than `limit_bytes` (a gzip bomb)."""

    def __init__(self, archive: Path, limit_bytes: int) -> None:
        super().__init__(archive, "rb")
        self._archive, self._left = archive, limit_bytes

    def read(self, size: int | None = -1) -> bytes:
        limit = self._left + 1 if size is None or size < 0 else min(size, self._left + 1)
        data = super().read(limit)
        self._left -= len(data)
        if self._left < 0:
            raise CorruptFileError(self._archive, "contains far more data than the official files")
        return data
