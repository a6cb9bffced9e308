"""Why the training of a profiled script stopped."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.report.document import Block, BulletList, Code, Details, Text
from paceline.report.post_mortem_text import Report, headline, lines
from paceline.report.sections.common import SectionContext, section


@section("post_mortem", "Why training stopped")
def post_mortem(context: SectionContext) -> Iterator[Block]:
    runs = [run for group in context.groups for run in group.runs]
    for run in runs:
        for report in (run.result or {}).get("post_mortem", ()):
            name = f"{run.id}: " if len(runs) > 1 else ""
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
