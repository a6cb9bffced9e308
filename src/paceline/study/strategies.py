"""Whether each cell's strategy takes its options and its workers; this loads torch."""

from __future__ import annotations

from paceline.errors import ConfigError, UsageError
from paceline.launch.launcher import check_strategy
from paceline.study.located import Problems
from paceline.study.plan import Plan


def check_strategies(plan: Plan) -> None:
    """ConfigError with the lines of the study file, before any of its cells has cost an hour."""
    problems = Problems()
    for cell in plan.study.cells:
        if cell.repeat > 1 or cell.run != cell.id:
            continue
        try:
            check_strategy(plan.configs[cell.id])
        except ConfigError as error:
            plan.tell(cell, error.problems, problems)
        except UsageError as error:
            plan.tell(cell, (str(error),), problems)
    problems.raise_if_any()
