"""Usage of a process tree compared with the values of the kernel and the processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from paceline.measure import procfs
from paceline.measure.procfs import ProcessTree, pss_bytes, read_process

PRELUDE = """
import os, subprocess, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
def say_and_wait(word):
    print(word, flush=True)
    os.read(0, 1)
"""

TICKS = 0.06
"""The kernel rounds CPU times to 10 ms per process."""


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program that replies on stdout and exits when stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate(timeout=30)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("g")
    process.stdin.flush()
    return answer(process)


def cpu_of_this_process_and_its_family() -> float:
    """Kernel counters of this process, its reaped children, and workers of other tests."""
    living = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return sum(os.times()[:4]) + sum(sum(times[:4]) for times in living)


def ticks_of_the_family() -> float:
    return TICKS * (1 + len(psutil.Process().children(recursive=True)) / 4)


def test_cpu_time_matches_the_process_clock() -> None:
    with program("say_and_wait('ready'); burn(0.5); say_and_wait('burnt')") as child:
        answer(child)
        tree = ProcessTree([child.pid])
        tree.usage()
        ask(child)
        assert tree.usage().cpu_seconds == pytest.approx(0.5, abs=TICKS)


def test_short_lived_processes_are_counted() -> None:
    tree = ProcessTree([os.getpid()])
    tree.usage()
    before = cpu_of_this_process_and_its_family()
    for _ in range(3):
        subprocess.run([sys.executable, "-S", "-c", PRELUDE + "burn(0.1)"], check=True)
    used = cpu_of_this_process_and_its_family() - before
    assert used > 0.3
    assert tree.usage().cpu_seconds == pytest.approx(used, abs=ticks_of_the_family())


def test_reaped_child_is_not_counted_twice() -> None:
    tree = ProcessTree([os.getpid()])
    tree.usage()
    before = cpu_of_this_process_and_its_family()
    with program("burn(0.3); say_and_wait('burnt'); burn(0.2)") as child:
        answer(child)
        seen = tree.usage().cpu_seconds
        assert seen > 0.25
    used = cpu_of_this_process_and_its_family() - before
    everything = seen + tree.usage().cpu_seconds
    assert everything == pytest.approx(used, abs=ticks_of_the_family())


def test_grandchild_that_exits_with_its_parent_is_counted_once() -> None:
    grandchild = PRELUDE + "burn(0.3); say_and_wait('burnt')"
    child = f"subprocess.run([sys.executable, '-c', {grandchild!r}])"
    tree = ProcessTree([os.getpid()])
    tree.usage()
    before = cpu_of_this_process_and_its_family()
    with program(child) as process:
        answer(process)
        seen = tree.usage().cpu_seconds
        assert seen > 0.25
    used = cpu_of_this_process_and_its_family() - before
    everything = seen + tree.usage().cpu_seconds
    assert everything == pytest.approx(used, abs=ticks_of_the_family())


def test_cpu_time_before_the_first_usage_is_not_counted() -> None:
    with program("burn(0.3); say_and_wait('burnt')") as child:
        answer(child)
        tree = ProcessTree([child.pid])
        assert tree.usage().cpu_seconds == 0
        assert tree.usage().cpu_seconds < 0.2


def test_orphan_remains_a_member() -> None:
    orphan = PRELUDE + "say_and_wait('here')"
    reading, writing = os.pipe()
    # The orphan waits on its own pipe, so it outlives its parent.
    text = f"subprocess.Popen([sys.executable, '-c', {orphan!r}], stdin={reading}); os.read(0, 1)"
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + text + "; os._exit(0)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[reading],
        text=True,
    )
    os.close(reading)
    try:
        answer(process)
        tree = ProcessTree([process.pid])
        assert tree.usage().processes == 2
        orphan_pid = next(pid for pid in tree.pids if pid != process.pid)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)
        tree.usage()
        assert tree.pids == [orphan_pid]
    finally:
        os.close(writing)
        process.kill()
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


def test_excluded_process_is_not_counted() -> None:
    with program("say_and_wait('here')") as child:
        answer(child)
        tree = ProcessTree([os.getpid()], excluded=[child.pid])
        tree.usage()
        assert os.getpid() in tree.pids
        assert child.pid not in tree.pids


def test_usage_without_search_ignores_new_processes() -> None:
    tree = ProcessTree([os.getpid()])
    tree.usage()
    with program("say_and_wait('here')") as child:
        answer(child)
        tree.usage(search=False)
        assert child.pid not in tree.pids
        tree.usage()
        assert child.pid in tree.pids
    tree.usage(search=False)
    assert child.pid not in tree.pids


def test_shared_pages_count_once_in_pss() -> None:
    megabytes = 200
    text = (
        "import mmap\n"
        f"shared = mmap.mmap(-1, {megabytes} << 20)\n"
        f"for page in range(0, {megabytes} << 20, 4096): shared[page] = 1\n"
        "if os.fork() == 0:\n"
        f"    for page in range(0, {megabytes} << 20, 4096): shared[page]\n"
        "    say_and_wait('both'); os._exit(0)\n"
        "os.wait()\n"
    )
    with program(text) as child:
        answer(child)
        tree = ProcessTree([child.pid])
        usage = tree.usage()
        pss = pss_bytes(tree.pids)
        assert usage.processes == 2
        assert usage.rss_bytes > 2 * megabytes << 20
        assert pss is not None
        assert megabytes << 20 < pss < 1.5 * megabytes * 2**20


def test_disk_writes_are_counted(tmp_path: object) -> None:
    text = (
        f"file = os.open({str(tmp_path)!r} + '/file', os.O_WRONLY | os.O_CREAT)\n"
        "say_and_wait('ready')\n"
        "os.write(file, bytes(4 << 20)); say_and_wait('done')\n"
    )
    with program(text) as child:
        answer(child)
        tree = ProcessTree([child.pid])
        tree.usage()
        ask(child)
        written = tree.usage().written_bytes
        # A file on tmpfs causes no disk writes.
        assert written == 0 or 4 << 20 <= written < 8 << 20


def test_unreadable_files_give_no_values_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = procfs._read
    monkeypatch.setattr(procfs, "_read", lambda path: read(path) if path.endswith("/stat") else b"")
    tree = ProcessTree([os.getpid()])
    tree.usage()
    usage = tree.usage()
    assert (usage.read_bytes, usage.written_bytes, pss_bytes(tree.pids)) == (0, 0, None)
    assert usage.rss_bytes > 0


def test_name_with_parentheses_and_spaces_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = b"7 (a) b (c d) S 3 " + b" ".join(str(number).encode() for number in range(5, 53))
    monkeypatch.setattr(procfs, "_read", lambda path: line)
    process = read_process(7)
    assert process is not None
    # proc(5) counts fields from 1: times are 14 to 17, threads 20, start time 22, memory 24.
    assert (process.parent, process.own_ticks, process.reaped_ticks) == (3, 14 + 15, 16 + 17)
    assert (process.threads, process.born) == (20, 22)
    assert process.rss_bytes == 24 * procfs.PAGE_BYTES


def test_exited_process_is_none() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait(timeout=30)
    assert read_process(process.pid) is None
