"""All exceptions that paceline raises.

`UsageError` and its subclasses are errors that a user can fix: the command line prints one line for
each problem and exits with 2. `RunError` and its subclasses end a run that has started: it exits
with 1 and keeps the records.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence


class PacelineError(Exception):
    """Base class; its message is for the user, without a traceback."""

    exit_code = 1
    is_secondary = False
    """Whether it is only a consequence of another worker's failure."""
    already_reported = False
    """Whether another process has reported it to the user."""


class UsageError(PacelineError):
    """A request that cannot be fulfilled; its message is one line."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class ConfigError(UsageError):
    """Invalid values: all problems together."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(one_line, problems))
        # UsageError.__init__ would escape the line breaks between problems.
        PacelineError.__init__(self, "\n".join(self.problems))

    @classmethod
    def from_text(cls, text: str) -> ConfigError:
        """Create the error from text with one problem per line, as another process reported it."""
        problems = few_lines(text).splitlines()
        return cls(problems or ["the configuration was rejected without a reason"])


class UnknownNameError(UsageError):
    """A name that is not registered."""


class UserCodeError(UsageError):
    """A `package.module:name` that cannot be loaded or has the wrong type."""


class SharedMemoryUnavailableError(UsageError):
    """Workers cannot share memory: `reason` says why, `hint` what to change."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}: {hint}")
        self.reason, self.hint = reason, hint


class DataError(UsageError):
    """A dataset that is missing, damaged or unexpected."""


class RecordsError(UsageError):
    """Records that cannot be read or written."""


class MissingRecordError(RecordsError):
    """A record that does not exist."""


class DamagedRecordError(RecordsError):
    """A file that is not a valid record."""


class NewerSchemaError(RecordsError):
    """A record of a newer version of paceline."""


class CheckpointError(UsageError):
    """No checkpoint to resume from."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with damaged contents: retrying cannot help."""


class ClusterError(UsageError):
    """An emulated cluster that cannot be created, found or used."""


class NoPredictionError(UsageError):
    """A strategy that cannot be planned as requested; others may."""


class MissingMeasurementError(NoPredictionError):
    """A plan that needs something that was not measured."""

    def __init__(self, missing: str, measure: str) -> None:
        super().__init__(f"cannot plan: {missing} is not known: add {measure}")


class RunError(PacelineError):
    """A failure of a run that has started."""


class DivergedError(RunError):
    """The loss became NaN or infinite."""


class PeerError(RunError):
    """A peer disconnected or timed out: often the consequence of a failure elsewhere."""

    is_secondary = True
    noticed_at: float | None = None
    """Unix time, if the loss was noticed earlier than the error is raised."""


class StoppedError(RunError):
    """The run was stopped by Ctrl-C or a termination signal."""

    exit_code = 130


class AgreedStopError(StoppedError):
    """All workers stopped after the same iteration."""


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
"""Python rejects the conversion of integers with more than 4,300 digits to text."""


def shown(value: object) -> str:
    """Format a user's value for an error message: text is quoted and escaped; short, one line."""
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
    """Return a name or flag unquoted, unless it is long or has control characters."""
    return name if name.isprintable() and len(name) <= LONGEST_VALUE else shown(name)


def one_line(text: str) -> str:
    """Escape line breaks and other control characters, and limit the length."""
    text = text.rstrip("\n")
    if len(text) > 2 * LONGEST_LINE:
        # Only the ends are shown; escaping the middle could take long.
        text = text[:LONGEST_LINE] + text[-LONGEST_LINE:]
    line = _escaped(text)
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 4 :]}"


def few_lines(text: str) -> str:
    """Like `one_line` for each line, with a limited number of lines."""
    lines = [line for line in text.splitlines() if line]
    if len(lines) > MOST_LINES:
        omitted = len(lines) - MOST_LINES + 1
        lines[MOST_LINES - 1 :] = [f"... and {omitted:,} more lines"]
    return "\n".join(map(one_line, lines))


def error_line(error: BaseException) -> str:
    """Return the type and the first line of an exception from other code."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")


def whole_error_line(error: BaseException) -> str:
    """Return the type and the whole message of an exception from other code, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def suggest(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return a hint for an unknown name: similar names, else all names."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=most)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"choose from {', '.join(names)}" if names else "there are none"
