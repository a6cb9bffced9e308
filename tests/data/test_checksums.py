"""Verification of dataset files and caching of the verdicts."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
from pathlib import Path

import pytest

from paceline.data import checksums
from paceline.data.checksums import VERDICTS_FILE, Verdict, verify_file
from paceline.data.manifest import OFFICIAL_SETS, ManifestFile

CONTENT = b"official" * 1000
FILE = ManifestFile("set/file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").write_bytes(CONTENT)
    return tmp_path


def count_hashing(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    hashed: list[Path] = []
    original = checksums.sha256_of

    def counting(path: Path) -> str:
        hashed.append(path)
        return original(path)

    monkeypatch.setattr(checksums, "sha256_of", counting)
    return hashed


def test_official_file_is_verified(folder: Path) -> None:
    assert verify_file(FILE, folder) is Verdict.OFFICIAL


def test_changed_byte_is_detected(folder: Path) -> None:
    (folder / "set" / "file").write_bytes(b"O" + CONTENT[1:])
    assert verify_file(FILE, folder) is Verdict.OTHER


def test_absent_file_is_reported_missing(folder: Path) -> None:
    (folder / "set" / "file").unlink()
    assert verify_file(FILE, folder) is Verdict.MISSING


def test_unchanged_file_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashing(monkeypatch)
    assert verify_file(FILE, folder) is verify_file(FILE, folder) is Verdict.OFFICIAL
    assert len(hashed) == 1


def test_file_of_wrong_size_is_not_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashing(monkeypatch)
    (folder / "set" / "file").write_bytes(CONTENT + b"x")
    assert verify_file(FILE, folder) is Verdict.OTHER
    assert hashed == []


def test_changed_file_invalidates_cached_verdict(folder: Path) -> None:
    verify_file(FILE, folder)
    path = folder / "set" / "file"
    path.write_bytes(b"O" + CONTENT[1:])
    os.utime(path, ns=(1, 1))
    assert verify_file(FILE, folder) is Verdict.OTHER


def test_rehash_ignores_cached_verdict(folder: Path) -> None:
    verify_file(FILE, folder)
    path = folder / "set" / "file"
    times = path.stat()
    path.write_bytes(b"O" + CONTENT[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert verify_file(FILE, folder, rehash=True) is Verdict.OTHER


@pytest.mark.parametrize("malformed", ["", "[]", "{", '{"set/file": 7}', '{"set/file": [1]}'])
def test_malformed_verdict_cache_is_ignored(folder: Path, malformed: str) -> None:
    (folder / VERDICTS_FILE).write_text(malformed)
    assert verify_file(FILE, folder) is Verdict.OFFICIAL


def test_every_compressed_file_has_a_content_checksum() -> None:
    """A mirror may recompress the official content, which changes the bytes of the file."""
    for official in OFFICIAL_SETS.values():
        for file in official.files:
            if file.path.endswith(".gz"):
                assert len(bytes.fromhex(file.content_sha256 or "")) == 32, file.path


def test_recompressed_file_is_official(tmp_path: Path) -> None:
    original = gzip.compress(CONTENT, compresslevel=9, mtime=0)
    content_sha256 = hashlib.sha256(CONTENT).hexdigest()
    file = ManifestFile(
        "file.gz",
        len(original),
        hashlib.sha256(original).hexdigest(),
        content_sha256=content_sha256,
    )
    (tmp_path / "file.gz").write_bytes(gzip.compress(CONTENT, compresslevel=1, mtime=1))
    assert verify_file(file, tmp_path) is Verdict.OFFICIAL


def test_verdict_without_content_checksum_is_recomputed(tmp_path: Path) -> None:
    original = gzip.compress(CONTENT, compresslevel=9, mtime=0)
    before = ManifestFile("file.gz", len(original), hashlib.sha256(original).hexdigest())
    (tmp_path / "file.gz").write_bytes(gzip.compress(CONTENT, compresslevel=1, mtime=1))
    assert verify_file(before, tmp_path) is Verdict.OTHER
    content_sha256 = hashlib.sha256(CONTENT).hexdigest()
    known = dataclasses.replace(before, content_sha256=content_sha256)
    assert verify_file(known, tmp_path) is Verdict.OFFICIAL


def test_every_file_has_a_checksum_and_an_address() -> None:
    for official in OFFICIAL_SETS.values():
        fetched = (official.archive,) if official.archive else official.files
        assert all(file.addresses for file in fetched)
        assert all(len(bytes.fromhex(file.sha256)) == 32 for file in (*official.files, *fetched))
