"""The checkpoint store survives a killed process and a full disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from paceline.errors import RunError
from paceline.training.checkpoint import CheckpointStore, newest_checkpoint

KILLS = 12
BLOCK_BYTES = 4096
"""Of a tmpfs."""

# One program imports torch once and forks a writer for each line it reads. A writer prints each
# iteration whose checkpoint is on disk.
WRITERS = """
import os, signal, sys
from pathlib import Path
import torch
from paceline.training.checkpoint import CheckpointStore

torch.set_num_threads(1)
for line in sys.stdin:
    folder, mode, first = line.split()
    if pid := os.fork():
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("dead", flush=True)
        continue
    signal.alarm(30)
    store = CheckpointStore(Path(folder), 2, mode)
    for iteration in range(int(first), int(first) + 10000):
        weights = torch.full((300_000,), iteration)
        store.save(iteration, {"iteration": iteration, "weights": weights})
        on_disk = iteration if mode == "sync" else iteration - 1
        if on_disk >= int(first):
            # Not `print`, which may write the end of the line separately.
            os.write(1, f"{on_disk}\\n".encode())
    os._exit(1)
"""


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=40)


def lines_until_dead(output: IO[str]) -> list[int]:
    saved = []
    while (line := output.readline().strip()) != "dead":
        assert line, "the program of the writers exited"
        saved.append(int(line))
    return saved


@pytest.mark.parametrize("mode", ["sync", "background"])
def test_killed_writer_loses_no_saved_checkpoint(
    tmp_path: Path, writers: subprocess.Popen[str], mode: str
) -> None:
    assert writers.stdin is not None
    assert writers.stdout is not None
    moments = random.Random(0)
    first = 0
    for _ in range(KILLS):
        writers.stdin.write(f"{tmp_path} {mode} {first}\n")
        writers.stdin.flush()
        pid = int(writers.stdout.readline())
        saved = [int(writers.stdout.readline())]
        time.sleep(moments.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        saved += lines_until_dead(writers.stdout)

        checkpoint = newest_checkpoint(tmp_path)
        assert checkpoint is not None
        assert checkpoint.warnings == ()
        assert checkpoint.iteration == checkpoint.state["iteration"] >= saved[-1]
        assert torch.all(checkpoint.state["weights"] == checkpoint.iteration)
        first = checkpoint.iteration + 1


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from paceline.errors import RunError
from paceline.training.checkpoint import CheckpointStore, newest_checkpoint

seen = {}
for mode in ("sync", "background"):
    folder = Path(sys.argv[1]) / mode
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    store = CheckpointStore(folder, 1, mode)
    store.save(1, {"weights": torch.ones(1000)})
    store.close()
    try:
        store.save(2, {"weights": torch.ones(1_000_000)})
        store.close()
        message = None
    except RunError as error:
        message = str(error)
    newest = newest_checkpoint(folder)
    seen[mode] = {
        "message": message, "newest": newest.iteration, "warnings": newest.warnings,
        "files": sorted(path.name for path in folder.iterdir()),
    }
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder, and by mode the outcome of a program with a file size limit of 200 kB."""
    folder = tmp_path_factory.mktemp("limited")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)],
        stdout=subprocess.PIPE, text=True, check=True, timeout=100,
    )  # fmt: skip
    return folder, json.loads(done.stdout)


def check_message(message: str, folder: Path, cause: str) -> None:
    assert "\n" not in message
    assert message.startswith(f"cannot write checkpoint {folder}/iteration-00000002.pt: {cause};")
    words = message.split()
    # A million float32 take four million bytes, plus the overhead of the archive.
    assert 4_000_000 < int(words[words.index("needs") + 1]) < 4_100_000
    assert "are free" in message
    assert message.endswith("iteration-00000001.pt is still there")


@pytest.mark.parametrize("mode", ["sync", "background"])
def test_file_size_limit_keeps_the_previous_checkpoint_and_is_a_one_line_error(
    limited: tuple[Path, dict[str, dict[str, Any]]], mode: str
) -> None:
    folder, by_mode = limited
    seen = by_mode[mode]
    check_message(seen.pop("message"), folder / mode, "File too large")
    assert seen == {
        "newest": 1,
        "warnings": [],
        "files": ["iteration-00000001.json", "iteration-00000001.pt"],
    }


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two million bytes."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2000k", "paceline-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def save_and_close(store: CheckpointStore, iteration: int, weights: torch.Tensor) -> None:
    store.save(iteration, {"weights": weights})
    store.close()


@pytest.mark.root
@pytest.mark.parametrize("mode", ["sync", "background"])
def test_full_disk_keeps_the_previous_checkpoint_and_is_a_one_line_error(
    tiny_disk: Path, mode: str
) -> None:
    store = CheckpointStore(tiny_disk, 1, mode)
    save_and_close(store, 1, torch.ones(1000))
    before = sorted(tiny_disk.iterdir())
    with pytest.raises(RunError) as raised:
        save_and_close(store, 2, torch.ones(1_000_000))
    check_message(str(raised.value), tiny_disk, "No space left on device")
    assert sorted(tiny_disk.iterdir()) == before
    newest = store.newest()
    assert newest is not None
    assert newest.iteration == 1


@pytest.mark.root
def test_needed_space_includes_the_checksum_file(tiny_disk: Path) -> None:
    """The free blocks hold the state but not its checksum file."""
    store = CheckpointStore(tiny_disk, 1, "sync")
    save_and_close(store, 1, torch.ones(10_000))
    needed = (tiny_disk / "iteration-00000001.pt").stat().st_size
    blocks = -(-needed // BLOCK_BYTES)
    free = shutil.disk_usage(tiny_disk).free
    (tiny_disk / "filler").write_bytes(bytes(free - blocks * BLOCK_BYTES))
    assert shutil.disk_usage(tiny_disk).free == blocks * BLOCK_BYTES
    with pytest.raises(RunError, match="No space left on device") as raised:
        save_and_close(store, 2, torch.ones(10_000))
    words = str(raised.value).split()
    needed_bytes = int(words[words.index("needs") + 1])
    free_bytes = int(words[words.index("and") + 1])
    assert needed_bytes > free_bytes == blocks * BLOCK_BYTES


@pytest.mark.root
def test_saving_continues_after_disk_space_is_freed(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk, 1, "sync")
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes(1_900_000))
    with pytest.raises(RunError, match="there is no earlier checkpoint"):
        store.save(1, {"weights": torch.ones(100_000)})
    filler.unlink()
    store.save(2, {"weights": torch.ones(100_000)})
    newest = store.newest()
    assert newest is not None
    assert newest.iteration == 2
