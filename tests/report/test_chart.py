"""Charts: what a reader could not see otherwise."""

from __future__ import annotations

import re

import pytest

from paceline.analysis.validation import is_number
from paceline.report.charts.lines import LineChart, Series, draw_lines
from paceline.report.charts.svg import PALETTE, chart_style


def dashes(svg: str) -> list[str | None]:
    """Of the curves, in order."""
    lines = re.findall(r"<polyline [^>]*>", svg)
    return [found.group(1) if (found := re.search(r'style="([^"]*)"', one)) else None
            for one in lines]  # fmt: skip


def test_curves_that_coincide_take_turns_and_others_are_whole() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 1.0, 0.5]
    same, apart = [value + 1e-9 for value in y], [value + 1 for value in y]
    series = [
        Series(name, x, values, color_index=index)
        for index, (name, values) in enumerate({"a": y, "b": apart, "c": same, "d": y}.items())
    ]
    svg = draw_lines(LineChart("", "x", "y", series))
    first, other, second, third = dashes(svg)
    assert first is None
    assert other is None
    assert second == "stroke-dasharray:10 20;stroke-dashoffset:-10"
    assert third == "stroke-dasharray:10 20;stroke-dashoffset:-20"
    # Of four points on one another each is marked once, by the curves in turn.
    groups = svg.split("<g ")
    marked = {
        name: re.findall(r'data-at="(\d)"', next(one for one in groups if f'label="{name}"' in one))
        for name in "abcd"
    }
    assert marked == {"a": ["0", "3"], "b": ["0", "1", "2", "3"], "c": ["1"], "d": ["2"]}


def test_a_logarithmic_axis_labels_each_tick_in_its_own_unit() -> None:
    series = [Series("a", [1024.0, 37 * 2.0**20], [2e-5, 0.3])]
    chart = LineChart("", "size", "time", series, x_quantity="binary_bytes", is_x_log=True,
                      y_quantity="seconds", is_y_log=True, x_ticks=series[0].x)  # fmt: skip
    ticks = re.findall(r'class="tick"[^>]*>([^<]*)<', draw_lines(chart))
    assert ticks == ["100 us", "1 ms", "10 ms", "100 ms", "1 KiB", "37 MiB"]


def test_a_logarithmic_axis_places_equal_ratios_equally_far_apart() -> None:
    chart = LineChart("", "x", "y", [Series("a", [1.0, 8.0, 64.0], [1.0, 10.0, 100.0])],
                      is_x_log=True, is_y_log=True)  # fmt: skip
    found = re.search(r'<polyline points="([^"]*)"', draw_lines(chart))
    assert found is not None
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in found.group(1).split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.02)


def linear(color: str) -> list[float]:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]


def perceived(rgb: list[float]) -> tuple[float, ...]:
    """In Oklab, where equal distances look equally far apart."""
    r, g, b = (min(1.0, max(0.0, one)) for one in rgb)
    cones = (
        0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
        0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
        0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    )
    low, mid, short = (one ** (1 / 3) for one in cones)
    return (
        0.2104542553 * low + 0.7936177850 * mid - 0.0040720468 * short,
        1.9779984951 * low - 2.4285922050 * mid + 0.4505937099 * short,
        0.0259040371 * low + 0.7827717662 * mid - 0.8086757660 * short,
    )


EYES = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    # What those see who lack one kind of cones (Machado, Oliveira and Fernandes, 2009).
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                 (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_eyes_tell_the_colors_of_curves_apart(theme: str, eye: str) -> None:
    light, dark = chart_style().split("prefers-color-scheme: dark")
    found = re.findall(r"\.s\d \{ --c: (#\w{6})", light if theme == "light" else dark)
    assert len(found) == len(PALETTE)
    if theme == "light":
        assert tuple(found) == PALETTE
    seen = [
        perceived([sum(w * v for w, v in zip(row, linear(one), strict=True)) for row in EYES[eye]])
        for one in found
    ]
    gaps = [
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for index, one in enumerate(seen)
        for other in seen[:index]
    ]
    # About three times what is just noticed side by side.
    assert min(gaps) > 0.06


@pytest.mark.parametrize("value", [True, None, "1", float("nan"), float("inf"), 10**400, [1]])
def test_what_json_holds_is_not_always_a_number(value: object) -> None:
    assert not is_number(value)
