"""Take the official files, and nothing else, out of a fetched archive.

Fetch an official file: resumed where it broke off, checked, and in place only when whole.

What has arrived is kept as `NAME.part`. All addresses of a file serve the same bytes, so that a
part from one can be continued from another; the checksum decides in the end.

Fetch all files of a dataset that are not there yet."""

from __future__ import annotations

import errno
import fcntl
import gzip
import http.client
import os
import re
import shutil
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

from paceline.data.checksums import Verdict, keep_official, sha256_of, verify_file
from paceline.data.manifest import FOLDER_VARIABLE, CorruptFileError, DatasetManifest, ManifestFile
from paceline.errors import DataError

_MAX_MEMBERS = 64
_OTHER_BYTES = 1 << 22
_UNPACK_CHUNK_BYTES = 1 << 20


def unpack(archive: Path, files: Sequence[ManifestFile], folder: Path) -> None:
    """Write `files` below `folder`, each under its own name only once its checksum is right.

    Only names from the catalogue are ever written. An archive with a path that leads elsewhere, a
    link, or more than the official files' bytes raises CorruptFileError.
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
                    _write_member(archive, content, file, folder)
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise CorruptFileError(archive, f"is not a sound archive ({error})") from None
    except OSError as error:
        raise DataError(
            f"cannot unpack {archive}: {error.filename or folder}: {error.strerror}"
        ) from None
    if wanted:
        raise CorruptFileError(archive, f"lacks {min(wanted)}")


def _refuse_unsafe(archive: Path, member: tarfile.TarInfo, count: int) -> None:
    if count > _MAX_MEMBERS:
        raise CorruptFileError(archive, f"has more than {_MAX_MEMBERS} members")
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise CorruptFileError(
            archive, f"has the member {member.name!r}, which leads out of its folder"
        )
    if not (member.isreg() or member.isdir()):
        raise CorruptFileError(archive, f"has the member {member.name!r}, which is no plain file")


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
            raise CorruptFileError(archive, f"holds a {file.path} that is not the official one")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class _Bounded(gzip.GzipFile):
    """Contents that end in CorruptFileError where a bomb would go on."""

    def __init__(self, archive: Path, limit_bytes: int) -> None:
        super().__init__(archive, "rb")
        self._archive, self._left = archive, limit_bytes

    def read(self, size: int | None = -1) -> bytes:
        asked = self._left + 1 if size is None or size < 0 else min(size, self._left + 1)
        data = super().read(asked)
        self._left -= len(data)
        if self._left < 0:
            raise CorruptFileError(self._archive, "holds far more than the official files")
        return data


Watcher = Callable[[int], None]
"""Is told how many bytes of the file are there."""

_CHUNK_BYTES = 1 << 18
# Room that a download leaves on the disk for everything else.
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long an address is tried before the next one is."""

    timeout_seconds: float = 30.0
    fruitless_attempts: int = 4
    """In a row; one that brought bytes does not count."""
    attempts: int = 200
    pause_seconds: float = 1.0
    """Before the second attempt; doubled for each further one."""


class DownloadError(DataError):
    """No address has the file, or there is no way to any of them."""


class _AddressError(Exception):
    """This address will not do; the next one may."""


class _BrokenError(Exception):
    """A try that may go better when repeated."""


def download(
    file: ManifestFile, target: Path, watch: Watcher, patience: RetryPolicy | None = None
) -> None:
    """Bring an official file to `target`; DownloadError in one line where no address has it."""
    patience = patience or RetryPolicy()
    part = target.with_name(target.name + ".part")
    failures = []
    try:
        with _opened_alone(part) as output:
            _refuse_without_room(part, file.size_bytes - _size(output))
            for address in file.addresses:
                try:
                    _download_from(address, file, output, part, watch, patience)
                except _AddressError as failure:
                    failures.append(f"{address}: {failure}")
                    continue
                output.flush()
                os.fsync(output.fileno())
                part.replace(target)
                return
    except OSError as error:
        raise DataError(_cannot_write(part, error)) from None
    raise DownloadError(f"could not fetch {target.name}: {'; '.join(failures)}")


@contextmanager
def _opened_alone(part: Path) -> Iterator[BinaryIO]:
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{part} is being written by another process: wait for it") from None
        yield output
    if part.exists() and not part.stat().st_size:
        part.unlink()


def _refuse_without_room(part: Path, missing_bytes: int) -> None:
    free_bytes = shutil.disk_usage(part.parent).free
    if free_bytes < missing_bytes + _SPARE_BYTES:
        raise DataError(
            f"the disk of {part.parent} has {free_bytes >> 20} MiB free where "
            f"{missing_bytes + _SPARE_BYTES >> 20} MiB are needed: make room, or give --data-dir"
        )


def _cannot_write(part: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk of {part.parent} is full: make room, and fetch again to go on"
    return f"cannot write {part}: {error.strerror or error}; give another --data-dir"


def _download_from(
    address: str,
    file: ManifestFile,
    output: BinaryIO,
    part: Path,
    watch: Watcher,
    patience: RetryPolicy,
) -> None:
    """Fill `output` from one address, until it is the official file."""
    fruitless = 0
    cause = ""
    for _ in range(patience.attempts):
        before = _size(output)
        if before > file.size_bytes:
            output.truncate(0)
            before = 0
        try:
            if before < file.size_bytes:
                _receive(address, file.size_bytes, output, watch, patience.timeout_seconds)
        except _BrokenError as broken:
            cause = str(broken)
        if _size(output) == file.size_bytes:
            if sha256_of(part) == file.sha256:
                return
            output.truncate(0)
            if not before:
                raise _AddressError("serves other bytes than the official ones")
            # The part that was there before may have been the wrong one: once more, from the start.
            continue
        fruitless = 0 if _size(output) > before else fruitless + 1
        if fruitless >= patience.fruitless_attempts:
            raise _AddressError(cause)
        time.sleep(patience.pause_seconds * 2**fruitless / 2)
    raise _AddressError(f"gave up after {patience.attempts} attempts ({cause})")


def _receive(
    address: str, size_bytes: int, output: BinaryIO, watch: Watcher, timeout_seconds: float
) -> None:
    """Append what is missing, or start anew where the server sends the whole file regardless."""
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
            raise _AddressError("resumes at the wrong place")
        announced = reply.headers.get("Content-Length", "")
        if announced.isdigit() and start + int(announced) != size_bytes:
            raise _AddressError(f"has {start + int(announced)} bytes, not {size_bytes}")
        while chunk := reply.read1(_CHUNK_BYTES):
            start += len(chunk)
            if start > size_bytes:
                output.truncate(0)
                raise _AddressError(f"has more than {size_bytes} bytes")
            _write(output, chunk)
            watch(start)
    if start < size_bytes:
        raise _BrokenError("the connection broke off")


class _DiskError(Exception):
    """Carries an error of the disk past the handling of the network's, which is also OSError."""

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
    except _DiskError as failed:
        raise failed.error from None
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            output.truncate(0)
        elif error.code < 500 and error.code not in (408, 429):
            raise _AddressError(f"answers {error.code} {error.reason}") from None
        raise _BrokenError(f"answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise _BrokenError(f"cannot be reached ({error.reason})") from None
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"the connection broke off ({type(error).__name__})") from None


def _size(output: BinaryIO) -> int:
    return os.fstat(output.fileno()).st_size


FetchWatcher = Callable[[str, int, int], None]
"""Is told a file's name, how many of its bytes are there, and how many there will be."""


def fetch(
    official: DatasetManifest,
    folder: Path,
    watch: FetchWatcher,
    *,
    force: bool = False,
    patience: RetryPolicy | None = None,
) -> int:
    """Bring a set's files to `folder`; returns how many were not official before.

    A file that is there and is not the official one is replaced only with `force`: it may be the
    only copy of somebody's own version.
    """
    try:
        verdicts = {file: verify_file(file, folder) for file in official.files}
    except OSError as error:
        raise DataError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    others = [file.path for file, verdict in verdicts.items() if verdict is Verdict.OTHER]
    if others and not force:
        raise DataError(
            f"{folder / others[0]} is there and is not the official file: "
            "--force replaces it, `paceline data verify` tells whether it can be read"
        )
    needed = [file for file, verdict in verdicts.items() if verdict is not Verdict.OFFICIAL]

    def bring(file: ManifestFile) -> Path:
        target = folder / file.path
        try:
            download(file, target, lambda done: watch(target.name, done, file.size_bytes), patience)
        except DownloadError as error:
            raise DataError(f"{error}; {_by_hand(official, folder)}") from None
        return target

    if needed and official.archive is not None:
        _from_archive(official.archive, needed, folder, bring)
    else:
        for file in needed:
            bring(file)
    for file in needed:
        keep_official(file, folder)
    return len(needed)


def _by_hand(official: DatasetManifest, folder: Path) -> str:
    """What whoever has no network can do."""
    where = f"by hand into {folder} (or set --data-dir or {FOLDER_VARIABLE})"
    check = f"`paceline data verify {official.name}`"
    if official.archive is None:
        names = ", ".join(file.path for file in official.files)
        return f"put {names} {where} and run {check}"
    again = f"`paceline data fetch {official.name}`, which unpacks it"
    return f"put {official.archive.path} {where} and run {again}, then {check}"


def _from_archive(
    archive: ManifestFile,
    needed: list[ManifestFile],
    folder: Path,
    bring: Callable[[ManifestFile], Path],
) -> None:
    path = folder / archive.path
    ours = verify_file(archive, folder) is not Verdict.OFFICIAL
    if ours:
        bring(archive)
    try:
        unpack(path, needed, folder)
    except CorruptFileError as damage:
        raise DataError(f"{damage}: delete it and fetch again") from None
    # An archive that somebody put there stays; one fetched for this has done its work.
    if ours:
        path.unlink(missing_ok=True)
