"""Numbers with units, short enough for tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0:
        return f"-{seconds(-value)}" if value <= -5e-7 else "0 us"
    # Each limit is where the text would round up to the next unit.
    if value < 0.0009995:
        return f"{value * 1e6:.0f} us"
    if value < 0.999995:
        return f"{value * 1e3:.2f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 999.95 else f"{value:,.0f} s"


def short_seconds(value: float | None, unit: str | None = None) -> str:
    """Three significant digits, for narrow tables; in the largest suitable unit, or in this one."""
    if value is None:
        return "-"
    for name, scale in (("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        scaled = value * scale
        if name == unit or (unit is None and (scaled < 999.5 or name == "s")):
            digits = 0 if name == "us" or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{scaled:,.{digits}f} {name}"
    raise AssertionError("unreachable")


def size(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < (999.5 if unit == "B" else 999.95) or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{size(bytes_per_second)}/s"


def percent(value: float | None) -> str:
    """Format a percentage."""
    return "-" if value is None else f"{value:.0f}%"


def cores(cpu_percent: float | None) -> str:
    """Format a sampled CPU percentage, which is of one core: 150% are 1.50 cores."""
    return "-" if cpu_percent is None else f"{cpu_percent / 100:.2f} CPU cores"


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


def format_ranks(ranks: Sequence[int], noun: str = "rank") -> str:
    """Format ascending ranks: `rank 2`, `ranks 0, 2`, `ranks 0-6, 8-15`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
    return f"{noun}{'' if len(ranks) == 1 else 's'} {text}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Format names that may contain commas; of more than `most`, count the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def spread(
    values: Sequence[float], text: Callable[[float], str], half_interval: float | None = None
) -> str:
    """Format the mean with its interval, and with min and max if there are several values."""
    if not values:
        return "-"
    average = sum(values) / len(values)
    mean = text(average)
    shown = mean if half_interval is None else interval(average, half_interval, text)
    low, high = text(min(values)), text(max(values))
    if low == high:
        return shown
    unit = _unit(mean)
    if unit and _unit(low) == _unit(high) == unit:
        low, high = (one.removesuffix(f" {unit}") for one in (low, high))
    return f"{shown} ({low} to {high})"


def interval(mean: float, half: float, text: Callable[[float], str]) -> str:
    """Format a mean with half its interval in the same unit, as in 6.45 ± 0.31 ms."""
    shown = text(mean)
    unit = _unit(shown)
    if unit not in UNITS:
        return f"{shown} ± {text(half)}"
    value = shown.removesuffix(f" {unit}")
    digits = len(value.partition(".")[2])
    return f"{value} ± {half / UNITS[unit]:,.{digits}f} {unit}"


def _unit(text: str) -> str:
    return text.rpartition(" ")[2] if " " in text else ""
