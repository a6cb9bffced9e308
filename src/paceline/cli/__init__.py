"""The command line: one file per command, each with SUMMARY, configure(parser) and run(arguments).

Nothing here imports torch; a command does so when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import logging
import os
import shlex
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.cli.parser import Parser
from paceline.errors import (
    ERROR_PREFIX,
    PacelineError,
    StoppedError,
    UsageError,
    one_line,
    shown,
    suggest,
)

COMMANDS = {
    "demo": "demo",
    "train": "train",
    "slurm": "slurm",
    "study": "study",
    "compare": "compare",
    "report": "report",
    "ui": "ui",
    "comm": "comm",
    "cluster": "cluster",
    "data": "data",
    # A submodule named list would hide Python's own in this package.
    "list": "listing",
    "doctor": "doctor",
}
"""Commands, and the modules they are in."""
DEPENDENCIES = {
    "torch": "torch",
    "numpy": "numpy",
    "rich": "rich",
    "psutil": "psutil",
    "yaml": "pyyaml",
}
"""Modules that paceline cannot do without, and the packages they come in."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0: done, 1: a run failed, 2: something to mend, 130: stopped."""
    _show_notices()
    _print_whatever_comes()
    try:
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        code: int = arguments.run(arguments)
        return code
    except PacelineError as error:
        if not error.already_reported:
            _complain(str(error), is_failure=not isinstance(error, StoppedError))
        return error.exit_code
    except ModuleNotFoundError as error:
        package = DEPENDENCIES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        install = shlex.join([sys.executable, "-m", "pip", "install", package])
        _complain(f"{package} is not installed: install it with `{install}`")
        return UsageError.exit_code
    except KeyboardInterrupt:
        _complain("interrupted", is_failure=False)
        return StoppedError.exit_code
    except BrokenPipeError:
        # The reader of our output has gone (`paceline list | head`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Any of a command's paths can be one that no file system takes.
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        _complain(f"{os.strerror(error.errno)}: {shown(error.filename)}")
        return UsageError.exit_code


def _print_whatever_comes() -> None:
    """A name that this terminal has no letters for must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Not where a pipe has taken the place of the file that the stream was made for.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="replace")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="paceline", description="Data-parallel training that measures itself.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Only the command at hand is imported; help shows them all.
    chosen = [argv[0]] if argv and argv[0] in COMMANDS else list(COMMANDS)
    for name in chosen:
        module = importlib.import_module(f"paceline.cli.{COMMANDS[name]}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.configure(command)
        command.set_defaults(run=module.run)
    if not argv:
        parser.print_help()
        parser.exit()
    if argv[0].startswith("-"):
        if argv[0] not in ("-h", "--help", "--version"):
            parser.unknown(argv[0])
    elif argv[0] not in COMMANDS:
        parser.error(f"unknown command {shown(argv[0])}: {suggest(argv[0], COMMANDS)}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        command.unknown(unknown[0])
    return arguments


def _complain(message: str, *, is_failure: bool = True) -> None:
    """`is_failure`: not where the user has asked for the end."""
    mark = ERROR_PREFIX if is_failure else "paceline: "
    for line in message.splitlines() or [""]:
        sys.stderr.write(f"{mark}{one_line(line)}\n")


class _Notices(logging.Handler):
    """What the library logs, such as that digits are being drawn, as lines for the user."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"paceline: {record.getMessage()}\n")


def _show_notices() -> None:
    logger = logging.getLogger("paceline")
    if not logger.handlers:
        logger.addHandler(_Notices())
        logger.setLevel(logging.INFO)
