"""Writes a document as Markdown, with figures in separate files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from paceline.report.document import (
    Block,
    BulletList,
    ChapterPage,
    Code,
    Details,
    Document,
    Figure,
    Section,
    Table,
    Tabs,
    Text,
)
from paceline.report.html import FIGURES


def to_markdown(document: Document, figures: str = FIGURES) -> str:
    """`figures`: the folder beside the file that holds them."""
    parts = [f"# {_plain(document.title)}", _plain(document.subtitle)]
    parts += _lead(document)
    parts += [f"## {document.headline_title}"]
    parts += [*(f"**{_plain(line)}**" for line in document.headline.split("\n"))]
    parts += map(_block, document.main_figures)
    if document.points:
        parts.append(
            "\n".join(
                f"- **{_plain(subject)}**: {_plain(text)}" for subject, text in document.points
            )
        )
    if document.next_steps:
        parts.append("What to try next:")
        parts.append("\n".join(f"- {_plain(step)}" for step in document.next_steps))
    single = len(document.chapters) == 1
    for chapter in document.chapters:
        if not single:
            parts.append(f"## {_plain(chapter.title)}")
            parts += _lead(chapter)
        for section in chapter.sections:
            parts += _section(section, 2 if single else 3)
    if document.skipped:
        parts.append("## Skipped records")
        parts.append("\n".join(f"- `{name}`: {_plain(why)}" for name, why in document.skipped))
    # Names of files may not be valid Unicode.
    text = "\n\n".join(parts).replace(f"]({FIGURES}/", f"]({figures}/")
    return f"{text}\n".encode("utf-8", "replace").decode()


def _lead(page: Document | ChapterPage) -> list[str]:
    return [_plain(text) for text in (page.about, page.stands_in, page.context) if text]


def _section(section: Section, level: int) -> list[str]:
    return [f"{'#' * level} {_plain(section.title)}", *map(_block, section.blocks)]


def _plain(text: str) -> str:
    """Escapes Markdown in names of runs."""
    pieces = " ".join(text.split()).split("`")
    # Nothing is special between backticks.
    return "`".join(
        piece if index % 2 else re.sub(r"([\\*_\[\]<>|])", r"\\\1", piece)
        for index, piece in enumerate(pieces)
    )


def _table(block: Table) -> str:
    rule = ["---" if index < block.text_columns else "---:" for index in range(len(block.columns))]
    head = [_plain(name) or " " for name in block.columns]
    rows = [[_plain(cell) for cell in row] for row in block.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _figure(block: Figure) -> str:
    return f"![{_plain(block.title)}]({FIGURES}/{block.name}.svg)"


def _items(block: BulletList) -> str:
    return "\n".join(
        f"- {f'**{_plain(lead)}** ' if lead else ''}{_plain(text)}" for lead, text in block.items
    )


def _fold(block: Details) -> str:
    return "\n\n".join([f"**{_plain(block.title)}**", *map(_block, block.blocks)])


def _tabs(block: Tabs) -> str:
    return "\n\n".join(_figure(figure) for _, figure in block.figures)


def _block(block: Block) -> str:
    return _WRITERS[type(block)](block)


_WRITERS: dict[type, Callable[[Any], str]] = {
    Text: lambda block: _plain(block.text),
    BulletList: _items,
    Table: _table,
    Figure: _figure,
    Tabs: _tabs,
    Code: lambda block: f"```\n{block.text}\n```",
    Details: _fold,
}
