"""Transfer of a run folder between machines as a tar stream, both ends.

`upload` and `download` run on the launcher. On the other machine they start
`python -m paceline.launch.remote.folder_transfer take` or `send`, whose first line of input names
the folder and whose first line of output is its state. Only regular files with plain names are
sent or accepted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from threading import Timer
from time import monotonic
from typing import IO, Any

from paceline.config import RunConfig, fields, from_record, option_of
from paceline.errors import ERROR_PREFIX, RecordsError, RunError, UsageError
from paceline.launch.fork_server import ChildProcess
from paceline.launch.remote.control_channel import read_request, report_errors
from paceline.launch.remote.machines import Machines
from paceline.records import LAUNCHER_FILES, LOCATION_FIELDS, RunFolder

MAX_DEPTH = 6
"""Maximum depth of folders; a run needs far less."""


Progress = Callable[[int], None]
"""Gets the number of bytes received so far."""


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a run to transfer, relative to its folder."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        is_regular = path.is_file() and not path.is_symlink()
        if is_regular and not is_hidden and not path.name.startswith(LAUNCHER_FILES):
            yield name


def size_of(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in files_of(folder))


def pack(folder: Path, out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in files_of(folder):
            with (folder / name).open("rb") as file:
                entry = tarfile.TarInfo(str(PurePosixPath(name)))
                entry.size = os.fstat(file.fileno()).st_size
                # A file that grows meanwhile is sent with this size.
                archive.addfile(entry, file)


def unpack(source: IO[bytes], folder: Path, progress: Progress, replace: bool = True) -> int:
    """Write received files into a folder, each atomically; returns how many.

    Without `replace`, existing files stay. Of JSON-lines files, which only grow, the longer one is
    kept in any case.
    """
    count = done = 0
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for entry in archive:
                contents = archive.extractfile(entry) if entry.isreg() else None
                if contents is None or not is_plain(entry.name):
                    raise RecordsError(f"rejected {entry.name!r}: not a file of a run")
                target = folder / entry.name
                if _is_wanted(target, entry.size, replace):
                    _write(target, contents)
                    count += 1
                done += entry.size
                progress(done)
    except (tarfile.TarError, ValueError, EOFError) as error:
        # A forged header makes tarfile raise other errors than its own.
        raise RecordsError(f"the records are damaged or incomplete ({error})") from None
    except OSError as error:
        raise RecordsError(f"cannot write to {folder}: {error.strerror or error}") from None
    return count


def _is_wanted(target: Path, size_bytes: int, replace: bool) -> bool:
    if target.suffix == ".jsonl" and target.exists():
        return target.stat().st_size < size_bytes
    return replace or not target.exists()


def is_plain(name: str) -> bool:
    """Whether a name is a relative path inside the folder."""
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(
        part and part.isprintable() and not part.startswith(".") and "\\" not in part
        for part in parts
    )


def _write(target: Path, contents: IO[bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("wb") as file:
            shutil.copyfileobj(contents, file)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def main(action: str) -> None:
    """On the other machine: `send` or `take` the folder that the first line of the input names.

    The line holds `folder`, a path on that machine; `identity` of the launcher's folder, or None;
    and for `take` the run's `config`. The answer holds `state`: same (nothing follows), absent,
    other (a different run) or ready.
    """
    request = read_request()
    folder = RunFolder(Path(request["folder"]))
    state = _state(folder, request)
    size = size_of(folder.path) if state == "ready" and action == "send" else 0
    answer = {"state": state, "bytes": size, "path": str(folder.path.absolute())}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
    if action == "send" and state == "ready":
        pack(folder.path, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    elif action == "take" and state in ("ready", "absent"):
        # A run that is active there must not be overwritten.
        with folder.locked() if state == "ready" else contextlib.nullcontext():
            unpack(sys.stdin.buffer, folder.path, lambda _: None)


def _state(folder: RunFolder, request: dict[str, Any]) -> str:
    if not folder.config_file.is_file():
        return "absent"
    if folder.identity() == request["identity"]:
        return "same"
    config = request.get("config")
    if config is not None and not _is_same_run(folder.read_config(), from_record(config)):
        return "other"
    return "ready"


def _is_same_run(one: RunConfig, other: RunConfig) -> bool:
    """Whether two configurations agree on everything that a resumed run keeps."""
    kept = [
        item.name
        for item in fields()
        if not option_of(item).mutable_on_resume
        and item.name not in (*LOCATION_FIELDS, "batch_size", "batch_per_worker")
    ]
    return one.global_batch_size == other.global_batch_size and all(
        getattr(one, name) == getattr(other, name) for name in kept
    )


ANSWER_SECONDS = 30.0
"""How long a machine may take to answer with the state of a folder."""
SHOW_SECONDS = 0.5

logger = logging.getLogger("paceline")


def download(
    machines: Machines, node: int, path: str, folder: RunFolder, replace: bool = True
) -> bool:
    """Download a node's records into a folder; False if the node has none.

    Does nothing if both are the same folder. Without `replace`, only missing files.
    """
    with _transfer(machines, node, "send", {"folder": path, "identity": _identity(folder)}) as (
        process,
        answer,
    ):
        if answer["state"] != "ready":
            return bool(answer["state"] == "same")
        assert process.stdout is not None
        unpack(
            process.stdout, folder.path, _shown(answer["bytes"], machines.addresses[node]), replace
        )
        return True


def upload(machines: Machines, node: int, path: str, folder: RunFolder) -> bool:
    """Upload the run to resume to a node; returns whether the node shares `folder`."""
    request = {
        "folder": path,
        "identity": _identity(folder),
        "config": folder.read_config().to_dict(),
    }
    with _transfer(machines, node, "take", request) as (process, answer):
        if answer["state"] == "other":
            raise UsageError(
                f"{machines.addresses[node]}: {answer['path']} is a different run: move it away"
            )
        if answer["state"] != "same":
            assert process.stdin is not None
            # A node that cannot receive it reports why.
            with contextlib.suppress(BrokenPipeError):
                pack(folder.path, process.stdin)
        return bool(answer["state"] == "same")


def _identity(folder: RunFolder) -> list[int | str] | None:
    return folder.identity() if folder.config_file.is_file() else None


@contextlib.contextmanager
def _transfer(
    machines: Machines, node: int, action: str, request: dict[str, Any]
) -> Iterator[tuple[ChildProcess, dict[str, Any]]]:
    argv = [machines.python, "-m", "paceline.launch.remote.folder_transfer", action]
    process = machines.start(node, argv, json.dumps(request).encode() + b"\n")
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = Timer(ANSWER_SECONDS, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise RunError(_error_message(process) or f"no answer from {machines.addresses[node]}")
        yield process, _answer(line, machines.addresses[node])
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        message = _error_message(process)
        if process.wait():
            raise RecordsError(
                f"{machines.addresses[node]}: {message or 'the records did not arrive'}"
            )
    finally:
        watchdog.cancel()
        watchdog.join()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                pipe.close() if pipe else None


def _answer(line: bytes, address: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line)
        kinds = {"state": str, "bytes": int, "path": str}
        if isinstance(answer, dict) and all(
            isinstance(answer.get(name), kind) for name, kind in kinds.items()
        ):
            return answer
    raise RunError(
        f"{address}: unexpected answer {line.decode(errors='replace').strip()!r:.80}: does a shell"
        " start-up file there print something?"
    )


def _error_message(process: ChildProcess) -> str:
    """The error that the process reported, otherwise its last line of output."""
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    return (errors or lines or [""])[-1]


def _shown(total_bytes: int, address: str) -> Progress:
    """Shows the progress on a terminal."""
    began = shown = monotonic()

    def show(done_bytes: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and monotonic() - shown > SHOW_SECONDS:
            shown = monotonic()
            part = f"{done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"
            sys.stderr.write(f"\r\x1b[2Kdownloading the records from {address}: {part}")
        if done_bytes >= total_bytes and shown > began:
            sys.stderr.write("\r\x1b[2K")

    return show


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1])))
