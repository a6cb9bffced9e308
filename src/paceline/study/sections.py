"""Names of the sections that a report can have, for checking a study file's `report:` list."""

SECTION_NAMES = (
    "verdict",
    "overview",
    "target",
    "winners",
    "curves",
    "accuracy",
    "evaluations",
    "iteration_time",
    "ranks",
    "phases",
    "timeline",
    "scaling",
    "batch_size",
    "checkpoint",
    "traffic",
    "bandwidth",
    "resources",
    "order",
    "configuration",
)
