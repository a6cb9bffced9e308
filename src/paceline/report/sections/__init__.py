"""The sections of a report by name, in their usual order.

A study's `report:` list names those it wants, in its own order. A section without data is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.report.document import Block, Section
from paceline.report.sections import (
    accuracy,
    bandwidth,
    batch_size,
    checkpoint,
    configuration,
    curves,
    evaluations,
    iteration_time,
    order,
    overview,
    phases,
    ranks,
    resources,
    scaling,
    target,
    timeline,
    traffic,
    winners,
)
from paceline.report.sections.outline import SectionContext

VERDICT = "verdict"
"""Always first; in a report of several parts also at the head of each that names it."""


@dataclass(frozen=True, slots=True)
class Kind:
    title: str
    build: Callable[[SectionContext], list[Block]]


SECTIONS = {
    "overview": Kind(overview.TITLE, overview.build),
    "target": Kind(target.TITLE, target.build),
    "winners": Kind(winners.TITLE, winners.build),
    "curves": Kind(curves.TITLE, curves.build),
    "accuracy": Kind(accuracy.TITLE, accuracy.build),
    "evaluations": Kind(evaluations.TITLE, evaluations.build),
    "iteration_time": Kind(iteration_time.TITLE, iteration_time.build),
    "ranks": Kind(ranks.TITLE, ranks.build),
    "phases": Kind(phases.TITLE, phases.build),
    "timeline": Kind(timeline.TITLE, timeline.build),
    "scaling": Kind(scaling.TITLE, scaling.build),
    "batch_size": Kind(batch_size.TITLE, batch_size.build),
    "checkpoint": Kind(checkpoint.TITLE, checkpoint.build),
    "traffic": Kind(traffic.TITLE, traffic.build),
    "bandwidth": Kind(bandwidth.TITLE, bandwidth.build),
    "resources": Kind(resources.TITLE, resources.build),
    "order": Kind(order.TITLE, order.build),
    "configuration": Kind(configuration.TITLE, configuration.build),
}


def wanted(names: Sequence[str], *, is_alone: bool) -> list[str]:
    """The sections of a chapter, in order: those asked for, or all.

    What was run always comes first. Where there are several chapters, one configuration for all of
    them comes at the end of the report.
    """
    asked = [name for name in dict.fromkeys(names) if name in SECTIONS]
    if not asked:
        asked = [name for name in SECTIONS if is_alone or name != "configuration"]
    first = [] if "overview" in asked else ["overview"]
    last = ["configuration"] if is_alone and "configuration" not in asked else []
    return [*first, *asked, *last]


def unknown(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in SECTIONS and name != VERDICT]


def build_sections(outline: SectionContext, names: Sequence[str]) -> list[Section]:
    """Those of these names that there is data for."""
    built = ((name, SECTIONS[name].build(outline)) for name in names)
    return [Section(name, SECTIONS[name].title, blocks) for name, blocks in built if blocks]
