"""The starter's side of launch/parcel.py: a run's folder, fetched from a node or sent to it."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from threading import Timer
from time import monotonic
from typing import Any

from paceline.errors import RecordsError, RunError, UsageError
from paceline.launch.fleet import Fleet
from paceline.launch.parcel import Progress, pack, unpack
from paceline.launch.starter import COMPLAINT
from paceline.records import RunFolder

ANSWER_SECONDS = 30.0
"""How long a machine may take to say how it stands with a folder there."""
SHOW_SECONDS = 0.5

logger = logging.getLogger("paceline")


def fetch(fleet: Fleet, node: int, path: str, folder: RunFolder, replace: bool = True) -> bool:
    """Bring a node's records into a folder here; False where the node has none.

    Where both are one folder there is nothing to do. Without `replace`, only what is missing here.
    """
    with _parcel(fleet, node, "send", {"folder": path, "identity": _identity(folder)}) as (
        process,
        answer,
    ):
        if answer["state"] != "ready":
            return bool(answer["state"] == "same")
        assert process.stdout is not None
        unpack(process.stdout, folder.path, _shown(answer["bytes"], fleet.addresses[node]), replace)
        return True


def deliver(fleet: Fleet, node: int, path: str, folder: RunFolder) -> bool:
    """See to it that a node has the run that is to be resumed there; whether it shares `folder`."""
    request = {
        "folder": path,
        "identity": _identity(folder),
        "config": folder.read_config().to_dict(),
    }
    with _parcel(fleet, node, "take", request) as (process, answer):
        if answer["state"] == "other":
            raise UsageError(
                f"{fleet.addresses[node]}: {answer['path']} there is another run: move it away"
            )
        if answer["state"] != "same":
            assert process.stdin is not None
            # One that cannot take it says why.
            with contextlib.suppress(BrokenPipeError):
                pack(folder.path, process.stdin)
        return bool(answer["state"] == "same")


def _identity(folder: RunFolder) -> list[int | str] | None:
    return folder.identity() if folder.config_file.is_file() else None


@contextlib.contextmanager
def _parcel(
    fleet: Fleet, node: int, action: str, request: dict[str, Any]
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    words = [fleet.python, "-m", "paceline.launch.parcel", action]
    process = fleet.start(node, words, json.dumps(request).encode() + b"\n")
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = Timer(ANSWER_SECONDS, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise RunError(_complaint(process) or f"no answer from {fleet.addresses[node]}")
        yield process, _answer(line, fleet.addresses[node])
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        told = _complaint(process)
        if process.wait():
            raise RecordsError(f"{fleet.addresses[node]}: {told or 'the records did not arrive'}")
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


def _complaint(process: subprocess.Popen[bytes]) -> str:
    """Its error if it told one, or else the last line that it said."""
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    told = [line.removeprefix(COMPLAINT) for line in lines if line.startswith(COMPLAINT)]
    return (told or lines or [""])[-1]


def _shown(total_bytes: int, address: str) -> Progress:
    """Tells on a terminal how far it has come."""
    begun = shown = monotonic()

    def show(done_bytes: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and monotonic() - shown > SHOW_SECONDS:
            shown = monotonic()
            part = f"{done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"
            sys.stderr.write(f"\r\x1b[2Kfetching the records from {address}: {part}")
        if done_bytes >= total_bytes and shown > begun:
            sys.stderr.write("\r\x1b[2K")

    return show
