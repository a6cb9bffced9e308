"""What a study changes against another one with the same configurations."""

from __future__ import annotations

from paceline.analysis.comparison import FigureRow, StudyPair, summarize_pair
from paceline.report.wording.differences import interval_note
from paceline.report.wording.headline import rerun_sentence

SINGLE = "single run"
"""Instead of a significance: the spread between runs is unknown."""
CONTENTION = "CPU contention"
"""Instead of the significance of a time: other processes used the machine."""


def pair_headline(pair: StudyPair) -> str:
    """In how many configurations the other study is faster or slower, and by how much."""
    if not pair.matches:
        return (
            f"{pair.other} and {pair.first} have no configurations with the same settings or names."
        )
    count = f"{len(pair.matches)} matching configuration{'s' * (len(pair.matches) != 1)}"
    summary = summarize_pair(pair)
    if summary is None:
        return f"{pair.other} against {pair.first}: {count}, none of them timed in both."
    counts = {
        "faster": summary.faster,
        "slower": summary.slower,
        "within noise": summary.within_noise,
        "with a single run (significance unknown)": summary.single,
        "with CPU contention (not tested)": summary.disturbed,
        "not timed in both": summary.untimed,
    }
    parts = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    ratio = summary.ratio
    mean = "" if ratio is None else f" Geometric mean of the ratios: {ratio:.3f}."
    contention = [found for one in pair.matches for found in one.contention]
    return (
        f"{pair.other} against {pair.first}, {pair.tables[0].title.lower()} of {count}: {parts}."
        f"{mean}{rerun_sentence(contention)}"
    )


def pair_notes(pair: StudyPair) -> list[str]:
    """How to read the tables."""
    found = [
        "Ratio: the second study's mean over the first's. The rows of all tables are tested"
        " together: the chance that any of them is significant without a real difference is at most"
        " 5%."
    ]
    rows = [row for table in pair.tables for row in table.rows]
    if note := interval_note([row.change for row in rows if row.change]):
        found.append(note)
    significances = {row_significance(row) for row in rows}
    if SINGLE in significances:
        found.append(f"{SINGLE.capitalize()}: one of the two has no repeats, so the spread between"
                     " runs, and with it the significance, is unknown.")  # fmt: skip
    if CONTENTION in significances:
        found.append(f"{CONTENTION}: other processes used the machine during runs of one of the"
                     " two, so its times are not tested.")  # fmt: skip
    return found


def ratio_interval(row: FigureRow) -> str:
    if row.change is None or not row.change.across_runs or row.is_disturbed:
        return "-"
    # No figure is negative, so neither is a ratio.
    return f"{max(0.0, 1 + row.change.low):.3f} to {1 + row.change.high:.3f}"


def row_significance(row: FigureRow) -> str:
    if row.change is None:
        return "-"
    if row.is_disturbed:
        return CONTENTION
    if not row.change.across_runs:
        return SINGLE
    return "significant" if row.change.is_significant else "within noise"
