"""Pages about one run, without columns and labels for comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.analysis.run_group import RunGroup
from paceline.report.document import Block, Details, Section, Table

CONFIGURATION = "configuration"
"""The first column of tables with a row per configuration begins with it."""
OF_SEVERAL = ("runs",)
"""Columns that are the same for every single run."""


SCRIPT_SECTIONS = (
    "post_mortem", "overview", "phases", "ranks", "timeline", "iteration_time", "traffic",
    "bandwidth", "resources", "curves", "configuration",
)  # fmt: skip
"""Of a page about one profiled script, which is about its time rather than its loss."""


def sections_of(groups: Sequence[RunGroup]) -> Sequence[str]:
    """The sections of a page about one run; empty for all."""
    return SCRIPT_SECTIONS if groups[0].settings.kind == "profile" else ()


def without_configurations(sections: Sequence[Section], label: str) -> list[Section]:
    """A table of one row becomes a list of names and values; others lose the label of the run."""
    return [replace(one, blocks=_simplified(one.blocks, label)) for one in sections]


def _simplified(blocks: Sequence[Block], label: str) -> list[Block]:
    return [_block(block, label) for block in blocks]


def _block(block: Block, label: str) -> Block:
    if isinstance(block, Details):
        return replace(block, blocks=_simplified(block.blocks, label))
    if isinstance(block, Table) and block.columns[0].startswith(CONFIGURATION):
        return _table(block, label)
    return block


def _table(block: Table, label: str) -> Table:
    heading = block.columns[0].removeprefix(CONFIGURATION).lstrip(", ")
    names = [row[0].removeprefix(label).lstrip(":, ") for row in block.rows]
    if len(block.rows) == 1:
        values = zip(block.columns[1:], block.rows[0][1:], strict=True)
        shown = [(name, text) for name, text in values if name not in OF_SEVERAL and text != "-"]
        return Table((names[0] or heading, ""), shown, is_facts=True)
    if not any(names):
        rows = [row[1:] for row in block.rows]
        return replace(
            block, columns=block.columns[1:], rows=rows, text_columns=block.text_columns - 1
        )
    rows = [(name, *row[1:]) for name, row in zip(names, block.rows, strict=True)]
    return replace(block, columns=(heading, *block.columns[1:]), rows=rows)
