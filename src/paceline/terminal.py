"""Terminal output: a rich console that strips trailing spaces from its lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment


def open_console(
    width: int | None = None, max_columns: int | None = None, file: TextIO | None = None
) -> Console:
    """Open a console of `width` columns (default: the terminal's), but at most `max_columns`.

    It prints to `file`, by default to standard output.
    """
    console = Console(highlight=False, markup=False, width=width, file=file)
    if max_columns is not None:
        console.width = min(console.width, max_columns)
    console.push_render_hook(_TrimHook())
    return console


def paragraph(text: str, console: Console) -> str:
    """Wrap text to the width of the console without separating a number from its unit."""
    glued = re.sub(r"(?<=\d) (?=(?:%|[mu]?s\b|[kMG]?B\b))", "\N{NO-BREAK SPACE}", text)
    # Unlike rich, textwrap does not break lines at no-break spaces.
    return textwrap.fill(glued, console.width, break_on_hyphens=False).replace(
        "\N{NO-BREAK SPACE}", " "
    )


class _TrimHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Trimmed:
    """Drops the spaces that rich pads the last column of a table with."""

    renderable: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        return trimmed(console.render(self.renderable, options))


def trimmed(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the same text without spaces at the end of each line."""
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
    # The last line is not terminated, so more text may follow its spaces.
    yield from held
