"""Why the training of a profiled script stopped."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.report.document import Block, BulletList, Code, Details, Text
from paceline.report.sections.common import SectionContext, section
from paceline.report.wording.post_mortem import Report, headline, lines, title


def _reports(context: SectionContext) -> list[tuple[str, Report]]:
    """With the names of the runs."""
    runs = [run for group in context.groups for run in group.runs]
    return [(run.id, report) for run in runs for report in run.post_mortems]


def _title(context: SectionContext) -> str:
    return title([report for _, report in _reports(context)])


@section("post_mortem", _title)
def post_mortem(context: SectionContext) -> Iterator[Block]:
    for run, report in _reports(context):
        name = "" if context.is_one_run else f"{run}: "
        yield Text(f"{name}{headline(report)}", kind="answer")
        yield BulletList([("", line) for line in lines(report)])
        if stacks := _stacks(report):
            yield Details("Python stacks of the main threads", [Code(stacks)])


def _stacks(report: Report) -> str:
    return "\n\n".join(
        "\n".join(
            [
                f"rank {state['rank']}, process {state['process']}, innermost call first",
                *(f"  {one['file']}:{one['line']} in {one['function']}" for one in state["stack"]),
            ]
        )
        for state in report["ranks"]
        if state["stack"]
    )
