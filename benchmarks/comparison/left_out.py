"""Who does not take part in what, and why: said at the end, so that nobody is missed in silence."""

from __future__ import annotations


class LeftOut:
    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, title: str, place: str, reason: str) -> None:
        self._places.setdefault((title, reason), []).append(place)

    def lines(self) -> list[str]:
        return [
            f"{title} ({', '.join(places)}): {reason}"
            for (title, reason), places in self._places.items()
        ]
