"""What a step costs: one row per configuration, narrow enough for a terminal and a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from paceline import formatting
from paceline.analysis.run_group import known
from paceline.analysis.step_cost import StepCost, step_costs
from paceline.report.document import Block, Figure, Table
from paceline.report.sections.common import (
    Column,
    SectionContext,
    answer,
    bar_figure,
    mean_bars,
    note,
    section,
    table,
)
from paceline.report.sections.phases import phase_bar, phase_figure

LABEL_SEPARATOR = ", "
"""Between the settings in the label of a configuration."""


@section("step_cost", "What a step costs")
def step_cost(context: SectionContext) -> Iterator[Block]:
    costs = step_costs(context.groups)
    if not costs:
        return
    yield answer(step_cost_answer(costs))
    yield from _figures(context, costs)
    yield step_cost_table(costs)
    yield note(
        "Mean over runs and workers. Step: time per iteration; what is neither compute nor exposed"
        " communication is waiting for other workers. Sent: bytes that a worker sends in a step."
        " Memory: what training adds to a worker at its peak (weights, gradients, optimizer state,"
        " activations and buffers), of the worker with the most. Loss: at the end of the run."
    )
    if any(cost.memory["setup_bytes"] is not None for cost in costs):
        yield _memory_table(costs)
        yield note(
            "Memory of a worker after its setup, and in the first steps after the forward pass,"
            " after the backward pass (before the optimizer step) and after the optimizer step."
        )


def _figures(context: SectionContext, costs: Sequence[StepCost]) -> Iterator[Figure]:
    shown = [cost for cost in costs if context.is_plotted(cost.group)]
    times = [
        phase_bar(cost.group.label, cost.split, is_share=False)
        for cost in shown
        if cost.split is not None
    ]
    if times:
        name = context.figure_name("step-cost", "time")
        yield phase_figure(name, "Time of a step", times, is_share=False)
    sizes = [(cost.group, known([cost.memory["peak_bytes"]])) for cost in shown]
    bars = mean_bars(context, sizes, formatting.size)
    name = context.figure_name("step-cost", "memory")
    yield from bar_figure(name, "Peak memory of a worker", "memory", bars, "bytes")


def step_cost_table(costs: Sequence[StepCost]) -> Table:
    return table(
        costs,
        Column("configuration", lambda cost: cost.group.label),
        Column("step", lambda cost: cost.seconds, formatting.short_seconds),
        Column("compute", lambda cost: cost.compute_seconds, formatting.short_seconds),
        Column("exposed comm.", _exposed),
        Column("sent", lambda cost: cost.sent_bytes, formatting.size),
        Column("memory", lambda cost: cost.memory["peak_bytes"], formatting.size),
        Column("loss", lambda cost: cost.loss, formatting.number),
        is_compact=True,
    )


def _exposed(cost: StepCost) -> str | None:
    if cost.split is None or cost.group.workers == 1:
        return None
    seconds = formatting.short_seconds(cost.split.seconds["exchange"])
    return f"{seconds} ({cost.split.share('exchange'):.0%})"


def _memory_table(costs: Sequence[StepCost]) -> Table:
    return table(
        costs,
        Column("configuration", lambda cost: cost.group.label),
        *(
            _memory_column(heading, key)
            for heading, key in (
                ("setup", "setup_bytes"),
                ("forward", "forward_bytes"),
                ("backward", "backward_bytes"),
                ("update", "update_bytes"),
                ("peak", "peak_bytes"),
            )
        ),
        is_compact=True,
    )


def _memory_column(heading: str, key: str) -> Column[StepCost]:
    return Column(heading, lambda cost: cost.memory[key], formatting.size)


def step_cost_answer(costs: Sequence[StepCost]) -> str:
    """The extremes of time, exposed communication and memory, for each model and dataset."""
    several = [cost for cost in costs if cost.group.workers > 1] or list(costs)
    works: dict[str, list[StepCost]] = {}
    for cost in several:
        works.setdefault(cost.group.settings.task, []).append(cost)
    if len(works) == 1:
        return _sentence([(cost.group.label, cost) for cost in several])
    return " ".join(_named_sentence(work, own) for work, own in works.items())


def _named_sentence(work: str, costs: Sequence[StepCost]) -> str:
    """Begins with what the labels have in common, or else with the name of the work."""
    labels = [cost.group.label.split(LABEL_SEPARATOR) for cost in costs]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*labels, strict=False))
    shared = sum(1 for _ in alike)
    # A label may be nothing but the common part.
    if not all(len(label) > shared for label in labels):
        shared = 0
    name = LABEL_SEPARATOR.join(labels[0][:shared]) or work
    rest = [LABEL_SEPARATOR.join(label[shared:]) for label in labels]
    return f"{name}: {_sentence(list(zip(rest, costs, strict=True)))}"


def _sentence(costs: Sequence[tuple[str, StepCost]]) -> str:
    seconds = [(cost.seconds, name) for name, cost in costs]
    shares = [(cost.split.share("exchange"), name) for name, cost in costs if cost.split]
    sizes = [(size, name) for name, cost in costs if (size := cost.memory["peak_bytes"])]
    parts = [
        f"{subject} {_range(values, format)}"
        for subject, values, format in (
            ("A step takes", seconds, formatting.short_seconds),
            ("exposed communication is", shares, lambda share: f"{share:.0%} of it"),
            ("a worker needs", sizes, formatting.size),
        )
        if values
    ]
    return f"{'; '.join(parts)}."


def _range(values: Sequence[tuple[float, str]], format: Callable[[float], str]) -> str:
    (low, least), (high, most) = min(values), max(values)
    if least == most:
        return f"{format(low)} with {least}"
    return f"{format(low)} with {least} to {format(high)} with {most}"
