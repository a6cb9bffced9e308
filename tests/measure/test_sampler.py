"""Resource sampler: its samples, its lifetime, and isolation of its failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paceline.measure import sampler as sampler_module
from paceline.measure.resources import read_resources, summarize
from paceline.measure.sampler import ResourceSampler, Throttled, next_sample_time

PATIENCE_SECONDS = 30.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_SECONDS:g} s in vain for {what}")
        time.sleep(0.01)


def wait_for_samples(path: Path, count: int = 1) -> None:
    wait_until(lambda: len(read_resources(path)) >= count, f"{count} samples")


def ended(pid: int) -> bool:
    """Return whether a process has exited, including zombies."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _last_pss(path: Path) -> int:
    readings = [sample["pss_bytes"] for sample in read_resources(path)]
    return next((reading for reading in reversed(readings) if reading is not None), 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "resources-0.jsonl"


@pytest.fixture
def sampler(path: Path) -> Iterator[ResourceSampler]:
    """Return a sampler of this process that has taken its first sample."""
    sampler = ResourceSampler(path, [os.getpid()], interval_seconds=0.05)
    sampler.start()
    try:
        wait_for_samples(path)
        yield sampler
    finally:
        sampler.stop()


def test_samples_include_cpu_and_memory_of_children(path: Path) -> None:
    text = (
        "import sys, time\n"
        "print(time.process_time(), flush=True); sys.stdin.read(1)\n"
        "held = bytearray(200 << 20); end = time.process_time() + 0.5\n"
        "while time.process_time() < end: pass\n"
        "print(time.process_time(), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        begin = float(child.stdout.readline())
        with ResourceSampler(path, [child.pid], interval_seconds=0.1) as sampler:
            wait_for_samples(path)
            child.stdin.write(b"g")
            child.stdin.flush()
            end = float(child.stdout.readline())
            wait_for_samples(path, len(read_resources(path)) + 2)
            # Throttled: the last reading may be older than the allocation.
            wait_until(lambda: _last_pss(path) > 200 << 20, "a PSS reading of the allocation")
        assert sampler.stop() is None
    finally:
        child.communicate(timeout=PATIENCE_SECONDS)
    summary = summarize(path, 0)
    # In CPU seconds, because percentages depend on the load of the machine.
    cpu_seconds = summary["cpu_percent_mean"] / 100 * summary["sampled_seconds"]
    assert cpu_seconds == pytest.approx(end - begin, abs=0.1)
    assert 200 << 20 < summary["rss_bytes_peak"] < 300 << 20
    assert 200 << 20 < summary["pss_bytes_peak"] <= summary["rss_bytes_peak"]


@pytest.mark.parametrize(
    ("now", "expected"),
    [(10.0, 10.5), (10.01, 10.5), (10.49, 10.5), (10.5, 11.0), (12.7, 13.0)],
)
def test_late_sample_does_not_delay_the_next(now: float, expected: float) -> None:
    assert next_sample_time(begin=10.0, interval=0.5, now=now) == expected


def test_sampler_excludes_itself(path: Path, sampler: ResourceSampler) -> None:
    processes = psutil.Process().children(recursive=True)
    assert sampler.pid in [process.pid for process in processes]
    assert read_resources(path)[0]["processes"] == len(processes)


def test_stop_takes_a_last_sample(path: Path) -> None:
    sampler = ResourceSampler(path, [os.getpid()], interval_seconds=3600)
    sampler.start()
    wait_for_samples(path)
    assert sampler.stop() is None
    assert len(read_resources(path)) == 2


def test_stop_can_be_called_twice(sampler: ResourceSampler) -> None:
    sampler.stop()
    assert sampler.stop() is None


def test_interval_of_zero_disables_sampling(path: Path) -> None:
    with ResourceSampler(path, [os.getpid()], interval_seconds=0) as sampler:
        assert sampler.pid is None
    assert not path.exists()


def test_sampler_exits_when_its_parent_is_killed(path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path\n"
        "from paceline.measure.sampler import ResourceSampler\n"
        f"sampler = ResourceSampler(Path({str(path)!r}), [os.getpid()], interval_seconds=3600)\n"
        "sampler.start(); print(sampler.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for_samples(path)
    parent.kill()
    parent.communicate(timeout=PATIENCE_SECONDS)
    wait_until(lambda: ended(pid), "the sampler's end")


def test_sampler_exits_when_its_parent_was_killed_during_startup(
    path: Path,
) -> None:
    command = [sys.executable, "-m", "paceline.measure.sampler", f"--file={path}", "--roots=1"]
    # The given parent is not the actual one, as if it had exited in the meantime.
    orphan = subprocess.Popen(
        [*command, "--node=0", "--interval=0.1", f"--parent={os.getppid()}"],
        stdin=subprocess.PIPE,
    )
    try:
        assert orphan.wait(timeout=PATIENCE_SECONDS) == 0
    finally:
        orphan.communicate()
    assert not path.exists()


def test_sampler_outlives_the_thread_that_started_it(path: Path) -> None:
    sampler = ResourceSampler(path, [os.getpid()], interval_seconds=0.05)

    def start() -> None:
        sampler.start()
        wait_for_samples(path)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    wait_for_samples(path, len(read_resources(path)) + 2)
    assert sampler.stop() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_sampler_ignores_signals_while_its_parent_lives(
    path: Path, sampler: ResourceSampler, number: signal.Signals
) -> None:
    assert sampler.pid is not None
    os.kill(sampler.pid, number)
    wait_for_samples(path, len(read_resources(path)) + 2)
    assert sampler.stop() is None


def test_sampler_is_not_in_the_process_group_of_the_terminal(sampler: ResourceSampler) -> None:
    assert sampler.pid is not None
    assert os.getpgid(sampler.pid) != os.getpgid(0)


def test_unresponsive_sampler_is_killed(
    sampler: ResourceSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "STOP_SECONDS", 0.1)
    pid = sampler.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    warning = sampler.stop()
    assert warning is not None
    assert "was killed" in warning
    assert ended(pid)


def test_killed_sampler_gives_a_warning(sampler: ResourceSampler) -> None:
    assert sampler.pid is not None
    os.kill(sampler.pid, signal.SIGKILL)
    warning = sampler.stop()
    assert warning is not None
    assert "exit code -9" in warning


@pytest.mark.parametrize(
    ("file", "cause"),
    [("/dev/full", "No space left on device"), ("/dev/null/below", "Not a directory")],
)
def test_unwritable_file_gives_a_warning(file: str, cause: str) -> None:
    sampler = ResourceSampler(Path(file), [os.getpid()])
    sampler.start()
    warning = sampler.stop()
    assert warning is not None
    assert cause in warning
    assert "\n" not in warning


def test_failure_to_start_gives_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with ResourceSampler(path, [os.getpid()]) as sampler:
        pass
    assert "/no/such/python" in (sampler.stop() or "")


def test_exited_root_has_no_usage(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait(timeout=PATIENCE_SECONDS)
    with ResourceSampler(path, [child.pid]) as sampler:
        pass
    assert sampler.stop() is None
    assert [sample["processes"] for sample in read_resources(path)] == [0, 0]


def test_sampler_does_not_import_from_the_current_folder(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('the wrong psutil')")
    monkeypatch.chdir(tmp_path)
    with ResourceSampler(path, [os.getpid()]) as sampler:
        pass
    assert sampler.stop() is None


def test_sampler_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; import paceline.measure.sampler;"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_truncated_line_does_not_affect_other_samples(path: Path) -> None:
    path.write_text('{"node": 0, "started": 1.0, "seconds": 0.0}\n{"node": 0, "star')
    with ResourceSampler(path, [os.getpid()]):
        pass
    samples = read_resources(path)
    assert samples[0] == {"node": 0, "started": 1.0, "seconds": 0.0}
    assert len(samples) == 3


def test_expensive_reading_is_throttled() -> None:
    paced = Throttled()

    def costly() -> str:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return "taken"

    assert paced.take(100.0, costly) == "taken"
    # At 0.5% of the time, a reading of 20 ms is due again after 4 s.
    assert paced.take(103.9, costly) is None
    assert paced.take(110.0, costly) == "taken"


def test_cheap_reading_is_taken_every_time() -> None:
    paced = Throttled()
    assert [paced.take(moment, lambda: "taken") for moment in (1.0, 2.0)] == ["taken", "taken"]
