"""Programs of a fork server behave like new processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config import RunConfig
from paceline.launch import launcher
from paceline.launch.fork_server import ForkServer, start_python
from tests.support.commands import are_gone, wait_until
from tests.support.warm import PrewarmedStarter

SLEEPER = ["-m", "tests.support.sleeper"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(starter: PrewarmedStarter, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    monkeypatch.chdir(ROOT)
    return starter.fork_server


def description(server: ForkServer | None, *words: str) -> dict[str, Any]:
    process = start_python(
        server,
        ["-m", "tests.support.report_process", *words],
        environment={**os.environ, "RANK": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"a line\n")
    process.stdin.close()
    out, err = process.stdout.read(), process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert (process.wait(20), err) == (7, b"at exit\n")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has fork servers")
def test_a_fork_has_what_a_new_process_has(server: ForkServer) -> None:
    cold, forked = description(None, "one", "two"), description(server, "one", "two")
    assert forked["argv"] == ["one", "two"]
    assert forked["parent"] == os.getpid()
    assert not set(cold.pop("random")) & set(forked.pop("random"))
    assert forked == cold


def test_a_fork_resolves_relative_search_paths(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    assert description(server)["path"] == description(None)["path"]


def test_forks_have_random_numbers_of_their_own(server: ForkServer) -> None:
    one, other = description(server)["random"], description(server)["random"]
    assert not set(one) & set(other)


def test_a_fork_inherits_all_files_that_are_meant_for_it(server: ForkServer) -> None:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        process = start_python(
            server,
            ["-m", "tests.support.report_process"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            inherited=files,
        )
    finally:
        for file in files:
            os.close(file)
    assert process.stdout is not None
    with process.stdout as output:
        assert len(json.loads(output.read())["files"]) == 3 + 20
    assert process.wait(20) == 7


def test_a_fork_ends_by_a_signal_like_any_process(server: ForkServer) -> None:
    process = start_python(server, SLEEPER)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM
    process.kill()
    assert process.poll() == -signal.SIGTERM


def test_without_its_server_a_program_starts_in_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    spawned = ForkServer.spawn()
    assert spawned is not None
    with spawned as server:
        server._process.kill()
        for word in ("first", "later"):
            assert description(server, word)["argv"] == [word]


def test_an_environment_that_no_message_can_carry_needs_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    for number in range(20):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    spawned = ForkServer.spawn()
    assert spawned is not None
    with spawned as server:
        assert len(description(server)["environment"]["LARGE_0"]) == 100_000


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["one", "torchrun"]
)
def test_the_process_of_a_worker_keeps_no_server(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        is_open = True

        def close(self) -> None:
            self.is_open = False

    def run(*_: object) -> bool:
        return kept.is_open

    kept = Server()
    monkeypatch.setattr("paceline.launch.worker.run", run)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    config = RunConfig(data="digits", device="cpu")
    assert launcher.launch_local(config, None, True, kept) is False  # type: ignore[arg-type, comparison-overlap]


def test_a_process_with_threads_forks_no_server() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert ForkServer.fork() is None
    finally:
        end.set()
        thread.join()


PROGRAM = """
import signal, sys, time, subprocess
import numpy
from paceline.launch.fork_server import ForkServer, start_python
from tests.support.native_threads import start_native_thread
if sys.argv[1] == "native":
    start_native_thread()
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
server = ForkServer.fork()
if server is None:
    sys.exit(3)
if sys.argv[1] == "ignored":
    sys.exit(start_python(server, ["-m", "tests.support.no_such_program"]).wait())
print(start_python(server, ["-m", "tests.support.sleeper"]).pid, flush=True)
print(start_python(server, ["-m", "tests.support.sleeper"], death_signal=15).pid, flush=True)
time.sleep(60)
"""


def test_a_process_with_threads_of_a_library_forks_no_server() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "native"], cwd=ROOT, timeout=60)
    assert done.returncode == 3


def test_exit_codes_are_known_where_the_parent_ignores_its_children() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "ignored"], cwd=ROOT, timeout=60, capture_output=True
    )
    assert (done.returncode, b"No module named" in done.stderr) == (1, True)


def test_a_server_and_what_is_tied_end_with_the_process_that_forked_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "none"], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        untied, tied = (psutil.Process(int(process.stdout.readline())) for _ in range(2))
        children = psutil.Process(process.pid).children()
        (server,) = [child for child in children if child not in (untied, tied)]
        process.kill()
    try:
        wait_until(lambda: are_gone([server, tied]), "both have ended")
        assert untied.is_running()
    finally:
        untied.kill()


FAILING = """
from paceline.launch import fork_server
def fail(*arguments):
    raise KeyboardInterrupt
fork_server._become_server = fail
try:
    fork_server.ForkServer.fork()
finally:
    print("the launcher continues", flush=True)
"""


def test_a_server_that_fails_to_start_does_not_continue_as_its_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING], cwd=ROOT, timeout=60, capture_output=True
    )
    assert done.stdout == b"the launcher continues\n"
