"""What checkpoints cost: in time, and in memory beside the same run without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.run_group import IGNORED_FIELDS, RunGroup
from paceline.analysis.statistics import Difference, correct, relative_increase
from paceline.config import RunConfig
from paceline.report.document import Block, Table, Text
from paceline.report.sections.outline import SectionContext, known
from paceline.report.wording import interval_name, interval_note

TITLE = "Checkpoint overhead"

_OF_CHECKPOINTS = IGNORED_FIELDS | {"checkpoint_every", "checkpoint_keep", "checkpoint_mode"}


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    label: str
    counts: list[float]
    sizes_bytes: list[float]
    blocked_seconds: list[float]
    """Training held up, in each run."""
    wall_seconds: list[float]
    memory_bytes: list[float]
    """Mean over the run, of all nodes."""
    without: str | None = None
    """Label of the cell that differs only in having none."""
    longer: Difference | None = None
    """Than that one."""
    more_memory: Difference | None = None
    """Than that one, in bytes."""


def checkpoint_costs(cells: Sequence[RunGroup]) -> list[CheckpointCost]:
    plain = {
        _key(cell.config): cell for cell in cells if cell.finished and not _counts(cell, "count")
    }
    costs = [
        _cost(cell, plain.get(_key(cell.config)))
        for cell in cells
        if cell.finished and _counts(cell, "count")
    ]
    # Time and memory of all cells are told together: one family of comparisons.
    gaps = [gap for cost in costs for gap in (cost.longer, cost.more_memory) if gap is not None]
    corrected = iter(correct(gaps))
    return [
        dataclasses.replace(
            cost,
            longer=next(corrected) if cost.longer is not None else None,
            more_memory=next(corrected) if cost.more_memory is not None else None,
        )
        for cost in costs
    ]


def _cost(cell: RunGroup, without: RunGroup | None) -> CheckpointCost:
    walls, memory = _walls(cell), _memory(cell)
    cost = CheckpointCost(
        cell.label,
        _counts(cell, "count"),
        _counts(cell, "bytes"),
        _counts(cell, "blocked_seconds"),
        walls,
        memory,
    )
    if without is None:
        return cost
    before = _memory(without)
    return dataclasses.replace(
        cost,
        without=without.label,
        longer=relative_increase(walls, _walls(without)),
        more_memory=relative_increase(memory, before) if memory and before else None,
    )


def _counts(cell: RunGroup, key: str) -> list[float]:
    values = known(run.result["checkpoints"].get(key) for run in cell.finished if run.result)
    return values if any(values) else []


def _walls(cell: RunGroup) -> list[float]:
    return [run.result["wall_seconds"] for run in cell.finished if run.result]


def _memory(cell: RunGroup) -> list[float]:
    return known(run.node_sum("rss_bytes_mean") for run in cell.finished)


def _key(config: RunConfig) -> str:
    names = (item.name for item in dataclasses.fields(RunConfig))
    return repr([getattr(config, name) for name in names if name not in _OF_CHECKPOINTS])


def build(outline: SectionContext) -> list[Block]:
    costs = checkpoint_costs(outline.cells)
    if not costs:
        return []
    columns = ("configuration", "checkpoints", "bytes", "blocked", "wall time", "memory, mean",
               "time against none", "memory against none")  # fmt: skip
    rows = [
        (
            cost.label,
            formatting.spread(cost.counts, formatting.count),
            formatting.spread(cost.sizes_bytes, formatting.size),
            formatting.spread(cost.blocked_seconds or [0.0], formatting.seconds),
            formatting.spread(cost.wall_seconds, formatting.seconds),
            formatting.spread(cost.memory_bytes, formatting.size),
            _longer(cost.longer),
            _more_memory(cost.more_memory),
        )
        for cost in costs
    ]
    pairs = [f"{cost.label} against {cost.without}" for cost in costs if cost.without]
    note = f"Compared: {'; '.join(pairs)}." if pairs else (
        "There is no run that differs only in having no checkpoints to compare with."
    )  # fmt: skip
    gaps = [gap for cost in costs for gap in (cost.longer, cost.more_memory) if gap is not None]
    note = " ".join(filter(None, (note, interval_note(gaps))))
    plain = [cell for cell in outline.cells if cell.label in {cost.without for cost in costs}]
    return [
        *([Text(answer(costs), "answer")] if pairs else []),
        Table(columns, [*map(_plain_row, plain), *rows]),
        Text(note, "note"),
    ]


def _plain_row(cell: RunGroup) -> tuple[str, ...]:
    """The run without checkpoints that others are compared with."""
    wall = formatting.spread(_walls(cell), formatting.seconds)
    return (
        cell.label,
        "0",
        "-",
        "-",
        wall,
        formatting.spread(_memory(cell), formatting.size),
        "-",
        "-",
    )


def answer(costs: Sequence[CheckpointCost]) -> str:
    texts = []
    for cost in costs:
        if cost.longer is not None:
            text = f"{cost.label}: {_held_up(cost)}; against {cost.without} wall time"
            text += f" {_longer(cost.longer)}"
            if cost.more_memory is not None:
                text += f", memory {_more_memory(cost.more_memory)}"
            texts.append(text)
    return f"{'. '.join(texts)}."


def _held_up(cost: CheckpointCost) -> str:
    """What was measured as such, whatever else made the runs differ."""
    held, wall = sum(cost.blocked_seconds), sum(cost.wall_seconds)
    share = f" ({formatting.share(held / wall)} of the wall time)" if wall else ""
    return f"training blocked for {formatting.seconds(held / len(cost.wall_seconds))}{share}"


def _longer(longer: Difference | None) -> str:
    if longer is None:
        return "-"
    sign = "+" if longer.amount >= 0 else ""
    text = f"{sign}{formatting.seconds(longer.amount)} ({100 * longer.share:+.1f}%)"
    if not longer.has_interval:
        return f"{text}, spread unknown"
    doubt = "" if longer.is_significant else ", within noise"
    span = f"{100 * longer.low:+.1f}% to {100 * longer.high:+.1f}%"
    return f"{text}, {interval_name(longer)} {span}{doubt}"


def _more_memory(more: Difference | None) -> str:
    if more is None:
        return "-"
    sign = "+" if more.amount >= 0 else ""
    doubt = ", within noise" if more.has_interval and not more.is_significant else ""
    return f"{sign}{formatting.size(more.amount)} ({100 * more.share:+.1f}%){doubt}"
