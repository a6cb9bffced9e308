"""The sections of a report.

The `report:` list of a study selects sections and their order. A section without data is omitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.document import Section
from paceline.report.sections import (
    hardware,
    learning,
    overview,
    phases,
    post_mortem,
    scaling,
    step_cost,
    timing,
)
from paceline.report.sections.common import SECTIONS, SectionContext
from paceline.study.study_file import SECTION_NAMES

__all__ = ["MODULES", "SECTIONS", "VERDICT", "build_sections", "section_names", "select", "unknown"]

MODULES = (post_mortem, overview, learning, step_cost, timing, phases, scaling, hardware)
"""Importing a module registers its sections."""

VERDICT = "verdict"
"""Comes first in a report, and in each part that names it."""


def section_names() -> list[str]:
    """Registered sections in the order of SECTION_NAMES; any others come last."""
    known = [name for name in SECTION_NAMES if name in SECTIONS]
    return [*known, *(name for name in SECTIONS if name not in known)]


def select(names: Sequence[str], *, is_alone: bool) -> list[str]:
    """The sections of a chapter: `names`, or all if empty.

    The overview always comes first. With several chapters, one configuration section follows them.
    """
    selected = [name for name in dict.fromkeys(names) if name in SECTIONS]
    if not selected:
        selected = [name for name in section_names() if is_alone or name != "configuration"]
    first = [] if "overview" in selected else ["overview"]
    last = ["configuration"] if is_alone and "configuration" not in selected else []
    return [*first, *selected, *last]


def unknown(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in SECTIONS and name != VERDICT]


def build_sections(context: SectionContext, names: Sequence[str]) -> list[Section]:
    """The named sections that have data."""
    built = ((name, list(SECTIONS[name].build(context))) for name in names)
    return [
        Section(name, SECTIONS[name].title_in(context), blocks) for name, blocks in built if blocks
    ]
