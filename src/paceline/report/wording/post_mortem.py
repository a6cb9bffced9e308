"""Sentences about a post-mortem: why training does not go on."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline import formatting
from paceline.formatting import format_ranks

RANKS_SHOWN = 16
"""Ranks that do the same are named together, so only unusual jobs have more lines."""

ERROR_WIDTH = 120
PLURALS = {"is": "are", "waits": "wait"}
SOURCE_PLACE = re.compile(r"\[/\S+:\d+\] ")

Report = Mapping[str, Any]
"""One entry of `post_mortem` in result.json."""


def title(reports: Sequence[Report], *, is_running: bool = False) -> str:
    """Of all reports together; a job that runs may go on after a hang."""
    may_resume = [is_pause(one) or (is_running and one["event"] == "hang") for one in reports]
    return "Why training paused" if all(may_resume) else "Why training stopped"


def headline(report: Report) -> str:
    if is_pause(report):
        return _pause(report)
    spent = formatting.seconds(report["seconds"])
    if report["event"] == "hang":
        return f"No rank has made progress for {spent}."
    if report["event"] == "stop":
        return f"The job was stopped after {spent} without progress."
    first = _state(report, report["first_rank"])
    return f"Rank {report['first_rank']} failed first: {_end(first)}."


def is_pause(report: Report) -> bool:
    """Whether training resumed."""
    return report.get("paused_seconds") is not None


def _pause(report: Report) -> str:
    """With the ranks that the others waited for."""
    causes: dict[str, list[int]] = {}
    for state in report["ranks"]:
        if state["line"] and not state["collective"]:
            causes.setdefault(state["line"], []).append(state["rank"])
    at = "; ".join(f"{format_ranks(ranks)} at {line}" for line, ranks in causes.items())
    spent = formatting.seconds(report["paused_seconds"])
    return f"Training paused for {spent} and resumed{f': {at}' if at else ''}."


def lines(report: Report) -> Iterator[str]:
    """One line for each thing the ranks do, with the ranks that do it."""
    for mismatch in report["mismatches"]:
        yield _mismatch(mismatch)
    together: dict[str, list[int]] = {}
    for state in report["ranks"]:
        together.setdefault(_doing(state), []).append(state["rank"])
    # Ranks that end or run are usually the cause; those that wait are the effect.
    together = dict(sorted(together.items(), key=lambda item: item[0].startswith("waits")))
    for number, (doing, ranks) in enumerate(together.items()):
        if number == RANKS_SHOWN:
            yield f"{len(together) - RANKS_SHOWN} more in the records"
            return
        yield f"{format_ranks(ranks)} {doing if len(ranks) == 1 else _plural(doing)}"


def _plural(doing: str) -> str:
    return re.sub(r"^(is|waits)\b", lambda found: PLURALS[found[0]], doing)


def _state(report: Report, rank: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(one for one in report["ranks"] if one["rank"] == rank)
    return found


def _doing(state: Mapping[str, Any]) -> str:
    at = f", at {state['line']}" if state["line"] else ""
    if state["ended"]:
        return f"{_end(state)}{at}"
    collective = state["collective"]
    if collective is None:
        stack = at if state["stack"] else "; its stack could not be read"
        return f"is not in a collective{stack}"
    spent = formatting.seconds(collective["seconds"])
    missing = collective["missing_ranks"]
    what = _call(collective)
    if missing:
        return f"waits for {format_ranks(missing)} in {what} for {spent}{at}"
    return f"waits in {what} for {spent}{at}"


def _end(state: Mapping[str, Any]) -> str:
    if not state["exception"]:
        return str(state["ended"])
    # Errors of gloo begin with a place in its source, and go on with advice.
    text = SOURCE_PLACE.sub("", state["exception"]).split(". ")[0].rstrip(".")
    return textwrap.shorten(text, ERROR_WIDTH, placeholder=" ...")


def _call(call: Mapping[str, Any]) -> str:
    size = f" of {formatting.size(call['bytes'])}" if call["bytes"] else ""
    return f"{call['operation']}{size} (number {call['sequence']} of group {call['group']})"


def _mismatch(mismatch: Mapping[str, Any]) -> str:
    """What each rank called, the same calls together."""
    together: dict[str, list[int]] = {}
    for call in mismatch["calls"]:
        size = f" of {formatting.size(call['bytes'])}" if call["bytes"] else ""
        root = f" with root {call['root']}" if call["root"] >= 0 else ""
        together.setdefault(f"{call['operation']}{size}{root}", []).append(call["rank"])
    calls = ", ".join(f"{format_ranks(ranks)} {what}" for what, ranks in together.items())
    return (
        f"The ranks call different collectives as number {mismatch['sequence']} of group"
        f" {mismatch['group']}: {calls}"
    )
