"""`paceline data list`, `fetch` and `verify`."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli import data as command
from paceline.data import DATASETS, checksums, download
from paceline.data.download import RetryPolicy
from paceline.data.manifest import CIFAR10, MNIST, SVHN, DatasetManifest, ManifestFile
from paceline.errors import DataError, UnknownNameError
from tests.support.dataset_files import SMALL_MNIST, write_mnist

CONTENTS = {"mnist/one": b"1" * 100, "mnist/two": b"2" * 200}


def official_file(path: str, content: bytes) -> ManifestFile:
    digest = hashlib.sha256(content).hexdigest()
    return ManifestFile(path, len(content), digest, 1, addresses=("http://127.0.0.1/",))


TINY = dataclasses.replace(
    MNIST,
    train=(official_file("mnist/one", CONTENTS["mnist/one"]),),
    test=(official_file("mnist/two", CONTENTS["mnist/two"]),),
)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(words))


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the downloaded files; all files of TINY are available."""
    asked: list[str] = []

    def bring(
        file: ManifestFile, target: Path, watch: object, retry: RetryPolicy | None = None
    ) -> None:
        asked.append(file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(CONTENTS[file.path])

    monkeypatch.setattr(download, "download", bring)
    return asked


def write(folder: Path, contents: dict[str, bytes]) -> None:
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def test_list_shows_every_dataset_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # Paths are not wrapped.
    monkeypatch.chdir(tmp_path)
    assert run("list", "--data-dir", "data") == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = {line.split()[0] for line in lines if line.strip()}
    assert {entry.usage for entry in DATASETS} <= first_words
    assert max(map(len, lines)) <= 80


def test_list_counts_existing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mnist(tmp_path)
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "test_32x32.mat").touch()
    run("list", "--data-dir", str(tmp_path))
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["mnist"].rstrip().endswith(" here")
    assert "1 of 2 here" in rows["svhn"]
    assert "0 of 7 here" in rows["cifar10"]


def test_fetch_downloads_only_missing_files(tmp_path: Path, downloads: list[str]) -> None:
    write(tmp_path, {"mnist/one": CONTENTS["mnist/one"]})
    assert command.fetch_sets([TINY], tmp_path) == 0
    assert downloads == ["mnist/two"]


def test_fetched_files_are_not_hashed_again(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command.fetch_sets([TINY], tmp_path)
    monkeypatch.delattr(checksums, "sha256_of")
    assert command.fetch_sets([TINY], tmp_path) == 0


def test_fetch_keeps_an_unofficial_file(tmp_path: Path, downloads: list[str]) -> None:
    write(tmp_path, {"mnist/one": b"my own"})
    with pytest.raises(DataError, match="mnist/one exists and differs from the official file"):
        command.fetch_sets([TINY], tmp_path)
    assert (tmp_path / "mnist/one").read_bytes() == b"my own"
    assert downloads == []


def test_fetch_with_force_replaces_an_unofficial_file(tmp_path: Path, downloads: list[str]) -> None:
    write(tmp_path, {"mnist/one": b"my own"})
    command.fetch_sets([TINY], tmp_path, force=True)
    assert (tmp_path / "mnist/one").read_bytes() == CONTENTS["mnist/one"]


def archive_set(contents: dict[str, bytes]) -> tuple[DatasetManifest, bytes]:
    """Return TINY as a dataset that is distributed as an archive, and that archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, content in contents.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    blob = packed.getvalue()
    return dataclasses.replace(TINY, archive=official_file("tiny.tar.gz", blob)), blob


def test_fetch_unpacks_and_deletes_a_downloaded_archive(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    official, blob = archive_set(CONTENTS)
    monkeypatch.setitem(CONTENTS, "tiny.tar.gz", blob)
    command.fetch_sets([official], tmp_path)
    assert downloads == ["tiny.tar.gz"]
    assert (tmp_path / "mnist" / "two").read_bytes() == CONTENTS["mnist/two"]
    assert not (tmp_path / "tiny.tar.gz").exists()


def test_fetch_uses_and_keeps_an_existing_archive(tmp_path: Path, downloads: list[str]) -> None:
    official, blob = archive_set(CONTENTS)
    write(tmp_path, {"tiny.tar.gz": blob})
    command.fetch_sets([official], tmp_path)
    assert downloads == []
    assert (tmp_path / "mnist" / "one").read_bytes() == CONTENTS["mnist/one"]
    assert (tmp_path / "tiny.tar.gz").exists()


def test_fetch_prints_terms_of_use(
    tmp_path: Path, downloads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = dataclasses.replace(TINY, terms=SVHN.terms)
    command.fetch_sets([tiny], tmp_path)
    assert "mnist: the authors permit non-commercial use only" in capsys.readouterr().out


def test_verify_reports_official_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, CONTENTS)
    assert command.verify_sets([TINY], tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "mnist: official"


def verify_small_mnist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    loaders = {"mnist": SMALL_MNIST}
    monkeypatch.setattr(DATASETS, "load", loaders.__getitem__)
    return command.verify_sets([SMALL_MNIST.official], folder)


def test_verify_reports_readable_unofficial_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    assert verify_small_mnist(tmp_path, monkeypatch) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "mnist: readable, but not the official bytes"


def test_verify_reports_corrupt_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    os.truncate(path, 100)
    assert verify_small_mnist(tmp_path, monkeypatch) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"mnist: damaged; {path} is truncated: replace it with `paceline data")


def test_verify_reports_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "cifar10", "--data-dir", str(tmp_path)) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  cifar-10-batches-py/data_batch_1: missing"
    assert "paceline data fetch cifar10" in lines[-1]


@pytest.mark.parametrize("action", ["fetch", "verify"])
def test_unknown_names_and_datasets_without_files_are_rejected(tmp_path: Path, action: str) -> None:
    with pytest.raises(DataError, match="digits has no files"):
        run(action, "digits", "--data-dir", str(tmp_path))
    with pytest.raises(UnknownNameError, match="cifar10"):
        run(action, "cifar01", "--data-dir", str(tmp_path))
    with pytest.raises(UnknownNameError, match=r"'nope': choose from mnist, .*, svhn_extra$"):
        run(action, "nope", "--data-dir", str(tmp_path))


def test_failed_download_raises_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    nowhere: Sequence[ManifestFile] = [
        dataclasses.replace(file, addresses=("http://127.0.0.1:1/",)) for file in TINY.train
    ]
    unreachable = dataclasses.replace(TINY, train=tuple(nowhere))
    with pytest.raises(DataError, match=r"cannot download one: .*unreachable"):
        command.fetch_sets(
            [unreachable], tmp_path, retry=RetryPolicy(fruitless_attempts=1, pause_seconds=0)
        )


def test_failed_download_explains_manual_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert CIFAR10.archive is not None
    nowhere = dataclasses.replace(CIFAR10.archive, addresses=("http://127.0.0.1:1/",))
    with pytest.raises(DataError) as caught:
        command.fetch_sets(
            [dataclasses.replace(CIFAR10, archive=nowhere)],
            tmp_path,
            retry=RetryPolicy(fruitless_attempts=1, pause_seconds=0),
        )
    line = str(caught.value)
    assert f"put {nowhere.path} manually into {tmp_path} " in line
    assert "--data-dir or PACELINE_DATA" in line
    assert "`paceline data verify cifar10`" in line
    assert "\n" not in line


def test_cifar10_is_downloaded_as_one_archive() -> None:
    assert CIFAR10.archive is not None
    assert CIFAR10.download_bytes == CIFAR10.archive.size_bytes
