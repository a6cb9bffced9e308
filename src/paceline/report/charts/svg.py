"""SVG elements and documents as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

PALETTE = (
    "#0b62a4", "#c8501e", "#14a298", "#a376f5", "#bd9616", "#5e3229", "#14176e", "#1a1512",
)  # fmt: skip
"""Colors of series; further series reuse them with dashes.

They differ in lightness as much as in hue, which keeps them distinct for color-blind readers, like
the colors of the dark theme in chart.css.
"""

Attribute = str | float | int | None


def element(name: str, *inside: str, **attributes: Attribute) -> str:
    """An element; underscores in attribute names become hyphens, and None omits an attribute."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = value if isinstance(value, str) else number(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    start = " ".join(words)
    return f"<{start}>{''.join(inside)}</{name}>" if inside else f"<{start}/>"


def text(content: str, x: float, y: float, **attributes: Attribute) -> str:
    return element("text", escape(content, quote=False), x=x, y=y, **attributes)


def title(content: str) -> str:
    """A tooltip that works without scripts."""
    return element("title", escape(content, quote=False))


def number(value: float) -> str:
    """A coordinate, rounded to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def datum(value: float) -> str:
    """A value of a data attribute, with seven digits."""
    return f"{value:.7g}"


def data(values: Iterable[float]) -> str:
    return ",".join(map(datum, values))


def points(pairs: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{number(float(x))},{number(float(y))}" for x, y in pairs)


def drawing(
    kind: str,
    width: float,
    height: float,
    label: str,
    inside: Sequence[str],
    **attributes: Attribute,
) -> str:
    return element(
        "svg",
        title(label),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        class_=f"chart {kind}",
        role="img",
        aria_label=label,
        **attributes,
    )


def standalone(svg: str) -> str:
    """A drawing as a file, with the style that the page gives it."""
    head, separator, rest = svg.partition(">")
    style = f"<style>{chart_style()}</style>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}{separator}{style}{rest}\n'


def chart_style() -> str:
    return (resources.files("paceline.report") / "assets" / "chart.css").read_text("utf-8")
