"""What is printed for people: one kind of console, whose lines have no spaces at their ends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment


def open_console(width: int | None = None, most_columns: int | None = None) -> Console:
    """`width`: whatever the terminal's is; `most_columns`: where the terminal is wider."""
    console = Console(highlight=False, markup=False, width=width)
    if most_columns is not None:
        console.width = min(console.width, most_columns)
    console.push_render_hook(_Trimming())
    return console


def paragraph(text: str, console: Console) -> str:
    """Text in lines of the console's width, with no number parted from its unit."""
    glued = re.sub(r"(?<=\d) (?=(?:%|[mu]?s\b|[kMG]?B\b))", "\N{NO-BREAK SPACE}", text)
    # Unlike rich, it does not take this space for one to break a line at.
    return textwrap.fill(glued, console.width, break_on_hyphens=False).replace(
        "\N{NO-BREAK SPACE}", " "
    )


class _Trimming(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Trimmed:
    """rich fills the last column of a table with spaces, which copied text and files would keep."""

    whole: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        return trimmed(console.render(self.whole, options))


def trimmed(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same text without the spaces before each end of a line."""
    held: list[Segment] = []
    for segment in segments:
        if segment.control:
            yield segment
            continue
        for number, part in enumerate(segment.text.split("\n")):
            if number:
                held.clear()
                yield Segment("\n")
            text = part.rstrip(" ")
            if text:
                yield from held
                held.clear()
                yield Segment(text, segment.style)
            if len(text) < len(part):
                held.append(Segment(part[len(text) :], segment.style))
    # What has no end of a line after it may have more text on it.
    yield from held
