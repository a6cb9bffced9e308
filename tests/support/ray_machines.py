"""A Ray cluster of three emulated machines, each with a raylet, one slot and its own disk."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from paceline.config.cluster_spec import parse
from paceline.emulation.cluster import EmulatedCluster
from paceline.training.checkpoint import iterations
from tests.support.commands import HERE, TINY, Ended, flags, rank_of
from tests.support.node_commands import set_link

MACHINES = 3
PORT = 6379
TRIES = 3
LIMIT_SECONDS = 240.0
"""Far more than any test takes: a run is a dozen processes on two cores."""


class RayMachines:
    """Commands run on the first machine, with a disk that is not visible to any machine."""

    def __init__(self, cluster: EmulatedCluster, folder: Path) -> None:
        self.cluster = cluster
        self.out = folder / "runs"
        """The path of `--out`, where each machine mounts its own folder."""
        # Socket paths are limited to 107 bytes.
        self._sockets = folder / "ray"
        for place in (self.out, self._sockets):
            place.mkdir()
        self.records = folder / "disk-driver"
        self._folder = folder
        self.head = f"{cluster.addresses[0]}:{PORT}"
        self._variables = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A killed machine refuses connections and is noticed after a few checks.
            "RAY_health_check_period_ms": "500",
            # A machine without a link is lost after five timeouts, longer than CUT_SECONDS.
            "RAY_health_check_timeout_ms": "2000",
            "OWN_SLEEP_SECONDS": "0.3",
            "RAY_ADDRESS": self.head,
        }
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}
        self.away: set[int] = set()
        """Lost machines."""

    def start(self) -> None:
        temporary = f"--temp-dir={self._sockets}"
        port = f"--port={PORT}"
        head = ["--head", port, "--include-dashboard=false", "--no-monitor", temporary]
        self._start_raylets([0], head)
        self._join(range(1, MACHINES))

    def bring_back(self) -> None:
        """Restart the lost machines."""
        for machine in self.away:
            set_link(self.cluster, machine, "up")
        self._join(sorted(self.away))
        self.away.clear()

    def _join(self, machines: Sequence[int]) -> None:
        self._start_raylets([*machines], [f"--address={self.head}"])

    def _start_raylets(self, machines: list[int], words: Sequence[str]) -> None:
        """Retries, since a raylet gives up after 30 s, which may be too short on a busy machine."""
        late = machines
        for _ in range(TRIES):
            for machine in late:
                self._kill_all(machine)
                self._start_raylet(machine, words)
            wait_until(lambda: all(map(self._is_decided, machines)), "they have started or not")
            late = [machine for machine in machines if not self._has_started(machine)]
            if not late:
                return
        raise AssertionError("Ray does not start: this machine is too busy")

    def _start_raylet(self, machine: int, words: Sequence[str]) -> None:
        address = f"--node-ip-address={self.cluster.addresses[machine]}"
        fixed = ["--block", "--disable-usage-stats", "--num-cpus=1", address]
        # Fewer processes start faster on few cores.
        lean = ["--object-store-memory=80000000", "--include-log-monitor=false"]
        program = str(Path(sys.executable).with_name("ray"))
        command = [program, "start", *fixed, *lean, *words]
        if before := self._raylets.get(machine):
            before.wait()
        # As after a boot: commands would try to connect to the previous Ray.
        shutil.rmtree(self._own_sockets(machine), ignore_errors=True)
        with self._output(machine).open("wb") as output:
            self._raylets[machine] = self._run(machine, f"disk-{machine}", command, output)

    def _own_sockets(self, machine: int) -> Path:
        return self._folder / f"sockets-{machine}"

    def _output(self, machine: int) -> Path:
        return self._folder / f"raylet-{machine}.txt"

    def _has_started(self, machine: int) -> bool:
        return "will now block" in self._output(machine).read_text()

    def _is_decided(self, machine: int) -> bool:
        return self._has_started(machine) or self._raylets[machine].poll() is not None

    def _run(
        self,
        machine: int,
        disk: str,
        words: Sequence[str],
        output: int | IO[bytes],
    ) -> subprocess.Popen[bytes]:
        # Ray identifies its machine by files beside its sockets.
        own = {self.out: self._folder / disk, self._sockets: self._own_sockets(machine)}
        for folder in own.values():
            folder.mkdir(exist_ok=True)
        mounts = [f"mount --bind {folder} {place}" for place, folder in own.items()]
        script = " && ".join([*mounts, f"exec {shlex.join(words)}"])
        return subprocess.Popen(
            self.cluster.command(machine, ["unshare", "-m", "sh", "-c", script]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=HERE,
            env=self._variables,
            start_new_session=True,
        )

    @contextmanager
    def paceline(self, *words: str, machine: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command with `--launcher ray`, killed at the end of the block."""
        command = [sys.executable, "-m", "paceline", *words, "--launcher", "ray", "--threads", "1"]
        process = self._run(machine, "disk-driver", command, subprocess.PIPE)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            end_of(process)

    def train(
        self, name: str, machine: int = 0, **settings: Any
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Run `paceline train` on a machine."""
        fixed = {"out": self.out, "name": name}
        return self.paceline("train", *flags({**TINY, **fixed, **settings}), machine=machine)

    def worker(self, rank: int) -> psutil.Process | None:
        """Return the worker process of a rank."""
        for machine in range(MACHINES):
            for process in self.workers_on(machine):
                if rank_of(process) == rank:
                    return process
        return None

    def workers_on(self, machine: int) -> list[psutil.Process]:
        found = []
        for pid in self.cluster.processes(machine):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if rank_of(process) is not None:
                    found.append(process)
        return found

    def machine_of(self, process: psutil.Process) -> int:
        return next(
            machine for machine in range(MACHINES) if process.pid in self.cluster.processes(machine)
        )

    def power_off(self, machine: int) -> None:
        """Kill all processes of a machine."""
        self.away.add(machine)
        self._kill_all(machine)

    def cut_off(self, machine: int) -> None:
        """Take the link of a machine down; its processes keep running."""
        self.away.add(machine)
        set_link(self.cluster, machine, "down")

    def _kill_all(self, machine: int) -> None:
        for pid in self.cluster.processes(machine):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def posts(self) -> list[int]:
        """Return the pids of paceline actors on reachable machines."""
        found = []
        for machine in set(range(MACHINES)) - self.away:
            for pid in self.cluster.processes(machine):
                with contextlib.suppress(psutil.Error):
                    if psutil.Process(pid).cmdline()[0].startswith("ray::Post"):
                        found.append(pid)
        return found

    def disk(self, machine: int) -> Path:
        return self._folder / f"disk-{machine}"

    def newest_checkpoint(self, name: str) -> int:
        """Return the newest checkpoint on the first machine, where commands run."""
        return max(iterations(self.disk(0) / name / "checkpoints"), default=0)

    def close(self) -> None:
        self.cluster.down()
        for process in self._raylets.values():
            process.wait()


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.1)


def end_of(process: subprocess.Popen[bytes]) -> Ended:
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    return Ended(process.returncode, out.decode(), err.decode())


@contextmanager
def ray_machines() -> Iterator[RayMachines]:
    folder = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
    try:
        with EmulatedCluster.up(parse(f"nodes={MACHINES}"), calibrate=False) as cluster:
            machines = RayMachines(cluster, folder)
            try:
                machines.start()
                yield machines
            finally:
                machines.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
