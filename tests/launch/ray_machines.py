"""A Ray cluster of three emulated machines, each with a raylet, one slot and a disk of its own."""

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

from launch.commands import HERE, TINY, Ended, flags
from paceline.cluster.emulated import EmulatedCluster
from paceline.cluster_spec import parse
from paceline.worker.checkpoint import iterations

MACHINES = 3
PORT = 6379
TRIES = 3
LIMIT_SECONDS = 240.0
"""Far more than anything takes here, where a run is a dozen processes on two cores."""


class RayMachines:
    """Commands here run on the first machine, but on a disk that no machine sees."""

    def __init__(self, cluster: EmulatedCluster, folder: Path) -> None:
        self.cluster = cluster
        self.out = folder / "runs"
        """The path of `--out`, behind which everybody has another folder."""
        self.out.mkdir()
        self.records = folder / "disk-driver"
        self.first_disk = folder / "disk-0"
        self._folder = folder
        self._variables = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A machine that is gone refuses to answer, and is asked often enough to be found out.
            "RAY_health_check_period_ms": "500",
            "OWN_SLEEP_SECONDS": "0.3",
            "RAY_ADDRESS": f"{cluster.addresses[0]}:{PORT}",
        }
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        # Sockets lie below it, whose paths may have 107 bytes.
        temporary = f"--temp-dir={self._folder}/ray"
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", temporary]
        self._start_raylets([0], head)
        joining = [f"--address={self.cluster.addresses[0]}:{PORT}"]
        self._start_raylets([*range(1, MACHINES)], joining)

    def _start_raylets(self, machines: list[int], words: Sequence[str]) -> None:
        """A raylet gives up after 30 s, which a machine with much other work may need."""
        late = machines
        for _ in range(TRIES):
            for machine in late:
                self.cut_off(machine)
                self._start_raylet(machine, words)
            wait_until(lambda: all(map(self._is_decided, machines)), "they have started or not")
            late = [machine for machine in machines if not self._has_started(machine)]
            if not late:
                return
        raise AssertionError("Ray does not start: this machine is too busy")

    def _start_raylet(self, machine: int, words: Sequence[str]) -> None:
        address = f"--node-ip-address={self.cluster.addresses[machine]}"
        fixed = ["--block", "--disable-usage-stats", "--num-cpus=1", address]
        memory = "--object-store-memory=80000000"
        program = str(Path(sys.executable).with_name("ray"))
        command = [program, "start", *fixed, memory, *words]
        with self._output(machine).open("wb") as output:
            self._raylets[machine] = self._run(machine, f"disk-{machine}", command, output)

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
        own = self._folder / disk
        own.mkdir(exist_ok=True)
        script = f"mount --bind {own} {self.out} && exec {shlex.join(words)}"
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
    def paceline(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command with `--launcher ray`, ended with the block."""
        command = [sys.executable, "-m", "paceline", *words, "--launcher", "ray", "--threads", "1"]
        process = self._run(0, "disk-driver", command, subprocess.PIPE)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            end_of(process)

    def train(self, name: str, **settings: Any) -> AbstractContextManager[subprocess.Popen[bytes]]:
        fixed = {"out": self.out, "name": name}
        return self.paceline("train", *flags({**TINY, **fixed, **settings}))

    def worker(self, rank: int) -> psutil.Process | None:
        """A worker's process; its parent is its machine's launcher, whose parent is the actor."""
        for machine in range(MACHINES):
            for pid in self.cluster.processes(machine):
                try:
                    process = psutil.Process(pid)
                    is_worker = "paceline.launch.child" in process.cmdline()
                    if is_worker and process.environ()["RANK"] == str(rank):
                        return process
                except (psutil.Error, KeyError):
                    continue
        return None

    def machine_of(self, process: psutil.Process) -> int:
        return next(
            machine for machine in range(MACHINES) if process.pid in self.cluster.processes(machine)
        )

    def cut_off(self, machine: int) -> None:
        """End all that runs on a machine, at once and for good."""
        for pid in self.cluster.processes(machine):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def posts(self) -> list[int]:
        """The actors of paceline that there are."""
        found = []
        for machine in range(MACHINES):
            for pid in self.cluster.processes(machine):
                with contextlib.suppress(psutil.Error):
                    if psutil.Process(pid).cmdline()[0].startswith("ray::Post"):
                        found.append(pid)
        return found

    def newest_checkpoint(self, name: str) -> int:
        """Of the run's first machine, which is the one that commands run on."""
        return max(iterations(self.first_disk / name / "checkpoints"), default=0)

    def close(self) -> None:
        self.cluster.down()
        for process in self._raylets.values():
            process.wait()


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
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
