"""The resource sampler: a process of its own, one per node, beside the run and never in its way.

Each line of resources-<node>.jsonl is one sample. Counters start at zero with the sampler, and
`started` tells the samples of a resumed run from those before. Percentages of a process tree take
one core for 100, those of the machine take all cores for 100.

Three readings are costly: looking for new processes, GPUs, and PSS (the memory of the tree with
shared pages counted once). Each is timed, and taken so seldom that it stays at half a per cent of
one core. The dearest is PSS, at 8 ms for a process of 1.2 GB on a 2.8 GHz Xeon: with half a second
between samples such a process has its PSS in every fourth to sixth one, None in the others.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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

from paceline.measure.gpus import Gpus
from paceline.measure.procfs import NetworkCounter, ProcessTree, pss_bytes
from paceline.sources import search_path

T = TypeVar("T")

STOP_SECONDS = 5.0
"""How long stop() waits for the last sample; some milliseconds unless the machine is overloaded."""
COSTLY_SHARE = 0.005
"""Of one core, for each of the costly readings."""
PARENT_CHECK_SECONDS = 0.5
SHORTEST_CPU_SECONDS = 0.05
"""The kernel counts CPU time in steps of 10 ms, too coarse for a share of a shorter interval."""
PR_SET_PDEATHSIG = 1


class ResourceSampler:
    """Samples the processes that descend from `roots` into `path` until stopped.

    Nothing that goes wrong with it harms the run: start() and the context manager never raise for
    it, and stop() says what happened. With an interval of 0 nothing is sampled.
    """

    def __init__(
        self, path: Path, roots: Sequence[int], node: int = 0, interval_seconds: float = 0.5
    ) -> None:
        self.path = path
        self.roots = tuple(roots)
        self.node = node
        self.interval_seconds = interval_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words: IO[bytes] | None = None
        self._warning: str | None = None

    @property
    def pid(self) -> int | None:
        """The sampling process, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self.interval_seconds <= 0 or self._process is not None:
            return
        environment = {**os.environ, "PYTHONPATH": search_path()}
        try:
            # A file and no pipe, whose end a worker forked just now might hold open.
            self._last_words = tempfile.TemporaryFile()  # noqa: SIM115 (stop() closes it)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.measure.sampler", *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._last_words,
                env=environment,
                # Ctrl-C goes to the terminal's whole group; when to stop is the parent's decision.
                process_group=0,
            )
        except OSError as error:
            if self._last_words is not None:
                self._last_words.close()
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
        """Take a last sample and end the process; returns a warning where sampling failed."""
        process, self._process = self._process, None
        if process is None:
            warning, self._warning = self._warning, None
            return warning
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            # A word and not only the pipe's end: forked workers hold the pipe open too.
            process.stdin.write(b"stop")
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the resource sampler did not answer in {STOP_SECONDS:g} s and was killed"
        finally:
            process.kill()
            process.wait()
            cause = self._cause(process.returncode)
        if process.returncode == 0:
            return None
        return f"resources were sampled in part or not at all: {cause}"

    def _cause(self, exit_code: int) -> str:
        """The last line of what the process complained of."""
        assert self._last_words is not None
        with self._last_words as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {exit_code}"

    def __enter__(self) -> ResourceSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The warning stays to be fetched: leaving a block has no way to return it.
        self._warning = self.stop()


class Throttled:
    """A costly reading, taken so seldom that it costs about COSTLY_SHARE of the time."""

    def __init__(self) -> None:
        self._due = -math.inf

    def take(self, now: float, reading: Callable[[], T]) -> T | None:
        """The reading; None while it is not due."""
        if now < self._due:
            return None
        # CPU time, since on a busy machine most of the wall time is spent waiting for a turn.
        begin = time.process_time()
        value = reading()
        self._due = now + (time.process_time() - begin) / COSTLY_SHARE
        return value


class Sampler:
    """Takes one sample after the other; everything that is counted since the start lives here."""

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
        """CPU of the tree and of the machine since they were last given; None if just now."""
        if self._last is None:
            psutil.cpu_percent()  # It compares with the call before, so the first one only begins.
            self._last = now
            return None, None
        interval = now - self._last
        if interval < SHORTEST_CPU_SECONDS:
            return None, None
        cpu_percent = round(100 * self._cpu_seconds / interval, 2)
        self._cpu_seconds, self._last = 0.0, now
        return cpu_percent, psutil.cpu_percent()


def main(arguments: Sequence[str]) -> None:
    """The sampling process: ends at a word on stdin, at its end, or with the parent.

    What goes wrong is left to show as a traceback, whose last line the parent's stop() reports.
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
    """End this process when the parent ends, by whatever means; refuse every other end by signal.

    The kernel's signal comes when the *thread* that started us ends, which need not be the end of
    the process; so the handler looks whether the parent is still the same.
    """

    def leave_if_orphaned(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave_if_orphaned)
    # Elsewhere than on Linux there is no such call, and looking at the parent at times must do.
    if hasattr(libc := ctypes.CDLL(None, use_errno=True), "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may have ended before the kernel was asked to tell.
    leave_if_orphaned()


def _sample_until_stopped(path: Path, sampler: Sampler, interval: float, parent: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if os.fstat(file).st_size:
        # A line that a crash cut short must not swallow the first sample of this segment.
        _write(file, b"\n")
    begin = time.monotonic()
    while True:
        _write(file, json.dumps(sampler.sample()).encode() + b"\n")
        if _stop_asked(next_turn(begin, interval, time.monotonic()), parent):
            break
    _write(file, json.dumps(sampler.sample()).encode() + b"\n")
    os.close(file)


def next_turn(begin: float, interval: float, now: float) -> float:
    """When to sample next: on a fixed schedule, so that none drifts; missed turns are skipped."""
    return begin + (math.floor((now - begin) / interval) + 1) * interval


def _stop_asked(until: float, parent: int) -> bool:
    """Wait until a moment, or until the parent asks to stop or is gone."""
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
        raise OSError("the disk took only a part of a sample")


if __name__ == "__main__":
    main(sys.argv[1:])
