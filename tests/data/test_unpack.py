"""Unpacking an archive writes the official files and nothing else."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from paceline.data.download import unpack
from paceline.data.manifest import CorruptFileError, ManifestFile
from tests.support.dataset_files import BOMB_BYTES, cut_positions, peak_below, random_bytes

CONTENT = random_bytes(5000).tobytes()
FILES = [ManifestFile("batches/one", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())]


def archive_of(path: Path, *members: tuple[str | tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_requested_files_are_written(tmp_path: Path) -> None:
    archive = archive_of(
        tmp_path / "a.tar.gz", ("batches/readme.html", b"hello"), ("batches/one", CONTENT)
    )
    unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path / "data") == {"batches/one"}
    assert (tmp_path / "data" / "batches" / "one").read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["../escaped", "batches/../../escaped", "/tmp/escaped-paceline"])
def test_path_outside_the_folder_is_rejected(tmp_path: Path, name: str) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", (name, b"x"), ("batches/one", CONTENT))
    with pytest.raises(CorruptFileError, match="a path outside its folder"):
        unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path) == {"a.tar.gz"}


def test_link_is_rejected(tmp_path: Path) -> None:
    link = tarfile.TarInfo("batches/one")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    archive = archive_of(tmp_path / "a.tar.gz", (link, b""))
    with pytest.raises(CorruptFileError, match="not a regular file"):
        unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path) == {"a.tar.gz"}


def test_file_with_wrong_checksum_is_not_kept(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", ("batches/one", CONTENT[::-1]))
    with pytest.raises(CorruptFileError, match="that differs from the official file"):
        unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path / "data") == set()


def test_missing_member_is_named(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", ("batches/two", CONTENT))
    with pytest.raises(CorruptFileError, match="does not contain batches/one"):
        unpack(archive, FILES, tmp_path / "data")


def test_gzip_bomb_is_rejected(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", ("batches/zeros", bytes(BOMB_BYTES)))
    with (
        peak_below(BOMB_BYTES // 8),
        pytest.raises(CorruptFileError, match="far more data than the official files"),
    ):
        unpack(archive, FILES, tmp_path / "data")


def test_truncated_archive_is_rejected(tmp_path: Path) -> None:
    whole = archive_of(tmp_path / "a.tar.gz", ("batches/one", CONTENT)).read_bytes()
    cut = tmp_path / "cut.tar.gz"
    # Random contents are incompressible, so any cut within their length is within the file.
    for position in cut_positions(len(CONTENT)):
        cut.write_bytes(whole[:position])
        with pytest.raises(CorruptFileError):
            unpack(cut, FILES, tmp_path / "data")


def test_file_that_is_not_an_archive_is_rejected(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(b"not a tar file" * 100))
    with pytest.raises(CorruptFileError, match="not a valid archive"):
        unpack(archive, FILES, tmp_path / "data")
