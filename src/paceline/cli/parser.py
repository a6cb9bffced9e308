"""An argparse parser whose errors are one line with the fix, without the usage."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from paceline.errors import UsageError, bare, shown, suggest

_MISSING = re.compile(r"the following arguments are required: (?P<names>.*)")
_OF_ARGUMENT = re.compile(r"argument (?P<name>\S+): (?P<what>.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: (?P<value>.*) \(choose from", re.DOTALL)
_NUMBER = re.compile(r"invalid int value: (?P<value>.*)")
_NO_VALUE = re.compile(r"ignored explicit argument (?P<value>.*)")


class Parser(argparse.ArgumentParser):
    """The parser of commands and their actions."""

    def __init__(self, **keywords: Any) -> None:
        # An abbreviated flag would become ambiguous when another flag is added.
        super().__init__(**{**keywords, "allow_abbrev": False})
        # argparse takes only -3 and -0.3 for values; -3:5 and -1e-3 would be unknown flags.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        raise UsageError(self._rephrase(message))

    def unknown(self, argument: str) -> NoReturn:
        """Raise the error for an unknown argument."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {shown(argument)}: see `{self.prog} --help`")
        flag = argument.partition("=")[0]
        names = [name[2:] for name in self._flags() if name.startswith("--")]
        near = [name for name in names if name.startswith(flag[2:])] if flag[2:] else []
        near = near[:3] or difflib.get_close_matches(flag.lstrip("-"), names, n=1)
        similar = " or ".join(f"--{name}" for name in near)
        hint = f"did you mean {similar}?" if similar else f"see `{self.prog} --help`"
        self.error(f"unknown flag {bare(flag)}: {hint}")

    def _flags(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._flags()

    def _rephrase(self, message: str) -> str:
        if missing := _MISSING.fullmatch(message):
            action = self._action(missing["names"].partition(", ")[0])
            return f"{self.prog} needs {_name(action)}: {_expected(action)}" if action else message
        of_argument = _OF_ARGUMENT.fullmatch(message)
        action = self._action(of_argument["name"]) if of_argument else None
        return _explain(action, of_argument["what"]) if of_argument and action else message

    def _action(self, shown: str) -> argparse.Action | None:
        """Return the action that argparse calls by a name such as `-o/--options` or `PATH`."""
        return next(
            (
                action
                for action in self._actions
                if shown in (_name(action), "/".join(action.option_strings))
            ),
            None,
        )


def _explain(action: argparse.Action, what: str) -> str:
    name = _name(action)
    if choice := _CHOICE.match(what):
        value = _unquote(choice["value"])
        if action.option_strings:
            return f"{name}: must be {_expected(action)}, got {shown(value)}"
        known = map(str, action.choices or ())
        return f"unknown {name.lower()} {shown(value)}: {suggest(value, known)}"
    if number := _NUMBER.match(what):
        return f"{name}: must be a whole number, got {shown(_unquote(number['value']))}"
    if value_match := _NO_VALUE.match(what):
        return f"{name}: takes no value, got {shown(_unquote(value_match['value']))}"
    if what.startswith("expected"):
        return f"{name} needs a value: {_expected(action)}"
    return f"{name}: {what}"


def _unquote(quoted: str) -> str:
    """Return the text of a Python literal in argparse's message."""
    try:
        return str(ast.literal_eval(quoted))
    except (SyntaxError, ValueError):
        return quoted


def _name(action: argparse.Action) -> str:
    if action.option_strings:
        return action.option_strings[0]
    return action.metavar if isinstance(action.metavar, str) else action.dest


def _expected(action: argparse.Action) -> str:
    if action.choices:
        return f"one of {', '.join(map(str, action.choices))}"
    return re.sub(r" \(default: .*\)$", "", action.help or "").replace("%%", "%")
