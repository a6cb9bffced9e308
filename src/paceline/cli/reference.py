"""docs/config.md, written from the fields of RunConfig: `python -m paceline.cli.reference`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from paceline.cli.flags import metavar
from paceline.config import GROUPS, Option, fields, flag_of, option_of, type_of

HEAD = """# Settings of a run

Written by `make docs` from `src/paceline/config/`; do not edit. A setting has the same name as a
flag (`--batch-size`), as a key of a study file (`batch_size`) and as an argument of
`paceline.train`. Settings marked * may differ when a run is resumed.
"""


def config_page() -> str:
    parts = [HEAD]
    for group, title in GROUPS.items():
        parts.append(f"\n## {title}\n\n| flag | value | default | meaning |\n|---|---|---|---|")
        parts += [_row(item) for item in fields() if option_of(item).group == group]
    return "\n".join(parts) + "\n"


def _row(item: dataclasses.Field[Any]) -> str:
    option = option_of(item)
    mark = " *" if option.may_change else ""
    names = ", ".join(f"`{name}`" for name in (flag_of(item.name), option.short) if name)
    cells = (names + mark, _value(item, option), _default(item), option.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(item: dataclasses.Field[Any], option: Option) -> str:
    if type_of(item) is bool:
        return f"on, or off as `--no-{flag_of(item.name)[2:]}`"
    kind = "`KEY=VALUE`" if type_of(item) == dict[str, str] else f"`{metavar(item)}`"
    return ", ".join([kind, *option.limits.texts()])


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is dataclasses.MISSING or item.default in (None, ()):
        return ""
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    return f"`{item.default}`"


if __name__ == "__main__":
    sys.stdout.write(config_page())
