"""The fields of RunConfig as flags.

argparse only collects text: conversion and checking are config.from_mapping's, the same as for
study files, so that all problems are reported together and in the same words.

docs/config.md, written from the fields of RunConfig: `python -m paceline.cli.config_flags`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Collection
from typing import Any

from paceline.config import GROUPS, Option, fields, flag_of, option_of, type_of


def add_config_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """One flag for each field, under the heading of its group; a flag not given leaves no trace.

    `only`: the names of some fields, for a command that is not about training.
    """
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for item in fields():
        if only is not None and item.name not in only:
            continue
        option = option_of(item)
        names = [name for name in (option.short, flag_of(item.name)) if name]
        keywords: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS}
        if type_of(item) is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif type_of(item) == dict[str, str]:
            keywords |= {"action": "append", "metavar": "KEY=VALUE"}
        else:
            keywords["metavar"] = metavar(item)
        groups[option.group].add_argument(*names, help=describe(item), **keywords)


def add_control_flags(parser: argparse.ArgumentParser) -> None:
    """What a command that trains takes besides the settings of a run."""
    control = parser.add_argument_group("Control")
    control.add_argument(
        "--resume",
        metavar="RUN",
        help="resume the run in this folder from its newest checkpoint",
    )
    control.add_argument("--quiet", action="store_true", help="show no progress, only the summary")


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given on the command line, as text."""
    names = {item.name for item in fields()}
    return {name: value for name, value in vars(arguments).items() if name in names}


def metavar(item: dataclasses.Field[Any]) -> str:
    """What kind of value a field takes, in a word."""
    option, kind = option_of(item), str(type_of(item))
    if option.choices:
        return "|".join(option.choices) if "tuple" not in kind else ",".join(option.choices)
    if "Literal" in kind:
        return "N|epoch|never"
    if "int" in kind:
        return "N"
    if "float" in kind:
        return "X"
    return "A,B" if "tuple" in kind else "TEXT"


def describe(item: dataclasses.Field[Any]) -> str:
    """A field's line of documentation with its default, where that says something."""
    text = option_of(item).doc
    if item.default in (None, (), dataclasses.MISSING) or isinstance(item.default, bool):
        return text.replace("%", "%%")
    return f"{text} (default: {item.default})".replace("%", "%%")


HEAD = """# Settings of a run

Written by `make docs` from `src/paceline/config/`; do not edit. A setting has the same name as a
flag (`--batch-size`), as a key of a study file (`batch_size`) and as an argument of
`paceline.train`. Settings marked * can be changed when a run is resumed.
"""


def config_page() -> str:
    parts = [HEAD]
    for group, title in GROUPS.items():
        parts.append(f"\n## {title}\n\n| flag | value | default | meaning |\n|---|---|---|---|")
        parts += [_row(item) for item in fields() if option_of(item).group == group]
    return "\n".join(parts) + "\n"


def _row(item: dataclasses.Field[Any]) -> str:
    option = option_of(item)
    mark = " *" if option.mutable_on_resume else ""
    names = ", ".join(f"`{name}`" for name in (flag_of(item.name), option.short) if name)
    cells = (names + mark, _value(item, option), _default(item), option.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(item: dataclasses.Field[Any], option: Option) -> str:
    if type_of(item) is bool:
        return f"on, or off as `--no-{flag_of(item.name)[2:]}`"
    kind = "`KEY=VALUE`" if type_of(item) == dict[str, str] else f"`{metavar(item)}`"
    return ", ".join([kind, *option.input_limits.texts()])


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is dataclasses.MISSING or item.default in (None, ()):
        return ""
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    return f"`{item.default}`"


if __name__ == "__main__":
    sys.stdout.write(config_page())
