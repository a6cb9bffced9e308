"""Unpacking an archive writes the official files and nothing else, anywhere."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest
from synthetic_sets import BOMB_BYTES, cut_positions, peak_below, random_bytes

from paceline.data.download import unpack
from paceline.data.manifest import CorruptFileError, ManifestFile

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


def test_only_the_files_asked_for_are_written(tmp_path: Path) -> None:
    archive = archive_of(
        tmp_path / "a.tar.gz", ("batches/readme.html", b"hello"), ("batches/one", CONTENT)
    )
    unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path / "data") == {"batches/one"}
    assert (tmp_path / "data" / "batches" / "one").read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["../escaped", "batches/../../escaped", "/tmp/escaped-paceline"])
def test_a_member_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", (name, b"x"), ("batches/one", CONTENT))
    with pytest.raises(CorruptFileError, match="leads out of its folder"):
        unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path) == {"a.tar.gz"}


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("batches/one")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    archive = archive_of(tmp_path / "a.tar.gz", (link, b""))
    with pytest.raises(CorruptFileError, match="no plain file"):
        unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path) == {"a.tar.gz"}


def test_other_contents_are_not_put_in_place(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", ("batches/one", CONTENT[::-1]))
    with pytest.raises(CorruptFileError, match="not the official one"):
        unpack(archive, FILES, tmp_path / "data")
    assert files_below(tmp_path / "data") == set()


def test_a_lacking_file_is_named(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", ("batches/two", CONTENT))
    with pytest.raises(CorruptFileError, match="lacks batches/one"):
        unpack(archive, FILES, tmp_path / "data")


def test_a_bomb_is_given_up_on(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", ("batches/zeros", bytes(BOMB_BYTES)))
    with (
        peak_below(BOMB_BYTES // 8),
        pytest.raises(CorruptFileError, match="far more than the official files"),
    ):
        unpack(archive, FILES, tmp_path / "data")


def test_an_archive_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    whole = archive_of(tmp_path / "a.tar.gz", ("batches/one", CONTENT)).read_bytes()
    cut = tmp_path / "cut.tar.gz"
    # Random contents do not deflate: a cut within their length is one within the file.
    for position in cut_positions(len(CONTENT)):
        cut.write_bytes(whole[:position])
        with pytest.raises(CorruptFileError):
            unpack(cut, FILES, tmp_path / "data")


def test_no_archive_at_all_is_damage(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(b"not a tar file" * 100))
    with pytest.raises(CorruptFileError, match="not a sound archive"):
        unpack(archive, FILES, tmp_path / "data")
