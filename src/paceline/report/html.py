"""Writes a document as one self-contained HTML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from itertools import groupby
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

FIGURES = "report-figures"
"""Folder beside the page, which figures link to if scripts are off."""


def to_html(document: Document, before: str = "") -> str:
    """`before` is HTML above the title, such as a link to the list of pages."""
    body = [before, _head(document)]
    single = len(document.chapters) == 1
    body.append(_contents(document, single))
    body += [_chapter(chapter, single) for chapter in document.chapters]
    body.append(_skipped(document))
    style = _asset("report.css") + _asset("chart.css")
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(body)}</main>\n<script>{script()}</script>\n</body>\n</html>\n"
    )
    # Names of files may not be valid Unicode.
    return page.encode("utf-8", "replace").decode()


def script() -> str:
    """The only script of the page, without its tags."""
    return f"\n{_asset('report.js')}"


def _asset(name: str) -> str:
    return (resources.files("paceline.report") / "assets" / name).read_text("utf-8")


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:us|ms|s|B|kB|MB|GB)\b|%)")
_TO_TYPE = re.compile(r"`([^`]+)`")


def _inline(text: str) -> str:
    """Keeps a number and its unit on one line."""
    whole = _BEFORE_UNIT.sub("\u00a0", escape(text, quote=False))
    return _TO_TYPE.sub(r"<code>\1</code>", whole)


def _head(document: Document) -> str:
    points = "".join(
        f"<div><dt>{escape(subject)}</dt><dd>{_inline(text)}</dd></div>\n"
        for subject, text in document.points
    )
    steps = "".join(f"<li>{_inline(step)}</li>\n" for step in document.next_steps)
    lines = document.headline.split("\n")
    return (
        f"<header>\n<h1>{escape(document.title)}</h1>\n"
        f'<p class="subtitle">{escape(document.subtitle)}</p>\n{_lead(document)}</header>\n'
        f'<section class="verdict" id="verdict">\n<h2>{escape(document.headline_title)}</h2>\n'
        + "".join(f'<p class="headline">{_inline(line)}</p>\n' for line in lines)
        + _blocks(document.main_figures)
        + (f"<dl>\n{points}</dl>\n" if points else "")
        + (f"<h3>What to try next</h3>\n<ul>\n{steps}</ul>\n" if steps else "")
        + "</section>\n"
    )


def _lead(page: Document | ChapterPage) -> str:
    """The question of a study, what stands in for its model and data, and published results."""
    texts = (("about", page.about), ("context", page.stands_in), ("context", page.context))
    return "".join(f'<p class="{kind}">{_inline(text)}</p>\n' for kind, text in texts if text)


def _contents(document: Document, single: bool) -> str:
    links = [
        (anchor, title)
        for chapter in document.chapters
        for anchor, title in (
            [(_anchor(chapter, section), section.title) for section in chapter.sections]
            if single
            else [(chapter.name, chapter.title)]
        )
    ]
    items = "".join(f'<a href="#{anchor}">{escape(title)}</a>\n' for anchor, title in links)
    return f'<nav aria-label="Contents">\n{items}</nav>\n' if len(links) > 1 else ""


def _anchor(chapter: ChapterPage, section: Section) -> str:
    return f"{chapter.name}-{section.name}"


def _chapter(chapter: ChapterPage, single: bool) -> str:
    sections = "".join(
        f'<section id="{_anchor(chapter, section)}">\n'
        f"<h{2 if single else 3}>{escape(section.title)}</h{2 if single else 3}>\n"
        f"{_blocks(section.blocks)}</section>\n"
        for section in chapter.sections
    )
    if single:
        return sections
    return (
        f'<article id="{chapter.name}">\n<h2 class="chapter">{escape(chapter.title)}</h2>\n'
        f"{_lead(chapter)}{sections}</article>\n"
    )


def _blocks(blocks: Sequence[Block]) -> str:
    """Consecutive figures are side by side if there is room."""
    parts = []
    for together, group in groupby(blocks, key=_is_in_grid):
        texts = [_WRITERS[type(block)](block) for block in group]
        parts.append(
            f'<div class="grid">\n{"".join(texts)}</div>\n' if together else "".join(texts)
        )
    return "".join(parts)


def _is_in_grid(block: Block) -> bool:
    return isinstance(block, Tabs) or (isinstance(block, Figure) and not block.is_wide)


def _text(block: Text) -> str:
    kind = f' class="{block.kind}"' if block.kind else ""
    return f"<p{kind}>{_inline(block.text)}</p>\n"


def _items(block: BulletList) -> str:
    items = "".join(
        f"<li>{f'<b>{escape(lead)}</b> ' if lead else ''}{_inline(text)}</li>\n"
        for lead, text in block.items
    )
    return f"<ul>\n{items}</ul>\n"


def _table(block: Table) -> str:
    is_plain = block.is_facts

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if index < block.text_columns else ' class=n'}>"
            f"{_inline(cell) if is_plain or index < block.text_columns else _with_spread(cell)}"
            f"</{tag}>"
            for index, cell in enumerate(cells)
        )

    rows = "".join(f"<tr>{row(cells, 'td')}</tr>\n" for cells in block.rows)
    kind = "table compact" if block.is_compact else "table facts" if block.is_facts else "table"
    head = f"<thead><tr>{row(block.columns, 'th')}</tr></thead>\n" if any(block.columns) else ""
    return (
        f'<div class="{kind}" tabindex="0"><table>\n{head}<tbody>\n{rows}</tbody>\n</table></div>\n'
    )


def _with_spread(cell: str) -> str:
    """Moves parentheses below the number, to keep columns narrow."""
    return re.sub(r" \(([^()]+)\)$", r" <small>\1</small>", _inline(cell))


def _figure(block: Figure) -> str:
    wide = " wide" if block.is_wide else ""
    return (
        f'<figure class="figure{wide}" id="{block.name}">\n<figcaption><b>{escape(block.title)}</b>'
        f'<a class="download" href="{FIGURES}/{block.name}.svg"'
        f' download="{block.name}.svg">SVG</a></figcaption>\n'
        f'<div class="canvas">{block.svg}</div>\n</figure>\n'
    )


def _tabs(block: Tabs) -> str:
    parts = []
    for index, (label, figure) in enumerate(block.figures):
        name = f"{block.name}-{index}"
        checked = " checked" if index == 0 else ""
        parts.append(
            f'<input type="radio" name="{block.name}" id="{name}"{checked}>'
            f'<label for="{name}">{escape(label)}</label>\n{_figure(figure)}'
        )
    return f'<div class="tabs">\n{"".join(parts)}</div>\n'


def _code(block: Code) -> str:
    return f"<pre><code>{escape(block.text, quote=False)}</code></pre>\n"


def _fold(block: Details) -> str:
    return (
        f"<details>\n<summary>{escape(block.title)}</summary>\n{_blocks(block.blocks)}</details>\n"
    )


_WRITERS: dict[type, Callable[[Any], str]] = {
    Text: _text,
    BulletList: _items,
    Table: _table,
    Figure: _figure,
    Tabs: _tabs,
    Code: _code,
    Details: _fold,
}


def _skipped(document: Document) -> str:
    if not document.skipped:
        return ""
    rows = "".join(
        f"<li><code>{escape(name)}</code> {escape(why)}</li>\n" for name, why in document.skipped
    )
    return f'<section id="left-out">\n<h2>Skipped records</h2>\n<ul>\n{rows}</ul>\n</section>\n'
