"""Fetch an official file: resumed where it broke off, checked, and in place only when whole.

What has arrived is kept as `NAME.part`. All addresses of a file serve the same bytes, so that a
part from one can be continued from another; the checksum decides in the end.
"""

from __future__ import annotations

import errno
import fcntl
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.data.catalogue import OfficialFile
from paceline.data.checksums import sha256_of
from paceline.errors import DataError

Watcher = Callable[[int], None]
"""Is told how many bytes of the file are there."""

_CHUNK_BYTES = 1 << 18
# Room that a download leaves on the disk for everything else.
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an address is tried before the next one is."""

    timeout_seconds: float = 30.0
    fruitless_attempts: int = 4
    """In a row; one that brought bytes does not count."""
    attempts: int = 200
    pause_seconds: float = 1.0
    """Before the second attempt; doubled for each further one."""


class NowhereError(DataError):
    """No address has the file, or there is no way to any of them."""


class _AddressError(Exception):
    """This address will not do; the next one may."""


class _BrokenError(Exception):
    """A try that may go better when repeated."""


def download(
    file: OfficialFile, target: Path, watch: Watcher, patience: Patience | None = None
) -> None:
    """Bring an official file to `target`; NowhereError in one line where no address has it."""
    patience = patience or Patience()
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
    raise NowhereError(f"could not fetch {target.name}: {'; '.join(failures)}")


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
    file: OfficialFile,
    output: BinaryIO,
    part: Path,
    watch: Watcher,
    patience: Patience,
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
