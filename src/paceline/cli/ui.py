"""`paceline ui`: serve the live page."""

from __future__ import annotations

import argparse
import contextlib
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import UsageError, shown

DEFAULT_FOLDER = "runs"
SUMMARY = "watch runs, read reports and compare in the browser"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", nargs="?", help="folder of runs (default: runs)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=8600, help="port; 0 for any free one (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port: must be 0 to 65535, got {shown(arguments.port)}")
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"the page needs {' and '.join(missing)}: pip install 'paceline[ui]'")
    from paceline.ui.server import serve

    if arguments.folder is None:
        # The first run may not have started yet.
        with contextlib.suppress(OSError):
            Path(DEFAULT_FOLDER).mkdir(exist_ok=True)
    serve(arguments.folder or DEFAULT_FOLDER, arguments.host, arguments.port)
    return 0
