"""Serving the live page: on the address asked for, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from paceline.errors import UsageError
from paceline.ui.app import make_app
from paceline.ui.library import Library

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
STOPPED_BY_CTRL_C = 130


def serve(folder: Path | str, host: str, port: int) -> None:
    library = Library(folder)
    listening = _listen(host, port)
    address = f"http://{host}:{listening.getsockname()[1]}/"
    sys.stdout.write(f"{library.root}\n{address}   (Ctrl-C ends it)\n")
    sys.stdout.flush()
    hosts = names_of(host, listening.getsockname()[0])
    app = make_app(library, hosts, is_closing=lambda: server.should_exit)
    # Whoever watches is let go of at once; a report that is being built is waited for so long.
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    server = _Server(config)
    with listening, contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    # Whoever presses it again while Python takes its leave is to see no traceback either.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second Ctrl-C ends it at once: there is nothing to be written that could be lost."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(STOPPED_BY_CTRL_C)
        super().handle_exit(sig, frame)


def names_of(host: str, address: str) -> list[str]:
    """By which the page may be asked for: as browsers write them, in small letters."""
    return [host.lower(), address, *(["localhost"] if address == LOOPBACK else [])]


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        raise UsageError(
            f"cannot listen on {host} port {port} ({reason}): choose another --port or --host"
        ) from None
    # By whatever words it was asked for: 0 and an empty name mean the same.
    if listening.getsockname()[0] == EVERYWHERE:
        listening.close()
        raise UsageError(
            f"--host {host}: anybody could ask for the page under any name: give the name or"
            " address by which it will be asked for"
        )
    return listening
