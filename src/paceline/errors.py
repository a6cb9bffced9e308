"""Every error that paceline raises on purpose.

`UsageError` and its children are what a user can mend: the command line prints their message as it
is, one line for each problem, and exits with 2. `RunError` and its children end a run that had
started: exit code 1, with the records kept.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence


class PacelineError(Exception):
    """The root of the tree; its message is meant for the user, without a traceback."""

    exit_code = 1
    is_secondary = False
    """Whether it is only what was seen of another worker's ending."""
    already_reported = False
    """Whether another process tells the user about it, so that this one need not."""


class UsageError(PacelineError):
    """Something the user asked for cannot be done as asked; its message is always one line."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class ConfigError(UsageError):
    """Bad values, all that were found at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(one_line, problems))
        # Not UsageError's: it would escape the line breaks between the problems.
        PacelineError.__init__(self, "\n".join(self.problems))

    @classmethod
    def from_text(cls, text: str) -> ConfigError:
        """The error with this text, one problem per line, as another process reported it."""
        problems = few_lines(text).splitlines()
        return cls(problems or ["the configuration was rejected, and no reason was given"])


class UnknownNameError(UsageError):
    """A name that no registry entry has."""


class UserCodeError(UsageError):
    """A user's `package.module:name` that could not be loaded or is of the wrong kind."""


class SharedMemoryUnavailableError(UsageError):
    """Workers cannot share memory: `reason` says why, `hint` what to change."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}: {hint}")
        self.reason, self.hint = reason, hint


class DataError(UsageError):
    """A dataset that is missing, damaged or not what it should be."""


class RecordsError(UsageError):
    """A folder or file of records that cannot be read or written as asked."""


class MissingRecordError(RecordsError):
    """A record that does not exist."""


class DamagedRecordError(RecordsError):
    """A file that was read and is not a record."""


class NewerSchemaError(RecordsError):
    """A record of a newer version of paceline, which that version can read."""


class CheckpointError(UsageError):
    """No checkpoint that could be continued from."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that was read and is not what was written: no later attempt can use it."""


class ClusterError(UsageError):
    """An emulated cluster that cannot be made, found or used as asked."""


class RunError(PacelineError):
    """A run that had started and could not go on."""


class DivergedError(RunError):
    """The loss left the finite numbers."""


class PeerError(RunError):
    """A peer disconnected or timed out: often the consequence of a failure elsewhere."""

    is_secondary = True
    noticed_at: float | None = None
    """Unix time, if the loss was noticed earlier than the error is raised."""


class StoppedError(RunError):
    """Somebody asked the run to stop (Ctrl-C or a termination signal)."""

    exit_code = 130


class AgreedStopError(StoppedError):
    """All workers stopped after the same iteration, as they agreed to."""


ERROR_PREFIX = "paceline: error: "
"""Starts each line of an error message on the terminal."""


def from_exit_code(exit_code: int, text: str) -> PacelineError:
    """The error that another process reported as `text` before it exited with `exit_code`."""
    if exit_code == UsageError.exit_code:
        return ConfigError.from_text(text)
    return StoppedError(text) if exit_code == StoppedError.exit_code else RunError(text)


LONGEST_VALUE = 80
LONGEST_LINE = 2000
MOST_LINES = 20
LONGEST_NUMBER_BITS = 256
"""Python refuses to convert integers of more than 4,300 digits to text."""


def shown(value: object) -> str:
    """A user's value as error messages echo it: quoted if it is text, escaped, one line, short."""
    if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER_BITS:
        return f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"
    if isinstance(value, str):
        return _quoted(value)
    try:
        text = _escaped(repr(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _quoted(value: str) -> str:
    quotes = 2
    if len(value) <= LONGEST_VALUE and len(repr(value)) <= LONGEST_VALUE + quotes:
        return repr(value)
    head = value[: LONGEST_VALUE // 2]
    while len(repr(head)) > LONGEST_VALUE // 2 + quotes:
        head = head[:-1]
    return f"{head!r}... ({len(value):,} characters)"


def _escaped(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def bare(name: str) -> str:
    """A user's name or flag as it is; as `shown` where it is long or has control characters."""
    return name if name.isprintable() and len(name) <= LONGEST_VALUE else shown(name)


def one_line(text: str) -> str:
    """A message without line breaks and other control characters, of bounded length."""
    text = text.rstrip("\n")
    if len(text) > 2 * LONGEST_LINE:
        # Only the ends remain below; to escape what is between them could take long.
        text = text[:LONGEST_LINE] + text[-LONGEST_LINE:]
    line = _escaped(text)
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 4 :]}"


def few_lines(text: str) -> str:
    """A message that may have several lines, without control characters, of bounded length."""
    lines = [line for line in text.splitlines() if line]
    if len(lines) > MOST_LINES:
        left_out = len(lines) - MOST_LINES + 1
        lines[MOST_LINES - 1 :] = [f"... and {left_out:,} more lines"]
    return "\n".join(map(one_line, lines))


def error_line(error: BaseException) -> str:
    """What somebody else's exception says, short enough to stand in a message of ours."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def whole_error_line(error: BaseException) -> str:
    """All that somebody else's exception says, its lines joined."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def suggest(name: str, known: Iterable[str], most: int = 1) -> str:
    """A hint for a misspelt name, as the end of a message: what is near it, else all there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=most)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"choose from {', '.join(names)}" if names else "there are none"
