"""Verify dataset files against their official checksums.

To avoid hashing gigabytes at the start of every run, verdicts are cached in a small file in the
data folder together with the size and modification time of each file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path

from paceline.data.manifest import ManifestFile

VERDICTS_FILE = ".paceline-verdicts.json"
_CHUNK_BYTES = 1 << 20
# Far above the content of any official file; stops gzip bombs.
_CONTENT_LIMIT_BYTES = 1 << 26


class Verdict(Enum):
    OFFICIAL = "official"
    OTHER = "not the official bytes"
    MISSING = "missing"


def verify_file(file: ManifestFile, folder: Path, *, rehash: bool = False) -> Verdict:
    """Return the verdict on one file; `rehash` ignores cached verdicts."""
    path = folder / file.path
    if not path.is_file():
        return Verdict.MISSING
    fingerprint = _fingerprint(file, path)
    entry = _read_verdicts(folder).get(file.path)
    if not rehash and isinstance(entry, list) and entry[:-1] == fingerprint:
        return Verdict.OFFICIAL if entry[-1] is True else Verdict.OTHER
    official = _is_official(file, path)
    _store_verdict(file, folder, fingerprint, official)
    return Verdict.OFFICIAL if official else Verdict.OTHER


def mark_official(file: ManifestFile, folder: Path) -> None:
    """Cache the verdict for a file that has just been verified."""
    _store_verdict(file, folder, _fingerprint(file, folder / file.path), True)


def _fingerprint(file: ManifestFile, path: Path) -> list[object]:
    """Return a value that changes when the file changes; a cached verdict is valid only for it."""
    status = path.stat()
    return [file.sha256, file.content_sha256, status.st_size, status.st_mtime_ns]


def _store_verdict(
    file: ManifestFile, folder: Path, fingerprint: list[object], official: bool
) -> None:
    _write_verdicts(folder, {**_read_verdicts(folder), file.path: [*fingerprint, official]})


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_official(file: ManifestFile, path: Path) -> bool:
    if path.stat().st_size == file.size_bytes and sha256_of(path) == file.sha256:
        return True
    return file.content_sha256 is not None and _content_sha256(path) == file.content_sha256


def _content_sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    total_bytes = 0
    try:
        with gzip.open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                total_bytes += len(chunk)
                if total_bytes > _CONTENT_LIMIT_BYTES:
                    return None
                digest.update(chunk)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return None
    return digest.hexdigest()


def _read_verdicts(folder: Path) -> dict[str, object]:
    try:
        value = json.loads((folder / VERDICTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_verdicts(folder: Path, verdicts: Mapping[str, object]) -> None:
    # If the folder is not writable, the only cost is hashing again next time.
    temporary = folder / f"{VERDICTS_FILE}.{os.getpid()}"
    with suppress(OSError):
        try:
            temporary.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
            temporary.replace(folder / VERDICTS_FILE)
        finally:
            temporary.unlink(missing_ok=True)
