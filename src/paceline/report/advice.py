"""What to try next: a few rules, each with its reason from the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline import formatting
from paceline.analysis.communication import ALL_REDUCE_STRATEGIES
from paceline.analysis.contention import CpuContention
from paceline.analysis.phases import PhaseBreakdown, iteration_breakdown, run_breakdown
from paceline.analysis.ranking import RankedGroup, Ranking
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import MOST_PLANNED, Difference, repeats_needed
from paceline.analysis.straggler import Straggler
from paceline.analysis.validation import is_number
from paceline.report.bound import MOST, Bottleneck

MOST_STEPS = 5
MOST_REPEATS = 100
"""More of them are no practical advice."""
WORTH_DETECTING = 0.05
"""A smaller difference of two cells hardly decides between them."""
COSTLY = 0.05
"""A share of the wall time from which on something beside training is worth a word."""


def recommend(
    pace: Ranking | None,
    cells: Sequence[RunGroup],
    gaps: Sequence[Difference],
    stragglers: Sequence[Straggler],
    bounds: Sequence[Bottleneck],
    busy: Sequence[CpuContention],
) -> list[str]:
    """The most telling first; none where nothing stands out.

    `gaps` are of the later cells of `pace` against the first, as the headline tests them. `bounds`
    are of cells on a quiet machine: for others there is no advice about a bottleneck.
    """
    steps = [*_of_busy_machine(busy)]
    steps += _of_doubt(pace, gaps, is_busy=bool(busy))
    steps += _of_stragglers(stragglers)
    fastest = pace.ranking[0].cell if pace and pace.ranking else None
    if fastest is not None:
        # A study's cell that was not run, or could not be, has no settings to compare with.
        tried = [cell for cell in cells if cell.runs]
        for bound in bounds:
            if bound.label == fastest.label:
                for rule in RULES:
                    steps += rule(fastest, tried, bound)
        steps += _beside_training(fastest)
    steps += _of_failures(cells)
    return list(dict.fromkeys(steps))[:MOST_STEPS]


def _of_busy_machine(busy: Sequence[CpuContention]) -> Iterator[str]:
    if busy:
        yield (
            f"Rerun on a quiet machine: other processes used up to"
            f" {formatting.share(busy[0].share)} of the CPU, which can explain differences,"
            " stragglers and bottlenecks."
        )


def _of_doubt(pace: Ranking | None, gaps: Sequence[Difference], *, is_busy: bool) -> Iterator[str]:
    if pace is None or len(pace.ranking) < 2:
        return
    if min(len(paced.values) for paced in pace.ranking) < 2:
        yield (
            "Repeat each configuration (three times or more, with different seeds): a single run"
            " does not show run-to-run variation."
        )
    elif not is_busy:
        first, *others = pace.ranking
        ties = [(other, gap) for other, gap in zip(others, gaps, strict=True) if gap.is_tie]
        yield from (_of_tie(first, *tie) for tie in ties[:1])


def _of_tie(first: RankedGroup, tie: RankedGroup, gap: Difference) -> str:
    """How many repeats separate the two; where none do, why."""
    pair = f"{first.cell.label} and {tie.cell.label}"
    size = abs(gap.share)

    def needed(share: float) -> int | None:
        return repeats_needed(first.values, tie.values, share * tie.mean, gap.comparisons)

    count = needed(size)
    if count is not None and count <= MOST_REPEATS:
        more = max(count, 1 + max(len(first.values), len(tie.values)))
        return (
            f"Run {more} repeats of {pair}: enough to detect a difference of"
            f" {formatting.share(size)} with a probability of 80%."
        )
    largest = max(abs(gap.low), abs(gap.high))
    if largest <= WORTH_DETECTING:
        return (
            f"Treat {pair} as equally fast; more repeats are unlikely to separate them: they differ"
            f" by at most {formatting.share(largest)} ({gap.interval_name})."
        )
    worth = f"{WORTH_DETECTING:.0%}"
    coarse = needed(WORTH_DETECTING)
    if coarse is None or coarse > MOST_REPEATS:
        return (
            f"Reduce the noise before comparing {pair} (quiet machine, longer runs): it is too"
            f" large to say which is faster. Even a difference of {worth} would take"
            f" {_many(coarse)} repeats."
        )
    more = max(coarse, 1 + max(len(first.values), len(tie.values)))
    return (
        f"Run {more} repeats of {pair} to detect a difference of {worth}; the measured"
        f" {formatting.share(size)} would take {_many(count)}."
    )


def _many(count: int | None) -> str:
    return f"more than {MOST_PLANNED:,}" if count is None else f"about {count:,}"


def _of_stragglers(stragglers: Sequence[Straggler]) -> Iterator[str]:
    relieved = [one for one in stragglers if one.can_rebalance]
    for one in sorted(relieved, key=lambda one: -one.wait_share)[:1]:
        yield (
            f"Try --shares auto with {one.label}: worker {one.rank} needs"
            f" {one.computing_seconds / one.others_seconds:.1f} times as long for its share, and"
            f" the others wait {formatting.share(one.wait_share)} of their time."
        )


def _of_communication(
    fastest: RunGroup, cells: Sequence[RunGroup], bound: Bottleneck
) -> Iterator[str]:
    split = iteration_breakdown(fastest)
    if split is None or bound.shares["communication"] < 0.25:
        return
    exposed = formatting.share(bound.shares["communication"])
    tried = {cell.config.strategy for cell in cells}
    if not tried & {"overlap", "ddp"}:
        yield (
            f"Try --strategy overlap: exposed communication is {exposed} of each iteration, and"
            f" {_hideable(split)} of it can overlap with the backward pass at most."
        )
    if _can_gain_by_codec(fastest, bound) and not any(
        "codec" in cell.config.options for cell in cells
    ):
        yield (
            f"Try a codec (-o codec=fp16 halves the bytes; it is lossy, so compare accuracy):"
            f" exposed communication is {exposed} of each iteration."
        )
    if "local_sgd" not in tried:
        yield (
            "Try a larger --batch-size, or --strategy local_sgd, which is approximate: both"
            f" communicate less often; communication takes {exposed} of each iteration."
        )


def _can_gain_by_codec(cell: RunGroup, bound: Bottleneck) -> bool:
    """Fewer bytes help only where bytes are what takes the time."""
    if cell.config.strategy not in ALL_REDUCE_STRATEGIES or bound.cause:
        return False
    if bound.wire is not None:
        return bound.wire.bytes / bound.wire.bytes_per_second >= MOST * bound.exchange_seconds
    # Between the processes of one machine an exchange is CPU work, of which a codec adds more.
    has_gpus = bool((cell.finished[0].result or {}).get("hardware", {}).get("gpus"))
    return cell.config.nnodes > 1 or has_gpus


def _hideable(split: PhaseBreakdown) -> str:
    return formatting.share(min(1.0, split.seconds["backward"] / split.seconds["exchange"]))


def _of_computing(fastest: RunGroup, cells: Sequence[RunGroup], bound: Bottleneck) -> Iterator[str]:
    if bound.kind != "compute-bound":
        return
    more, compute = 2 * fastest.workers, formatting.share(bound.shares["compute"])
    if more <= max(cell.workers for cell in cells):
        return
    if fastest.workers == 1:
        yield (
            f"Try 2 workers{_elsewhere(fastest, more)}: {compute} of each iteration is compute,"
            " which is divided among workers; communication is extra."
        )
        return
    serial = 1 - bound.shares["compute"]
    yield (
        f"Try {more} workers{_elsewhere(fastest, more)}: {compute} of each iteration is compute,"
        f" which allows a speedup of at most {1 / (serial + (1 - serial) / 2):.2f}x."
    )


def _elsewhere(cell: RunGroup, workers: int) -> str:
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


def _of_input(fastest: RunGroup, cells: Sequence[RunGroup], bound: Bottleneck) -> Iterator[str]:
    split = iteration_breakdown(fastest)
    if split is not None and split.share("input") > 0.2:
        yield (
            f"Make the input cheaper (less --augment, more --threads): it takes"
            f" {formatting.share(split.share('input'))} of an iteration of {fastest.label}."
        )


def _beside_training(fastest: RunGroup) -> Iterator[str]:
    whole = run_breakdown(fastest)
    if whole is None:
        return
    if whole.share("checkpoint") > COSTLY:
        is_background = fastest.config.checkpoint_mode == "background"
        remedy = (
            "Checkpoint less often (--checkpoint-every)"
            if is_background
            else "Try --checkpoint-mode background"
        )
        yield (
            f"{remedy}: checkpoints block training for {_of_wall(whole, 'checkpoint')} of"
            f" {fastest.label}."
        )
    if whole.share("evaluate") > 0.2:
        yield (
            f"Evaluate less often (--eval-every): it takes {_of_wall(whole, 'evaluate')} of"
            f" {fastest.label}."
        )


def _of_wall(whole: PhaseBreakdown, phase: str) -> str:
    return f"{formatting.share(whole.share(phase))} of the wall time"


def _of_failures(cells: Sequence[RunGroup]) -> Iterator[str]:
    diverged = [cell.label for cell in cells if any(run.status == "diverged" for run in cell.runs)]
    if diverged:
        yield (
            f"Lower --lr, or add --warmup-epochs or --clip-norm, for {'; '.join(diverged[:3])}:"
            " the loss became NaN or infinite."
        )


RULES: tuple[Callable[[RunGroup, Sequence[RunGroup], Bottleneck], Iterator[str]], ...] = (
    _of_communication,
    _of_computing,
    _of_input,
)
