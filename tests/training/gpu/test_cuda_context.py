"""The CUDA context of a worker's GPU is created in a thread, by the driver alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.cli.train import _trains_in_this_process
from paceline.config import from_mapping
from paceline.training.gpu import cuda_context

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
static void say(const char *what, int number) {
    FILE *file = fopen(getenv("DRIVER_LOG"), "a");
    fprintf(file, "%s %d\\n", what, number);
    fclose(file);
}
int cuInit(unsigned flags) { say("init", flags); return getenv("DRIVER_FAILS") ? 999 : 0; }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("DRIVER_GPUS")); return 0; }
int cuDeviceGet(int *device, int number) { *device = 10 + number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { say("retain", device); return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libfake.so"
    (folder / "fake.c").write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True)
    return library


@pytest.fixture
def log(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calls.txt"
    monkeypatch.setattr(cuda_context, "DRIVER", str(driver))
    monkeypatch.setenv("DRIVER_LOG", str(path))
    monkeypatch.setenv("DRIVER_GPUS", "2")
    return path


def calls(log: Path, local_rank: int = 0) -> list[str]:
    thread = cuda_context.create_in_background(local_rank)
    assert thread is not None
    assert thread is not threading.current_thread()
    thread.join(timeout=30)
    return log.read_text().splitlines()


@pytest.mark.parametrize(("local_rank", "device"), [(0, 10), (1, 11), (2, 10)])
def test_ranks_share_gpus_as_they_do_in_training(log: Path, local_rank: int, device: int) -> None:
    assert calls(log, local_rank) == ["init 0", f"retain {device}"]


def test_without_a_gpu_no_context_is_created(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVER_GPUS", "0")
    assert calls(log) == ["init 0"]


def test_failure_of_the_driver_is_left_to_torch(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVER_FAILS", "1")
    assert calls(log) == ["init 0"]


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_context, "DRIVER", "libno-such-driver.so.1")
    assert cuda_context.create_in_background() is None


def test_context_needs_no_torch() -> None:
    program = (
        "import sys; from paceline.training.gpu import cuda_context;"
        "cuda_context.create_in_background(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "is_alone"),
    [
        ({}, True),
        ({"device": "cuda"}, True),
        ({"device": "cpu"}, False),
        ({"strategy": "overlap"}, False),
        ({"nproc_per_node": 2, "strategy": "overlap"}, False),
        ({"cluster": "nodes=1", "device": "cuda"}, False),
    ],
)
def test_only_a_command_that_forks_no_workers_creates_the_context_before_torch(
    settings: dict[str, object], is_alone: bool
) -> None:
    """Forks of a process with a CUDA context cannot use the GPU."""
    assert _trains_in_this_process(from_mapping(settings)) is is_alone
