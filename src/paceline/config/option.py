"""What a setting says about itself besides its type and default."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from paceline.values import Limits

GROUPS = {
    "task": "What to train",
    "budget": "How long, and in what batches",
    "optimiser": "Optimiser and learning rate",
    "numerics": "Numerics",
    "strategy": "How replicas are kept in step",
    "processes": "Processes",
    "checkpoints": "Checkpoints",
    "records": "Records",
}


@dataclass(frozen=True, slots=True)
class Option:
    group: str
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """An exclusive lower limit."""
    below: float | None = None
    """An exclusive upper limit."""
    may_change: bool = False
    """Whether a resumed run may differ from the original here."""
    short: str | None = None
    """A one-letter flag."""

    @property
    def limits(self) -> Limits:
        return Limits(self.minimum, self.maximum, self.above, self.below)


def described(default: Any, group: str, doc: str, **limits: Any) -> Any:
    """A dataclass field with its option."""
    option = Option(group, doc, **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"option": option})
    return field(default=default, metadata={"option": option})


def option_of(item: dataclasses.Field[Any]) -> Option:
    option = item.metadata["option"]
    assert isinstance(option, Option)
    return option


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
