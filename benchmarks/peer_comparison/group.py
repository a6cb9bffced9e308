"""The worker processes of each contender: started once, measured block by block."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import TypeVar

from paceline.strategies import STRATEGIES
from peer_comparison.messages import Answer, Hello, Prepared, Refusal, Request
from peer_comparison.rounds import Skipped, progress

BENCHMARKS = Path(__file__).parent.parent
START_LIMIT_SECONDS = 240.0
ANSWER_LIMIT_SECONDS = 180.0

TITLES = {
    "ddp": "torch DDP",
    "shared": "paceline shared",
    "overlap": "paceline overlap",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "mpi4py": "mpi4py",
    "apart": "no exchange",
    "single": "one process",
}
CONTENDERS = ("overlap", "ddp", "shared", "fabric", "accelerate", "deepspeed", "mpi4py")
"""In measurement order: paceline next to what it is compared with."""
PACKAGES = {
    "fabric": "lightning_fabric",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "mpi4py": "mpi4py",
}


class ContenderError(Exception):
    """A contender cannot run; the message is one line."""


def reason_for_absence(name: str) -> str | None:
    """The reason why a contender cannot start, or None."""
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed (see --setup)"
    if name == "mpi4py" and mpirun() is None:
        return "there is no mpirun"
    if name in ("shared", "overlap") and name not in STRATEGIES.names():
        return "this paceline has no such strategy"
    return None


def mpirun() -> str | None:
    """Prefer the mpirun next to this Python."""
    return shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


class Group:
    """The workers of one contender."""

    def __init__(self, name: str, world_size: int, threads: int = 1) -> None:
        self.name = name
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-peers-")
        self._log = Path(self._folder.name) / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self.pids: list[int] = []
        """Process ids of the workers, by rank."""
        try:
            with progress(f"starting {world_size} x {TITLES[name]}"):
                self._start(threads)
        except BaseException:
            self.close()
            raise

    def _start(self, threads: int) -> None:
        address = f"{self._folder.name}/line"
        command = [sys.executable, "-m", "peer_comparison.worker", self.name, address]
        environment = worker_environment(self.world_size, threads)
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(address)
            listener.listen(self.world_size)
            listener.settimeout(0.5)
            if self.name == "mpi4py":
                self._launch([*mpi_launcher(self.world_size), *command], environment, log.fileno())
            else:
                for rank in range(self.world_size):
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    self._launch(command, environment | own, log.fileno())
            self._accept(listener)

    def _launch(self, command: list[str], environment: dict[str, str], log: int) -> None:
        self._processes.append(
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        )

    def _accept(self, listener: socket.socket) -> None:
        deadline = monotonic() + START_LIMIT_SECONDS
        hellos: dict[int, tuple[Connection, int]] = {}
        while len(hellos) < self.world_size:
            if any(process.poll() is not None for process in self._processes):
                raise ContenderError(f"did not start: {self._last_words()}")
            if monotonic() > deadline:
                raise ContenderError(f"did not start within {START_LIMIT_SECONDS:g} s")
            try:
                line, _ = listener.accept()
            except TimeoutError:
                continue
            line.setblocking(True)
            pipe: Connection = Connection(line.detach())
            hello = pipe.recv()
            assert isinstance(hello, Hello)
            hellos[hello.rank] = pipe, hello.pid
        for _, (pipe, pid) in sorted(hellos.items()):
            self._pipes.append(pipe)
            self.pids.append(pid)

    def seconds(self, request: Request) -> float:
        """The mean of the workers' measurements."""
        return statistics.fmean(answer for answer in self.ask(request) if isinstance(answer, float))

    def prepared(self, request: Request) -> Prepared:
        """The mean over the workers."""
        answers = [answer for answer in self.ask(request) if isinstance(answer, Prepared)]
        return Prepared(
            statistics.fmean(answer.first_loss for answer in answers),
            statistics.fmean(answer.last_loss for answer in answers),
            statistics.fmean(answer.update_seconds for answer in answers),
        )

    def ask(self, request: Request) -> list[Answer]:
        self.send(request)
        return self.answers()

    def send(self, request: Request) -> None:
        try:
            for pipe in self._pipes:
                pipe.send(request)
        except OSError:
            raise ContenderError(f"a worker ended: {self._last_words()}") from None

    def is_busy(self, seconds: float) -> bool:
        """Whether a worker has not answered within the limit."""
        return len(wait(self._pipes, seconds)) < len(self._pipes)

    def answers(self) -> list[Answer]:
        deadline = monotonic() + ANSWER_LIMIT_SECONDS
        answers: list[Answer] = []
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline - monotonic())):
                raise ContenderError(f"no answer within {ANSWER_LIMIT_SECONDS:g} s")
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                raise ContenderError(f"a worker ended: {self._last_words()}") from None
            if isinstance(answer, Refusal):
                raise ContenderError(answer.reason)
            answers.append(answer)
        return answers

    def _last_words(self) -> str:
        return last_words(self._log.read_text(errors="replace"))

    def hang_up(self) -> None:
        """Ask the workers to exit without waiting for them."""
        for pipe in self._pipes:
            pipe.close()

    def close(self) -> None:
        self.hang_up()
        deadline = monotonic() + 10.0
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                end(process)
        self._folder.cleanup()


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate gracefully first, so that a launcher stops its own children."""
    process.terminate()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def worker_environment(world_size: int, threads: int) -> dict[str, str]:
    """The variables of torch launchers, restricted to the loopback device."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    bins = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join(bins),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": extensions_folder(sys.prefix),
        # Lets Open MPI run as root in a container; other MPIs ignore these.
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def extensions_folder(prefix: str) -> str:
    """Folder of DeepSpeed's compiled extensions, inside its environment."""
    return str(Path(prefix) / "torch-extensions")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mpi_launcher(world_size: int) -> list[str]:
    program = mpirun()
    assert program is not None
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    options = ["-n", str(world_size)]
    if "Open MPI" in version.stdout:
        # Oversubscription is intended; workers use shared memory, never the network.
        options += ["--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm"]
    return [program, *options]


def last_words(log: str) -> str:
    """The line of a log that best explains why a program ended."""
    spoken = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in spoken if "Error" in line]
    return (errors or spoken or ["no word of why"])[-1]


Result = TypeVar("Result")


class Fleet:
    """Groups of the same world size, started on first use; groups that fail are skipped."""

    def __init__(self, world_size: int, skipped: Skipped) -> None:
        self.world_size = world_size
        self.skipped = skipped
        self._groups: dict[str, Group] = {}
        self._out: set[str] = set()

    def starting(self, names: Sequence[str]) -> list[str]:
        """Start the groups and return the names of those that run."""
        for name in names:
            if name not in self._groups and name not in self._out:
                reason = reason_for_absence(name)
                try:
                    if reason is not None:
                        raise ContenderError(reason)
                    self._groups[name] = Group(name, self.world_size)
                except ContenderError as error:
                    self._leave_out(name, error)
        return [name for name in names if name in self._groups]

    def attempt(self, name: str, action: Callable[[Group], Result]) -> Result | None:
        """Call `action` on a group; a group that fails returns None and is skipped from then on."""
        try:
            return action(self._groups[name])
        except ContenderError as error:
            self._leave_out(name, error)
            self._groups.pop(name).close()
            return None

    def _leave_out(self, name: str, error: ContenderError) -> None:
        self._out.add(name)
        self.skipped.add(TITLES[name], f"{self.world_size} workers", str(error))

    def close(self) -> None:
        for group in self._groups.values():
            group.hang_up()
        for group in self._groups.values():
            group.close()
        self._groups.clear()
