"""Which steps `--steps` selects."""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import UsageError, shown


class StepWindow(NamedTuple):
    first: int = 0
    last: int | None = None
    """Exclusive; None for all that follow."""

    @classmethod
    def parse(cls, text: str) -> StepWindow:
        """Parse 20:120, 20: or :120; no text selects all steps."""
        first, colon, last = text.partition(":")
        are_numbers = all(part.isdecimal() or not part for part in (first, last))
        if not text:
            return cls()
        if not colon or not are_numbers or (last and int(last) <= int(first or 0)):
            raise UsageError(
                f"--steps: must be A:B with A below B, such as 20:120, got {shown(text)}"
            )
        return cls(int(first or 0), int(last) if last else None)

    def is_over(self, steps: int) -> bool:
        return self.last is not None and steps >= self.last
