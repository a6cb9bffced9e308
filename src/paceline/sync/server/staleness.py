"""How stale the updates of a worker were: for each one when it comes, and in all."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Staleness:
    """`ahead`: iterations between an update's batch and the one that the slowest worker was at when
    it was begun. `behind`: updates by others between reading the weights and applying it."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = {"ahead": Counter(), "behind": Counter()}
        self._news: dict[str, list[int]] = {}

    def note(self, *, iteration: int, part: int, ahead: int, behind: int) -> None:
        values = {"batch": iteration, "part": part, "ahead": ahead, "behind": behind}
        for name, value in values.items():
            self._news.setdefault(name, []).append(value)
            if name in self._counts:
                self._counts[name][value] += 1

    def take_news(self) -> dict[str, list[int]]:
        """What was noted since the last time: lists with one number for each update."""
        news, self._news = self._news, {}
        return news

    def summary(self) -> dict[str, Any]:
        """Mean, largest, and how many updates had which value."""
        return {
            name: {
                "mean": sum(value * count for value, count in counts.items()) / counts.total(),
                "max": max(counts),
                "histogram": {str(value): counts[value] for value in sorted(counts)},
            }
            for name, counts in self._counts.items()
            if counts
        }

    def state_dict(self) -> dict[str, dict[int, int]]:
        return {name: dict(counts) for name, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, dict[int, int]]) -> None:
        self._counts = {name: Counter(counts) for name, counts in state.items()}
