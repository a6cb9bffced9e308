"""What to try next: a few rules, each with its reason from the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.report import units
from paceline.report.bound import bound_of
from paceline.report.cells import Cell
from paceline.report.pace import Pace, Paced
from paceline.report.phases import Split, of_cell, whole_of_cell
from paceline.report.section.bandwidth import SUMMING
from paceline.report.shape import is_number
from paceline.report.statistics import repeats_to_tell
from paceline.report.straggler import Straggler

MOST_STEPS = 5
COSTLY = 0.05
"""A share of the wall time from which on something beside training is worth a word."""


def advise(
    pace: Pace | None,
    cells: Sequence[Cell],
    ties: Sequence[Paced],
    stragglers: Sequence[Straggler],
) -> list[str]:
    """The most telling first; none where nothing stands out."""
    steps = [*_of_doubt(pace, ties), *_of_stragglers(stragglers)]
    fastest = pace.ranking[0].cell if pace and pace.ranking else None
    if fastest is not None:
        # A study's cell that was not run, or could not be, has no settings to compare with.
        tried = [cell for cell in cells if cell.runs]
        for rule in RULES:
            steps += rule(fastest, tried)
    steps += _of_failures(cells)
    return list(dict.fromkeys(steps))[:MOST_STEPS]


def _of_doubt(pace: Pace | None, ties: Sequence[Paced]) -> Iterator[str]:
    if pace is None or len(pace.ranking) < 2:
        return
    if min(len(paced.values) for paced in pace.ranking) < 2:
        yield (
            "Repeat each cell (three times or more, with different seeds): one repeat says nothing"
            " about the spread between runs."
        )
    elif ties:
        first = pace.ranking[0]
        needed = repeats_to_tell(first.values, ties[0].values)
        if needed is not None:
            more = max(needed, 1 + max(len(first.values), len(ties[0].values)))
            yield (
                f"Run {more} repeats of {first.cell.label} and {ties[0].cell.label}: with their"
                " spread so many would tell a difference of this size."
            )
        else:
            yield (
                f"Choose between {first.cell.label} and {ties[0].cell.label} by something else"
                " than speed: repeats will hardly tell them apart."
            )


def _of_stragglers(stragglers: Sequence[Straggler]) -> Iterator[str]:
    relieved = [one for one in stragglers if one.can_be_dealt_less]
    for one in sorted(relieved, key=lambda one: -one.wait_share)[:1]:
        yield (
            f"Try --shares auto with {one.label}: worker {one.rank} needs"
            f" {one.computing_seconds / one.others_seconds:.1f} times as long for its share, and"
            f" the others wait {units.share(one.wait_share)} of their time."
        )


def _of_network(fastest: Cell, cells: Sequence[Cell]) -> Iterator[str]:
    bound, split = bound_of(fastest), of_cell(fastest)
    if bound is None or split is None or bound.shares["communication"] < 0.25:
        return
    exposed = units.share(bound.shares["communication"])
    tried = {cell.config.strategy for cell in cells}
    if not tried & {"overlap", "ddp"}:
        yield (
            f"Try --strategy overlap: {exposed} of an iteration is exposed communication, and"
            f" {_hideable(split)} of it could hide behind the backward pass at best."
        )
    is_summing = fastest.config.strategy in SUMMING
    if is_summing and not any("codec" in cell.config.options for cell in cells):
        yield (
            f"Try a codec (-o codec=fp16 halves the bytes): {exposed} of an iteration goes to"
            " the wire."
        )
    if "local_sgd" not in tried:
        yield (
            "Try a larger --batch-size or --strategy local_sgd: fewer exchanges for the same"
            f" samples, of which each now takes {exposed} of its iteration."
        )


def _hideable(split: Split) -> str:
    return units.share(min(1.0, split.seconds["backward"] / split.seconds["exchange"]))


def _of_computing(fastest: Cell, cells: Sequence[Cell]) -> Iterator[str]:
    bound = bound_of(fastest)
    if bound is None or bound.kind != "compute-bound":
        return
    more, computing = 2 * fastest.workers, units.share(bound.shares["computing"])
    if more <= max(cell.workers for cell in cells):
        return
    if fastest.workers == 1:
        yield (
            f"Try 2 workers{_elsewhere(fastest, more)}: {computing} of an iteration is"
            " computing, which is shared out; communication comes on top."
        )
        return
    serial = 1 - bound.shares["computing"]
    yield (
        f"Try {more} workers{_elsewhere(fastest, more)}: {computing} of an iteration is"
        f" computing, so at best {1 / (serial + (1 - serial) / 2):.2f} times the pace."
    )


def _elsewhere(cell: Cell, workers: int) -> str:
    """Said where so many workers would have more threads than the machine has cores."""
    hardware = (cell.finished[0].result or {}).get("hardware", {})
    cores = hardware.get("cores")
    if cell.config.nnodes > 1 or hardware.get("gpus") or not is_number(cores):
        return ""
    # Where nobody said, the workers there are have all the cores.
    threads = cell.config.threads or max(1, cores // cell.workers)
    if workers * threads <= cores:
        return ""
    return f" on more cores than the {cores:g} of this machine"


def _of_input(fastest: Cell, cells: Sequence[Cell]) -> Iterator[str]:
    split = of_cell(fastest)
    if split is not None and split.share("input") > 0.2:
        yield (
            f"Make the input cheaper (less --augment, more --threads): it takes"
            f" {units.share(split.share('input'))} of an iteration of {fastest.label}."
        )


def _beside_training(fastest: Cell, cells: Sequence[Cell]) -> Iterator[str]:
    whole = whole_of_cell(fastest)
    if whole is None:
        return
    if whole.share("checkpoint") > COSTLY:
        is_background = fastest.config.checkpoint_mode == "background"
        remedy = "a rarer --checkpoint-every" if is_background else "--checkpoint-mode background"
        yield (
            f"Try {remedy}: checkpoints hold training up for"
            f" {_of_wall(whole, 'checkpoint')} of {fastest.label}."
        )
    if whole.share("evaluate") > 0.2:
        yield (
            f"Evaluate less often (--eval-every): it takes {_of_wall(whole, 'evaluate')} of"
            f" {fastest.label}."
        )


def _of_wall(whole: Split, phase: str) -> str:
    return f"{units.share(whole.share(phase))} of the wall time"


def _of_failures(cells: Sequence[Cell]) -> Iterator[str]:
    diverged = [cell.label for cell in cells if any(run.status == "diverged" for run in cell.runs)]
    if diverged:
        yield (
            f"Lower --lr, or add --warmup-epochs or --clip-norm, for {'; '.join(diverged[:3])}:"
            " the loss left the finite numbers."
        )


RULES: tuple[Callable[[Cell, Sequence[Cell]], Iterator[str]], ...] = (
    _of_network,
    _of_computing,
    _of_input,
    _beside_training,
)
