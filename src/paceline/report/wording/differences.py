"""Differences between two configurations: by how much, in which interval_text, and how surely."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline import formatting
from paceline.analysis.accuracy import AccuracyDifference
from paceline.analysis.statistics import Difference


def format_difference(
    gap: Difference,
    format_amount: Callable[[float], str] | None = None,
    *,
    is_brief: bool = False,
) -> str:
    """A signed difference with its interval and significance.

    For example `+7.6% (95% CI +1.7% to +13.4%; significant)`, or with `format_amount`
    `+0.20 s (+7.6%; 95% CI +1.7% to +13.4%; significant)`. A brief one has only the interval, or
    that it is within noise.
    """
    percent = _signed_percent(gap.share)
    text, notes = percent, []
    if format_amount is not None:
        text, notes = f"{'+' * (gap.amount >= 0)}{format_amount(gap.amount)}", [percent]
    # No figure is negative, so none can be less by more than all of the other.
    span = f"{_signed_percent(max(gap.low, -1.0))} to {_signed_percent(gap.high)}"
    span = f"{interval_name(gap)} {span}{'' if gap.across_runs else ' over iterations'}"
    if is_brief:
        notes += ["within noise" if not gap.is_significant else span] if gap.has_interval else []
    else:
        notes += [span, _significance(gap)] if gap.has_interval else [_significance(gap)]
    return f"{text} ({'; '.join(notes)})" if notes else text


def less_time(gap: Difference) -> str:
    return f"{formatting.share(gap.share)} less time ({interval_text(gap)})"


def interval_text(gap: Difference) -> str:
    """The interval of how much less time one takes than the other."""
    # Nothing takes less than no time, whatever the interval's arithmetic gives.
    high = formatting.share(min(gap.high, 1.0))
    low = formatting.share(gap.low)
    if gap.low < 0 < gap.high:
        # A sign would say the opposite of the same interval in the table of differences.
        low, high = f"{formatting.share(-gap.low)} more", f"{high} less"
    return f"{interval_name(gap)} {low} to {high}"


def interval_name(gap: Difference) -> str:
    return "corrected interval" if gap.is_corrected else "95% CI"


def interval_note(gaps: Sequence[Difference]) -> str:
    """What the intervals of differences that are tested together are; empty for a plain CI."""
    most = max((gap.comparisons for gap in gaps if gap.has_interval), default=1)
    if most < 2:
        return ""
    return (
        "Corrected interval: Welch's t at the level of Holm's method for"
        f" {most:,} comparisons. It excludes zero exactly where the difference is significant."
    )


def accuracy_note(difference: AccuracyDifference) -> str:
    """What to add to a sentence about a difference in accuracy; empty where it is significant."""
    if difference.is_equal:
        return "the same"
    if difference.test_samples is not None:
        return f"within the noise of {difference.test_samples:,} test samples"
    if difference.is_single:
        return "in a single run"
    return "within noise" if difference.is_chance else ""


def _significance(gap: Difference) -> str:
    if gap.is_significant:
        return "significant"
    return "within noise" if gap.is_tie else "single run, significance unknown"


def _signed_percent(share: float) -> str:
    """Zero after rounding has no sign."""
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f}%" if rounded else "0.0%"
