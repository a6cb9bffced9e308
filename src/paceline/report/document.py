"""The blocks of a report, independent of its format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    """Plain text; `backticks` mark code."""
    kind: str = ""
    """"", `answer` (to the question of a section) or `note`."""


@dataclass(frozen=True, slots=True)
class BulletList:
    """A list of items, each with a bold lead, which may be empty."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    """Columns at the left that hold text; the others hold numbers."""
    is_compact: bool = False
    """Whether all columns should fit on a phone."""
    is_facts: bool = False
    """Whether it is a list of names and values, as narrow as they are."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    """Of its file, without folder and suffix."""
    title: str
    svg: str
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Tabs:
    """Figures of one subject, shown one at a time."""

    name: str
    figures: Sequence[tuple[str, Figure]]


@dataclass(frozen=True, slots=True)
class Code:
    text: str


@dataclass(frozen=True, slots=True)
class Details:
    """Collapsed by default."""

    title: str
    blocks: Sequence[Block]


Block = Text | BulletList | Table | Figure | Tabs | Code | Details


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class ChapterPage:
    name: str
    title: str
    about: str
    context: str
    sections: Sequence[Section]
    stands_in: str = ""


@dataclass(slots=True)
class Document:
    title: str
    subtitle: str
    about: str
    headline: str
    """The answer; of several chapters one line for each part of it."""
    points: list[tuple[str, str]]
    next_steps: list[str]
    chapters: list[ChapterPage]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    context: str = ""
    """Published results; with several chapters, each has its own."""
    stands_in: str = ""
    """What replaces the model or data of the published results."""
    main_figures: list[Figure] = field(default_factory=list)
    """Of the headline, where there are several chapters."""
    headline_title: str = "Verdict"
    """Above the headline."""

    def figures(self) -> Iterator[Figure]:
        yield from self.main_figures
        for chapter in self.chapters:
            for section in chapter.sections:
                yield from _figures(section.blocks)


def _figures(blocks: Sequence[Block]) -> Iterator[Figure]:
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Tabs):
            yield from (figure for _, figure in block.figures)
        elif isinstance(block, Details):
            yield from _figures(block.blocks)


def slug(text: str) -> str:
    """A name for files and links."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48] or "part"
