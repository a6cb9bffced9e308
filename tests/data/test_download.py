"""Downloads from well-behaved and faulty HTTP servers on the local machine."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from paceline.data.download import RetryPolicy, download
from paceline.data.manifest import ManifestFile
from paceline.errors import DataError
from tests.support.dataset_files import random_bytes

CONTENT = random_bytes(1 << 20).tobytes()
HALF = len(CONTENT) // 2
SHA256 = hashlib.sha256(CONTENT).hexdigest()
QUICK = RetryPolicy(timeout_seconds=5, fruitless_attempts=2, attempts=5, pause_seconds=0)


class Handler(BaseHTTPRequestHandler):
    """The path selects the behavior; the server records the Range header of each request."""

    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append((self.path, wanted))
        behavior = getattr(self, "serve_" + self.path.strip("/"))
        behavior(int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else None)

    def send(self, content: bytes, start: int | None, announced: int | None = None) -> None:
        self.send_response(200 if start is None else 206)
        if start is not None:
            last = len(CONTENT) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(CONTENT)}")
        if announced is not None:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        self.wfile.write(content)

    def serve_whole(self, start: int | None) -> None:
        rest = CONTENT[start or 0 :]
        self.send(rest, start, len(rest))

    def serve_breaking(self, start: int | None) -> None:
        """Closes the connection halfway and serves the rest when resumed."""
        rest = CONTENT[start or 0 :]
        self.send(rest if start else rest[:HALF], start, len(rest))

    def serve_without_ranges(self, start: int | None) -> None:
        self.send(CONTENT, None, len(CONTENT))

    def serve_breaking_without_ranges(self, start: int | None) -> None:
        self.send(CONTENT if len(self.server.requests) > 1 else CONTENT[:HALF], None, len(CONTENT))

    def serve_wrong(self, start: int | None) -> None:
        rest = CONTENT[::-1][start or 0 :]
        self.send(rest, start, len(rest))

    def serve_endless(self, start: int | None) -> None:
        self.send(CONTENT + b"x", start)

    def serve_smaller(self, start: int | None) -> None:
        self.send(CONTENT[:HALF], start, HALF)

    def serve_missing(self, start: int | None) -> None:
        self.send_error(404)

    def serve_busy(self, start: int | None) -> None:
        if len(self.server.requests) > 1:
            self.serve_whole(start)
        else:
            self.send_error(503)

    def serve_misplaced(self, start: int | None) -> None:
        self.send(CONTENT[:HALF], 0 if start else None, HALF if start else len(CONTENT))

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None]] = []

    def file(self, *behaviors: str) -> ManifestFile:
        addresses = tuple(f"http://127.0.0.1:{self.server_port}/{name}" for name in behaviors)
        return ManifestFile("file", len(CONTENT), SHA256, addresses=addresses)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetch(file: ManifestFile, folder: Path) -> bytes:
    target = folder / "deep" / "file"
    download(file, target, lambda *_: None, QUICK)
    assert not target.with_name("file.part").exists()
    return target.read_bytes()


def part_with(folder: Path, content: bytes) -> Path:
    part = folder / "deep" / "file.part"
    part.parent.mkdir()
    part.write_bytes(content)
    return part


def test_file_is_downloaded_completely(server: Server, tmp_path: Path) -> None:
    assert fetch(server.file("whole"), tmp_path) == CONTENT


def test_interrupted_download_is_resumed(server: Server, tmp_path: Path) -> None:
    assert fetch(server.file("breaking"), tmp_path) == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, f"bytes={HALF}-"]


def test_partial_file_of_an_earlier_run_is_resumed(server: Server, tmp_path: Path) -> None:
    part_with(tmp_path, CONTENT[:1000])
    assert fetch(server.file("whole"), tmp_path) == CONTENT
    assert server.requests == [("/whole", "bytes=1000-")]


def test_complete_partial_file_needs_no_request(server: Server, tmp_path: Path) -> None:
    part_with(tmp_path, CONTENT)
    assert fetch(server.file("whole"), tmp_path) == CONTENT
    assert server.requests == []


def test_server_that_ignores_ranges_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    part_with(tmp_path, CONTENT[:1000])
    assert fetch(server.file("without_ranges"), tmp_path) == CONTENT
    assert len(server.requests) == 1


def test_interruption_without_range_support_starts_over(server: Server, tmp_path: Path) -> None:
    assert fetch(server.file("breaking_without_ranges"), tmp_path) == CONTENT


def test_corrupt_partial_file_is_discarded(server: Server, tmp_path: Path) -> None:
    part_with(tmp_path, b"wrong" * 100)
    assert fetch(server.file("whole"), tmp_path) == CONTENT
    assert [wanted for _, wanted in server.requests] == ["bytes=500-", None]


def test_oversized_partial_file_is_discarded(server: Server, tmp_path: Path) -> None:
    part_with(tmp_path, CONTENT + b"x")
    assert fetch(server.file("whole"), tmp_path) == CONTENT


@pytest.mark.parametrize("first", ["missing", "wrong", "smaller", "endless"])
def test_next_address_is_tried_after_a_failure(server: Server, tmp_path: Path, first: str) -> None:
    assert fetch(server.file(first, "whole"), tmp_path) == CONTENT


def test_unreachable_address_is_skipped(server: Server, tmp_path: Path) -> None:
    file = server.file("whole")
    # Port 1 is reserved and closed.
    nobody = ManifestFile(
        "file", len(CONTENT), SHA256, addresses=("http://127.0.0.1:1/", *file.addresses)
    )
    assert fetch(nobody, tmp_path) == CONTENT


def test_busy_server_is_retried(server: Server, tmp_path: Path) -> None:
    assert fetch(server.file("busy"), tmp_path) == CONTENT


@pytest.mark.parametrize(
    ("behavior", "cause"),
    [
        ("missing", "returned HTTP 404"),
        ("wrong", "wrong checksum"),
        ("smaller", f"serves {HALF} bytes, expected {len(CONTENT)}"),
        ("endless", f"more than {len(CONTENT)} bytes"),
    ],
)
def test_download_error_is_one_line_with_the_cause(
    server: Server, tmp_path: Path, behavior: str, cause: str
) -> None:
    with pytest.raises(DataError, match=cause) as caught:
        fetch(server.file(behavior), tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "deep" / "file").exists()


def test_partial_file_is_kept_after_a_failure(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="resumes at the wrong offset"):
        fetch(server.file("misplaced"), tmp_path)
    assert (tmp_path / "deep" / "file.part").read_bytes() == CONTENT[:HALF]


def test_progress_reaches_the_file_size(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    target = tmp_path / "file"
    download(server.file("breaking"), target, lambda *progress: seen.append(progress), QUICK)
    assert seen == sorted(seen)
    assert seen[-1] == ("file", len(CONTENT), len(CONTENT))


def test_insufficient_disk_space_fails_before_the_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match=r"has 1\.0 MB free but needs 68"):
        fetch(server.file("whole"), tmp_path)
    assert server.requests == []


def test_full_disk_is_a_one_line_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=f"no space left in {tmp_path / 'deep'}"):
        fetch(server.file("whole"), tmp_path)


def test_folder_that_cannot_be_created_is_a_one_line_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot write .*use another --data-dir"):
        fetch(server.file("whole"), tmp_path)


def test_concurrent_downloads_of_one_file_are_rejected(server: Server, tmp_path: Path) -> None:
    part = part_with(tmp_path, b"")
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is writing"):
            fetch(server.file("whole"), tmp_path)
