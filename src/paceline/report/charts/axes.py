"""Scales, ticks, units, grid and legend of charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.report.charts import svg


@dataclass(frozen=True, slots=True)
class Unit:
    name: str
    factor: float
    """Size in base units; values are shown divided by it."""

    def label(self, quantity: str) -> str:
        return f"{quantity} ({self.name})" if self.name else quantity


_UNITS: dict[str, Sequence[Unit]] = {
    "seconds": (Unit("us", 1e-6), Unit("ms", 1e-3), Unit("s", 1.0)),
    "bytes": (Unit("B", 1.0), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9)),
    "bytes_per_second": (
        Unit("B/s", 1.0),
        Unit("kB/s", 1e3),
        Unit("MB/s", 1e6),
        Unit("GB/s", 1e9),
    ),
    "binary_bytes": (
        Unit("B", 1.0),
        Unit("KiB", 2.0**10),
        Unit("MiB", 2.0**20),
        Unit("GiB", 2.0**30),
    ),
    "share": (Unit("%", 0.01),),
    "": (Unit("", 1.0),),
}


def unit_for(quantity: str, largest: float) -> Unit:
    """The unit in which the largest value of an axis is easy to read."""
    units = _UNITS[quantity]
    return next((unit for unit in reversed(units) if abs(largest) >= unit.factor), units[0])


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from `low` to `high` to coordinates from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (map(math.log, (self.low, self.high, max(value, 1e-300)))
                            if self.is_log else (self.low, self.high, value))  # fmt: skip
        share = (value - low) / (high - low) if high != low else 0.5
        return self.begin + share * (self.end - self.begin)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` round numbers within the limits."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    step = _nice_step((high - low) / most)
    while (high - low) / step > most - 1 + 1e-9 and _count(low, high, step) > most:
        step = _nice_step(step * 1.01)
    first = math.ceil(low / step - 1e-9)
    return [(first + index) * step for index in range(_count(low, high, step))]


def _count(low: float, high: float, step: float) -> int:
    return math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1


def _nice_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    for factor in (1, 2, 2.5, 5, 10):
        if factor * power >= least * (1 - 1e-9):
            return factor * power
    return 10 * power


def tick_texts(ticks: Sequence[float], unit: Unit) -> list[str]:
    """Labels with the fewest decimals that distinguish the ticks, the same for all."""
    shown = [tick / unit.factor for tick in ticks]
    if max(map(abs, shown)) >= 1e7:
        return [f"{value:.3g}" for value in shown]
    step = min((b - a for a, b in pairwise(shown)), default=abs(shown[0]) or 1)
    decimals = 0
    while decimals < 6 and abs(round(step, decimals) - step) > 1e-6 * abs(step):
        decimals += 1
    return [f"{value + 0.0:,.{decimals}f}".replace("-0", "0") if abs(value) < 1e-12
            else f"{value:,.{decimals}f}" for value in shown]  # fmt: skip


def log_limits(values: Iterable[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis that shows all positive values, with a small margin."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    if not known:
        return 1.0, 10.0
    low, high = min(known), max(known)
    margin = (high / low) ** 0.04 if high > low else 2.0
    return low / margin, high * margin


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within the limits, or 1-2-5 steps where these are fewer than three."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = [power for exponent in exponents if low <= (power := 10.0**exponent) <= high]
    if len(decades) >= 3:
        return decades
    steps = (factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5))
    return [step for step in steps if low <= step <= high] or [low]


def log_tick_texts(ticks: Sequence[float], quantity: str) -> list[str]:
    """Each tick in its own unit, because a logarithmic axis spans several."""
    units = [unit_for(quantity, tick * (1 + 1e-9)) for tick in ticks]
    return [
        f"{tick / unit.factor:,.7g} {unit.name}".rstrip()
        for tick, unit in zip(ticks, units, strict=True)
    ]


def limits(values: Iterable[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Limits of an axis that shows all values, with a small margin; 0 to 1 without values."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    if from_zero:
        low = min(low, 0.0)
    if high == low:
        margin = abs(high) * 0.1 or 1.0
        return (low if from_zero and low == 0 else low - margin), high + margin
    margin = 0.04 * (high - low)
    return (low if from_zero and low == 0 else low - margin), high + margin


WIDTH = 480.0
"""Of a chart; a screen shows two side by side, a phone one at three quarters of its size."""
LEGEND_ROW = 20.0
LEGEND_FONT_SIZE = 15.0
"""On a phone, where it is larger than elsewhere."""
LONGEST_LABEL = 44


@dataclass(frozen=True, slots=True)
class Box:
    """The area of the plot inside a chart."""

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


def width_of(text: str, size: float = LEGEND_FONT_SIZE) -> float:
    """Approximate width of a text in a wide font."""
    narrow, wide = "fijlrtI.,:;'|!() ", "mwMW%@+=<>—…"
    shares = (0.38 if one in narrow else 0.88 if one in wide else 0.62 for one in text)
    return size * sum(shares)


def series_class(color_index: int) -> str:
    """CSS class of a series: its color, and a dash pattern beyond the palette."""
    dashes, color = divmod(color_index, len(svg.PALETTE))
    return f"s{color} d{min(dashes, 2)}" if dashes else f"s{color}"


def series_color(color_index: int) -> str:
    return svg.PALETTE[color_index % len(svg.PALETTE)]


def y_axis(box: Box, scale: Scale, unit: Unit, quantity: str = "") -> str:
    """Grid lines and labels of the y axis; a logarithmic one derives its units from `quantity`."""
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


def x_axis(
    box: Box,
    scale: Scale,
    unit: Unit,
    ticks: Sequence[float] | None = None,
    most: int = 5,
    quantity: str = "",
) -> str:
    """Ticks and labels of the x axis; a logarithmic one derives its units from `quantity`."""
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
    """A legend of (label, class, color) in columns that fit the width, and its height."""
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
