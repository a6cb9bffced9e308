"""What charts with axes share: the room that each part has, grid, ticks and legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.chart import svg
from paceline.report.chart.scale import (
    Scale,
    Unit,
    log_tick_texts,
    log_ticks,
    nice_ticks,
    tick_texts,
)

WIDTH = 480.0
"""Of a chart; two stand side by side on a screen, one on a phone at three quarters of it."""
LEGEND_ROW = 20.0
LETTERS = 15.0
"""Size of the legend's letters on a phone, where they are drawn larger."""
LONGEST_LABEL = 44


@dataclass(frozen=True, slots=True)
class Box:
    """The place of the plot inside a chart."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


def clip(label: str, longest: int = LONGEST_LABEL) -> str:
    return label if len(label) <= longest else f"{label[: longest - 1].rstrip()}…"


def width_of(text: str, size: float = LETTERS) -> float:
    """About what a text takes up, in a font that is rather wide."""
    narrow, wide = "fijlrtI.,:;'|!() ", "mwMW%@+=<>—…"
    shares = (0.38 if one in narrow else 0.88 if one in wide else 0.62 for one in text)
    return size * sum(shares)


def tone(place: int) -> str:
    """Class of the series at a place: its colour, and a dash once all colours are taken."""
    colours = len(svg.PALETTE)
    return f"s{place % colours}" + (f" d{min(place // colours, 2)}" if place >= colours else "")


def colour(place: int) -> str:
    return svg.PALETTE[place % len(svg.PALETTE)]


def horizontal_grid(box: Box, scale: Scale, unit: Unit, quantity: str = "") -> str:
    """Lines and figures for the y axis; a logarithmic one takes its units from the quantity."""
    if scale.is_log:
        ticks = log_ticks(scale.low, scale.high)
        texts = log_tick_texts(ticks, quantity)
    else:
        ticks = [scale.low] if scale.high <= scale.low else nice_ticks(scale.low, scale.high)
        texts = tick_texts(ticks, unit)
    parts = []
    for tick, text in zip(ticks, texts, strict=True):
        y = scale(tick)
        parts.append(svg.element("line", x1=box.left, x2=box.right, y1=y, y2=y, class_="grid"))
        parts.append(svg.text(text, box.left - 7, y + 4, class_="tick", text_anchor="end"))
    return svg.element("g", *parts, class_="y-axis")


def vertical_ticks(
    box: Box,
    scale: Scale,
    unit: Unit,
    ticks: Sequence[float] | None = None,
    most: int = 5,
    quantity: str = "",
) -> str:
    """Marks and figures for the x axis; a logarithmic one takes its units from the quantity."""
    if scale.is_log:
        ticks = log_ticks(scale.low, scale.high) if ticks is None else list(ticks)
        texts = log_tick_texts(ticks, quantity)
    else:
        ticks = list(ticks) if ticks is not None else nice_ticks(scale.low, scale.high, most)
        texts = tick_texts(ticks, unit)
    parts = [
        svg.element("line", x1=box.left, x2=box.right, y1=box.bottom, y2=box.bottom, class_="axis")
    ]
    for tick, text in zip(ticks, texts, strict=True):
        x = scale(tick)
        parts.append(
            svg.element("line", x1=x, x2=x, y1=box.bottom, y2=box.bottom + 4, class_="axis")
        )
        parts.append(svg.text(text, x, box.bottom + 18, class_="tick", text_anchor="middle"))
    return svg.element("g", *parts, class_="x-axis")


def legend(
    entries: Sequence[tuple[str, str, str]], left: float, top: float, width: float
) -> tuple[str, float]:
    """Keys for (label, class, colour) in columns that fit; returns them and their height."""
    if not entries:
        return "", 0.0
    parts: list[str] = []
    room = max(19 + width_of(clip(label)) + 14 for label, _, _ in entries)
    columns = max(1, min(len(entries), int((width + 14) // room)))
    for index, (label, kind, paint) in enumerate(entries):
        shown = clip(label)
        x, y = left + index % columns * width / columns, top + index // columns * LEGEND_ROW
        parts.append(
            svg.element(
                "g",
                svg.title(label),
                svg.element(
                    "rect", x=x, y=y - 9, width=13, height=9, rx=2, class_=kind, fill=paint
                ),
                svg.text(shown, x + 19, y),
                class_="key",
                data_series=index,
                tabindex="0",
            )
        )
    rows = -(-len(entries) // columns)
    return svg.element("g", *parts, class_="legend"), rows * LEGEND_ROW
