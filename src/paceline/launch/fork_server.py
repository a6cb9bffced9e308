"""A fork server: a process that has imported torch forks Python programs that need not.

Importing torch takes more than a second of CPU time in every process, and ten on a tenth of a core.
A fork server has imported torch and the programs of this package, has no threads and has computed
nothing, so its forks behave like new processes: each runs `python -m MODULE ARGUMENTS` as a child
of the process that asked for it, with the environment, folder and files that it names.

    with ForkServer.fork() as server:
        process = start_python(server, ["-m", "paceline.launch.child_main", "worker", ...])

`start_python` starts a new interpreter instead if there is no server: on systems other than Linux,
or in a process that had threads before it could fork its server.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import json
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, Self

from paceline.child_process import die_with_parent, exit_quickly, pythonpath, tied_command

PRELOADED = (
    "paceline.commbench.runner",
    "paceline.launch.launcher",
    "paceline.report.summary",
    "paceline.strategies.gradient_averaging",
    # For DistributedDataParallel, and for --compile.
    "torch._dynamo",
)
"""What a new server imports: commands, nodes and workers, with torch."""

MESSAGE_BYTES = 1 << 20
MAX_FILES = 253
"""As many as the kernel passes with a message."""
ADOPTION_SECONDS = 20.0
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
_POLL_SECONDS = 0.001
_MAX_POLL_SECONDS = 0.02

_libc = ctypes.CDLL(None)


class ChildProcess(Protocol):
    """What `subprocess.Popen` and `ForkedProcess` have in common."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


class ForkedProcess:
    """A child of this process that a fork server has forked."""

    def __init__(self, pid: int, pipes: Mapping[int, IO[bytes]]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = map(pipes.get, range(3))

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _POLL_SECONDS
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Handle of a fork server, which ends with the handle or with this process."""

    def __init__(self, connection: socket.socket, process: ChildProcess) -> None:
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()

    @classmethod
    def fork(cls) -> Self | None:
        """Make a copy of this process a fork server; None if that would not be safe.

        Call it as soon as torch is imported: a thread, or an operator that has started some, rules
        it out.
        """
        torch = sys.modules.get("torch")
        has_gpu_state = torch is not None and torch.cuda.is_initialized()
        if not sys.platform.startswith("linux") or threading.active_count() > 1 or has_gpu_state:
            return None
        _keep_exit_codes()
        _flush()
        parent = os.getpid()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except OSError:
            return None
        if pid == 0:
            # Whatever happens, the frames of the launcher must not continue in its copy.
            try:
                _become_server(theirs, parent)
            finally:
                os._exit(1)
        theirs.close()
        server = cls(ours, ForkedProcess(pid, {}))
        # OpenBLAS ends its threads for a fork and restarts them on demand; other libraries do not,
        # and a fork would have copied the locks that their threads held.
        if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 (only the number)
            server.close()
            return None
        return server

    @classmethod
    def spawn(cls) -> Self | None:
        """Start a new process, which imports torch in the meantime; None if that is impossible."""
        if not sys.platform.startswith("linux"):
            return None
        _keep_exit_codes()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno())],
                    env={**os.environ, "PYTHONPATH": pythonpath()},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                return None
        return cls(ours, process)

    def start(
        self,
        arguments: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        folder: Path,
        death_signal: signal.Signals | None,
        files: Sequence[int],
    ) -> int:
        """Fork a program and return its pid; OSError if there is no server or no process.

        The first three `files` are the standard ones; the program inherits the others.
        """
        request = {
            "module": arguments[1],
            "arguments": list(arguments[2:]),
            "environment": dict(environment),
            "folder": str(folder),
            "parent": os.getpid(),
            "death_signal": death_signal,
            "name": name,
        }
        with self._lock, _adopting_orphans():
            if self._connection.fileno() < 0:
                raise ConnectionError("the fork server has ended")
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], list(files))
                answer = self._connection.recv(64)
            except BaseException:
                # After a signal, the next request would get the answer to this one.
                self.close()
                raise
        if not answer:
            raise ConnectionError("the fork server has ended")
        if int(answer) < 0:
            raise OSError(-int(answer), os.strerror(-int(answer)))
        return int(answer)

    def close(self) -> None:
        """End the server, which does not end its programs; idempotent."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_python(
    server: ForkServer | None,
    arguments: Sequence[str],
    *,
    name: str = "python",
    environment: Mapping[str, str] | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    death_signal: signal.Signals | None = None,
    inherited: Sequence[int] = (),
) -> ChildProcess:
    """Start `python -m ...` in a session of its own, from the server if there is one.

    `death_signal` is what the child gets when this process ends. `name` is its name in process
    lists. `inherited` are further open files for it. OSError if the system starts no process.
    """
    environment = {**(os.environ if environment is None else environment)}
    environment["PYTHONPATH"] = pythonpath()
    files = (stdin, stdout, stderr)
    if server is not None and arguments[0] == "-m":
        pipes: dict[int, IO[bytes]] = {}
        try:
            with contextlib.ExitStack() as stack:
                theirs = [_file(file, number, pipes, stack) for number, file in enumerate(files)]
                pid = server.start(
                    arguments,
                    name=name,
                    environment=environment,
                    folder=Path.cwd(),
                    death_signal=death_signal,
                    files=[*theirs, *inherited],
                )
            return ForkedProcess(pid, pipes)
        except OSError as error:
            for pipe in pipes.values():
                pipe.close()
            # The server was killed, or the environment is too large for a message.
            if not isinstance(error, ConnectionError) and error.errno != errno.EMSGSIZE:
                raise
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command if death_signal is None else tied_command(death_signal, command),
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=inherited,
        start_new_session=True,
    )


def inheritable_files() -> list[int]:
    """Open files, without the standard ones, that are marked for child processes."""
    files = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 (numbers)
    return [file for file in files if file > 2 and _is_inheritable(file)]


def _is_inheritable(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:  # the listing's own
        return False


def _file(
    requested: int | None, number: int, pipes: dict[int, IO[bytes]], stack: contextlib.ExitStack
) -> int:
    """The file for standard file `number` of a program; our end of a pipe goes into `pipes`."""
    if requested is None:
        return number
    if requested == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        return null
    if requested != subprocess.PIPE:
        return requested
    reader, writer = os.pipe()
    theirs, ours = (reader, writer) if number == 0 else (writer, reader)
    stack.callback(os.close, theirs)
    pipes[number] = open(ours, "wb" if number == 0 else "rb")  # noqa: SIM115, PTH123
    return theirs


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make orphaned descendants children of this process."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _keep_exit_codes() -> None:
    """Undo what some programs pass on: a process that ignores SIGCHLD cannot wait for children."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _become_server(connection: socket.socket, parent: int) -> NoReturn:
    """Turn a fork of a launcher into a server: it keeps nothing of it but what was imported."""
    die_with_parent(parent)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    keep = connection.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    _serve(connection)


def _serve(connection: socket.socket) -> NoReturn:
    """Fork a program per request until the connection closes."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    _libc.prctl(PR_SET_NAME, b"fork server", 0, 0, 0)
    # Programs must not collect, and thereby close, what the launcher's frames refer to.
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_FILES)
        if not message:
            os._exit(0)
        try:
            answer = _fork_orphan()
        except OSError as error:
            answer = -(error.errno or 1)
        if answer == 0:
            connection.close()
            if not is_ignored:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            _run(json.loads(message), files)
        for file in files:
            os.close(file)
        connection.send(str(answer).encode())


def _fork_orphan() -> int:
    """Fork a child that becomes an orphan, so that the nearest subreaper adopts it."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            child = os.fork()
        except OSError as error:
            child = -(error.errno or 1)
        if child:
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        return 0
    os.close(writer)
    child = int(os.read(reader, 64))
    os.close(reader)
    os.waitpid(between, 0)
    return child


def _run(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Run a program and exit, without returning to the frames of the launcher."""
    code = 1
    try:
        _become(request, files)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    exit_quickly(code)


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Take on what a new process would have."""
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != request["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(_POLL_SECONDS)
    if request["death_signal"] is not None:
        die_with_parent(request["parent"], signal.Signals(request["death_signal"]))
    os.setsid()
    _libc.prctl(PR_SET_NAME, request["name"].encode(), 0, 0, 0)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _reopen_streams()
    listed = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # As an interpreter does; an entry may be relative.
    searched = [os.path.abspath(path) for path in listed]  # noqa: PTH100
    first = [] if sys.flags.safe_path else [request["folder"]]
    # The first entry is the folder of the server's own program.
    rest = sys.path if sys.flags.safe_path else sys.path[1:]
    others = (path for path in rest if os.path.abspath(path) not in searched)  # noqa: PTH100
    sys.path[:] = [*first, *searched, *others]
    sys.argv[:] = [request["module"], *request["arguments"]]
    log = logging.getLogger("paceline")
    log.handlers.clear()
    log.setLevel(logging.NOTSET)
    _reseed()


def _reseed() -> None:
    """Give the global random generators a state of their own: unseeded forks would agree."""
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _reopen_streams() -> None:
    """Make the standard streams fit their files, as an interpreter does when it starts."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        before = getattr(sys, name)
        is_lines = number == 2 or os.isatty(number)
        stream = open(  # noqa: SIM115
            number,
            mode,
            buffering=1 if is_lines else -1,
            encoding=getattr(before, "encoding", "utf-8"),
            errors="backslashreplace" if number == 2 else getattr(before, "errors", "strict"),
            closefd=False,
        )
        if number and os.environ.get("PYTHONUNBUFFERED"):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main(arguments: list[str]) -> NoReturn:
    parent, connection = map(int, arguments)
    die_with_parent(parent)
    for module in PRELOADED:
        __import__(module)
    _serve(socket.socket(fileno=connection))


if __name__ == "__main__":
    main(sys.argv[1:])
