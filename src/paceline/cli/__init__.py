"""The command line: one module per command with SUMMARY, configure(parser) and run(arguments).

Importing a command does not import torch; running it may.
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
from typing import NoReturn

from paceline import __version__
from paceline.child_process import exit_quickly
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
    "profile": "profile",
    "generate": "generate",
    "slurm": "slurm",
    "study": "study",
    "compare": "compare",
    "report": "report",
    "plan": "plan",
    "ui": "ui",
    "comm": "comm",
    "cluster": "cluster",
    "data": "data",
    # A submodule named list would shadow the builtin in this package.
    "list": "listing",
    "doctor": "doctor",
}
"""Commands and their modules."""
DEPENDENCIES = {
    "torch": "torch",
    "numpy": "numpy",
    "rich": "rich",
    "psutil": "psutil",
    "yaml": "pyyaml",
}
"""Required modules and their packages."""


def command() -> NoReturn:
    """Run a command as a program."""
    code = main()
    if "torch" in sys.modules:
        exit_quickly(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0: success, 1: a run failed, 2: invalid usage, 130: stopped."""
    _log_to_stderr()
    _replace_unencodable()
    try:
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        code: int = arguments.run(arguments)
        return code
    except PacelineError as error:
        if not error.already_reported:
            _print_error(str(error), is_failure=not isinstance(error, StoppedError))
        return error.exit_code
    except ModuleNotFoundError as error:
        package = DEPENDENCIES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        install = shlex.join([sys.executable, "-m", "pip", "install", package])
        _print_error(f"{package} is not installed: install it with `{install}`")
        return UsageError.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted", is_failure=False)
        return StoppedError.exit_code
    except BrokenPipeError:
        # The reader of the output exited, as in `paceline list | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Any path of a command can be too long or a link to itself.
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        _print_error(f"{os.strerror(error.errno)}: {shown(error.filename)}")
        return UsageError.exit_code


def _replace_unencodable() -> None:
    """Print characters that the terminal cannot encode as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Fails if the file of the stream has been replaced by a pipe.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="replace")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="paceline", description="Data-parallel training that measures itself.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Import only the requested command; help lists all.
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


def _print_error(message: str, *, is_failure: bool = True) -> None:
    """Print a message to stderr; `is_failure` is False if the user stopped the command."""
    prefix = ERROR_PREFIX if is_failure else "paceline: "
    for line in message.splitlines() or [""]:
        sys.stderr.write(f"{prefix}{one_line(line)}\n")


class _StderrHandler(logging.Handler):
    """Prints log messages as lines for the user."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"paceline: {record.getMessage()}\n")


def _log_to_stderr() -> None:
    logger = logging.getLogger("paceline")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)
