"""The leak check fails a test for every kind of leak, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.leaks import leaks_since, take

ROOT = Path(__file__).parents[2]

LEAKY_TESTS = """
import os, socket, subprocess, threading
from pathlib import Path

from tests.support import leaks

leaks.GRACE_SECONDS = 0.2
assert leaks.SHARED_MEMORY == Path("/dev/shm")
# A leak there would fail tests of another session that runs at the same time.
leaks.SHARED_MEMORY = Path("shared_memory").absolute()
leaks.SHARED_MEMORY.mkdir()
kept = []


def test_process():
    kept.append(subprocess.Popen(["sleep", "60"]))


def test_orphan():
    subprocess.run(["sh", "-c", "sleep 61 & true"], check=True)


def test_thread():
    thread = threading.Thread(target=threading.Event().wait, name="left", daemon=True)
    thread.start()


def test_shared_memory():
    (leaks.SHARED_MEMORY / "paceline-leak").write_bytes(b"left")


def test_inet_socket():
    kept.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))


def test_unix_socket():
    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def test_new_variable():
    os.environ["LEFT_BEHIND"] = "1"


def test_changed_variable():
    os.environ["KNOWN"] = "changed"


def test_removed_variable():
    assert os.environ["KNOWN"] == "as it was"
    del os.environ["KNOWN"]


def test_folder(tmp_path):
    os.chdir(tmp_path)


def test_last():
    pass
"""

CLEAN_TESTS = """
import os, socket, subprocess, threading

import pytest


@pytest.fixture(scope="module")
def group():
    process = subprocess.Popen(["sleep", "60"])
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    sockets = socket.socketpair()
    os.environ["GROUP"] = "up"
    yield process
    del os.environ["GROUP"]
    for side in sockets:
        side.close()
    end.set()
    thread.join()
    process.kill()
    process.wait()


GROUP_FIRST_REQUESTED


def test_uses_the_group(group):
    assert group.poll() is None


def test_puts_everything_back(monkeypatch, tmp_path):
    monkeypatch.setenv("FOR_A_WHILE", "1")
    monkeypatch.chdir(tmp_path)
    with socket.socket():
        subprocess.run(["true"], check=True)


def test_what_is_just_ending_is_given_time():
    threading.Timer(0.3, lambda: None).start()
    subprocess.Popen(["sleep", "0.3"])
"""

BY_NAME = "def test_first(group): assert group.poll() is None"
IN_THE_MIDDLE = 'def test_first(request): assert request.getfixturevalue("group").poll() is None'

CARELESS_FIXTURE = """
import subprocess

import pytest


@pytest.fixture(scope="module")
def group():
    return subprocess.Popen(["sleep", "62"])


def test_uses_it(group):
    assert group.poll() is None
"""


def run_tests(folder: Path, source: str) -> str:
    """Run `source` in a separate pytest with the leak check, without torch; return its output."""
    (folder / "conftest.py").write_text(
        "from tests.support.leaks import no_leaks, no_leaks_of_session, pytest_fixture_setup\n"
    )
    (folder / "test_inner.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KNOWN": "as it was", "COLUMNS": "200"}
    done = subprocess.run(
        [*command, f"--rootdir={folder}", "test_inner.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def leaky_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaky")
    return run_tests(folder, LEAKY_TESTS)


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        ("process", "(sleep 60)"),
        ("orphan", "(sleep 61)"),
        ("thread", "thread 'left' (daemon)"),
        ("shared_memory", "/shared_memory/paceline-leak (4 bytes)"),
        ("inet_socket", "socket socket:["),
        ("unix_socket", "socket socket:["),
        ("new_variable", "environment variable LEFT_BEHIND: was None, left as '1'"),
        ("changed_variable", "environment variable KNOWN: was 'as it was', left as 'changed'"),
        ("removed_variable", "environment variable KNOWN: was 'as it was', left as None"),
        ("folder", "current folder: was "),
    ],
)
def test_a_leak_fails_only_the_test_that_caused_it(
    leaky_output: str, test: str, complaint: str
) -> None:
    _, _, after = leaky_output.partition(f"ERROR at teardown of test_{test} _")
    report = after.partition("\n____")[0].partition("\n====")[0].strip().splitlines()
    assert [complaint in line for line in report[2:]] == [True], after


@pytest.mark.parametrize("first", [BY_NAME, IN_THE_MIDDLE], ids=["by name", "in the middle"])
def test_a_fixture_of_wider_scope_may_outlive_the_test_that_requests_it_first(
    tmp_path: Path, first: str
) -> None:
    output = run_tests(tmp_path, CLEAN_TESTS.replace("GROUP_FIRST_REQUESTED", first))
    assert "4 passed" in output, output
    assert "error" not in output, output


def test_a_fixture_of_wider_scope_that_leaks_fails_the_session(tmp_path: Path) -> None:
    output = run_tests(tmp_path, CARELESS_FIXTURE)
    assert "the test session leaked:" in output
    assert "(sleep 62)" in output


def test_a_leaked_process_is_killed() -> None:
    before = take()
    left = subprocess.Popen(["sleep", "60"])
    leaks_since(before, grace_seconds=0)
    assert left.wait(timeout=10) != 0
