"""Resource sampler: a separate process per node that records resource usage during a run.

Each line of resources-<node>.jsonl is one sample. Counters start at zero with the sampler, and
`started` distinguishes the samples of a resumed run from earlier ones. For percentages of a process
tree, 100 is one core; for percentages of the machine, 100 is all cores.

Three readings are expensive: the search for new processes, GPUs, and PSS (the memory of the tree
with shared pages counted once). Each is timed and throttled to 0.5% of one core. The most expensive
is PSS, at 8 ms for a process of 1.2 GB on a 2.8 GHz Xeon: at a sampling interval of 0.5 s, every
fourth to sixth sample of such a process has PSS, the others None.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from paceline.child_process import pythonpath, set_parent_death_signal
from paceline.measure.gpus import Gpus
from paceline.measure.procfs import NetworkCounter, ProcessTree, pss_bytes

T = TypeVar("T")

STOP_SECONDS = 5.0
"""Timeout of stop() for the last sample, which takes milliseconds on most machines."""
MAX_CPU_FRACTION = 0.005
"""Fraction of one core that each expensive reading may use."""
PARENT_CHECK_SECONDS = 0.5
MIN_CPU_INTERVAL_SECONDS = 0.05
"""The kernel counts CPU time in steps of 10 ms, too coarse for shorter intervals."""


class ResourceSampler:
    """Samples the descendants of `roots` into `path` until stopped.

    Failures never affect the run: start() and the context manager do not raise, and stop() returns
    a warning. An interval of 0 disables sampling.
    """

    def __init__(
        self, path: Path, roots: Sequence[int], node: int = 0, interval_seconds: float = 0.5
    ) -> None:
        self.path = path
        self.roots = tuple(roots)
        self.node = node
        self.interval_seconds = interval_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._warning: str | None = None

    @property
    def pid(self) -> int | None:
        """Process ID of the sampler, or None if it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self.interval_seconds <= 0 or self._process is not None:
            return
        environment = {**os.environ, "PYTHONPATH": pythonpath()}
        try:
            # A file instead of a pipe, which a concurrently forked worker could hold open.
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (stop() closes it)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.measure.sampler", *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env=environment,
                # Ctrl-C signals the whole process group, but the parent decides when to stop.
                process_group=0,
            )
        except OSError as error:
            if self._stderr is not None:
                self._stderr.close()
            self._warning = f"resources were not sampled: {error}"

    def _arguments(self) -> list[str]:
        return [
            f"--file={self.path}",
            f"--roots={','.join(map(str, self.roots))}",
            f"--node={self.node}",
            f"--interval={self.interval_seconds}",
            f"--parent={os.getpid()}",
        ]

    def stop(self) -> str | None:
        """Take a last sample and end the process; returns a warning if sampling failed."""
        process, self._process = self._process, None
        if process is None:
            warning, self._warning = self._warning, None
            return warning
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            # Closing the pipe is not enough: forked workers hold it open, too.
            process.stdin.write(b"stop")
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the resource sampler did not stop within {STOP_SECONDS:g} s and was killed"
        finally:
            process.kill()
            process.wait()
            cause = self._cause(process.returncode)
        if process.returncode == 0:
            return None
        return f"resource samples are incomplete: {cause}"

    def _cause(self, exit_code: int) -> str:
        """Return the last line of stderr of the process."""
        assert self._stderr is not None
        with self._stderr as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {exit_code}"

    def __enter__(self) -> ResourceSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Keep the warning for a later stop(): __exit__ cannot return it.
        self._warning = self.stop()


class Throttled:
    """Throttles an expensive reading to about MAX_CPU_FRACTION of one core."""

    def __init__(self) -> None:
        self._due = -math.inf

    def take(self, now: float, reading: Callable[[], T]) -> T | None:
        """Take the reading; returns None if it is not due yet."""
        if now < self._due:
            return None
        # CPU time, because on a busy machine most wall time is spent waiting for a core.
        begin = time.process_time()
        value = reading()
        self._due = now + (time.process_time() - begin) / MAX_CPU_FRACTION
        return value


class Sampler:
    """Takes samples and keeps the counters since the start."""

    def __init__(self, node: int, roots: Sequence[int]) -> None:
        self._node = node
        self._tree = ProcessTree(roots, excluded=[os.getpid()])
        self._network = NetworkCounter(roots[0])
        self._gpus = Gpus()
        self._search, self._pss, self._gpu = Throttled(), Throttled(), Throttled()
        self._started_unix, self._started = time.time(), time.monotonic()
        self._last: float | None = None
        self._cpu_seconds = 0.0
        self._read_bytes = self._written_bytes = 0

    def sample(self) -> dict[str, Any]:
        now = time.monotonic()
        usage = self._search.take(now, self._tree.usage) or self._tree.usage(search=False)
        pss = self._pss.take(now, lambda: pss_bytes(self._tree.pids))
        self._cpu_seconds += usage.cpu_seconds
        self._read_bytes += usage.read_bytes
        self._written_bytes += usage.written_bytes
        cpu_percent, machine_cpu_percent = self._percentages(now)
        return {
            "node": self._node,
            "started": self._started_unix,
            "time": time.time(),
            "seconds": round(now - self._started, 4),
            "cpu_percent": cpu_percent,
            "machine_cpu_percent": machine_cpu_percent,
            "rss_bytes": usage.rss_bytes,
            "pss_bytes": pss,
            "threads": usage.threads,
            "processes": usage.processes,
            "disk_bytes_read": self._read_bytes,
            "disk_bytes_written": self._written_bytes,
            **self._network.totals(),
            "gpus": self._gpu.take(now, self._gpus.sample),
            "sampler_cpu_seconds": round(time.process_time(), 4),
        }

    def _percentages(self, now: float) -> tuple[float | None, float | None]:
        """Return CPU usage of tree and machine since the last result; None if that was just now."""
        if self._last is None:
            # It measures since the previous call, so the first call only starts the interval.
            psutil.cpu_percent()
            self._last = now
            return None, None
        interval = now - self._last
        if interval < MIN_CPU_INTERVAL_SECONDS:
            return None, None
        cpu_percent = round(100 * self._cpu_seconds / interval, 2)
        self._cpu_seconds, self._last = 0.0, now
        return cpu_percent, psutil.cpu_percent()


def main(arguments: Sequence[str]) -> None:
    """Run the sampler process until stdin receives data or closes, or the parent exits.

    Exceptions are not caught: stop() in the parent reports the last line of the traceback.
    """
    parser = argparse.ArgumentParser(prog="paceline.measure.sampler")
    for name, kind in (("file", str), ("roots", str), ("node", int), ("parent", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--interval", type=float, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    sampler = Sampler(options.node, [int(root) for root in options.roots.split(",")])
    _sample_until_stopped(Path(options.file), sampler, options.interval, options.parent)


def die_with_parent(parent: int) -> None:
    """End this process when the parent ends, and ignore termination signals before that.

    The kernel sends the signal when the *thread* that started this process ends, which may be
    before the parent process ends; the handler therefore checks the parent.
    """

    def exit_if_orphaned(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, exit_if_orphaned)
    # Elsewhere than on Linux, the parent is polled.
    set_parent_death_signal(signal.SIGTERM)
    # The parent may have ended before prctl was called.
    exit_if_orphaned()


def _sample_until_stopped(path: Path, sampler: Sampler, interval: float, parent: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if os.fstat(file).st_size:
        # A line truncated by a crash must not corrupt the first sample of this segment.
        _write(file, b"\n")
    begin = time.monotonic()
    while True:
        _write(file, json.dumps(sampler.sample()).encode() + b"\n")
        if _wait_for_stop(next_sample_time(begin, interval, time.monotonic()), parent):
            break
    _write(file, json.dumps(sampler.sample()).encode() + b"\n")
    os.close(file)


def next_sample_time(begin: float, interval: float, now: float) -> float:
    """Return the next time of a fixed schedule without drift; missed samples are skipped."""
    return begin + (math.floor((now - begin) / interval) + 1) * interval


def _wait_for_stop(until: float, parent: int) -> bool:
    """Wait until a time; returns True if the parent requests a stop or has exited."""
    while True:
        left = max(0.0, until - time.monotonic())
        if os.getppid() != parent:
            return True
        if select.select([sys.stdin], [], [], min(left, PARENT_CHECK_SECONDS))[0]:
            return True
        if not left:
            return False


def _write(file: int, line: bytes) -> None:
    if os.write(file, line) != len(line):
        raise OSError("a sample was written only partially")


if __name__ == "__main__":
    main(sys.argv[1:])
