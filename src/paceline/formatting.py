"""Numbers with units, short enough for tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0:
        return f"-{seconds(-value)}" if value <= -5e-7 else "0 us"
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.2f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 1000 else f"{value:,.0f} s"


def size(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{size(bytes_per_second)}/s"


def percent(value: float | None) -> str:
    """Format a percentage."""
    return "-" if value is None else f"{value:.0f}%"


def share(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def format_duration(value: float | None) -> str:
    """Hours, minutes and seconds, as in 1:02:03 or 2:03."""
    if value is None:
        return "unknown"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Format the mean, with min and max if there are several values."""
    if not values:
        return "-"
    mean = text(sum(values) / len(values))
    if len(values) == 1:
        return mean
    low, high = text(min(values)), text(max(values))
    if low == high:
        return mean
    unit = mean.rpartition(" ")[2] if " " in mean else ""
    if unit and low.endswith(f" {unit}") and high.endswith(f" {unit}"):
        low, high = (one.removesuffix(f" {unit}") for one in (low, high))
    return f"{mean} ({low} to {high})"
