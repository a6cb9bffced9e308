"""What to try next: a few rules, each with the numbers that it follows from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.analysis.communication import ALL_REDUCE_STRATEGIES
from paceline.analysis.contention import CpuContention
from paceline.analysis.phases import (
    BOTTLENECK_SHARE,
    Bottleneck,
    iteration_breakdown,
    run_breakdown,
)
from paceline.analysis.ranking import RankedGroup, Ranking
from paceline.analysis.ranks import Straggler
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import Difference, repeats_needed
from paceline.analysis.validation import is_number

MOST_REPEATS = 100
"""More are not practical."""
WORTH_DETECTING = 0.05
"""A smaller difference between two configurations hardly decides between them."""
COSTLY_CHECKPOINTS = 0.05
"""Share of the wall time."""
COSTLY_INPUT = 0.2
"""Share of an iteration."""
COSTLY_EVALUATION = 0.2
"""Share of the wall time."""
COSTLY_COMMUNICATION = 0.25
"""Share of an iteration."""


@dataclass(frozen=True, slots=True)
class QuietMachine:
    """Rerun: other processes used this share of the CPU."""

    share: float


@dataclass(frozen=True, slots=True)
class Repeats:
    """Repeat each configuration: some have a single run."""


@dataclass(frozen=True, slots=True)
class MoreRepeats:
    """Repeat two tied configurations to detect `difference`, with a probability of 80%."""

    first: str
    other: str
    count: int
    difference: float
    measured: float
    """The measured difference, which may be too small to detect in practice."""
    measured_count: int | None
    """Repeats that detect it; None where they are too many to compute."""


@dataclass(frozen=True, slots=True)
class TreatAsEqual:
    """More repeats are unlikely to separate two configurations that differ by at most `bound`."""

    first: str
    other: str
    bound: float
    gap: Difference


@dataclass(frozen=True, slots=True)
class ReduceNoise:
    """Even a difference worth detecting would take too many repeats of two configurations."""

    first: str
    other: str
    difference: float
    count: int | None
    """None where they are too many to compute."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    straggler: Straggler


@dataclass(frozen=True, slots=True)
class Overlap:
    exposed: float
    """Communication as a share of an iteration."""
    overlappable: float
    """The share of it that fits into the backward pass."""


@dataclass(frozen=True, slots=True)
class Compress:
    exposed: float


@dataclass(frozen=True, slots=True)
class CommunicateLess:
    exposed: float


@dataclass(frozen=True, slots=True)
class MoreWorkers:
    workers: int
    compute: float
    """Share of an iteration."""
    speedup: float | None
    """The limit; None where there is a single worker, which does not communicate yet."""
    cores: float | None
    """Of this machine, where they are too few for these workers."""


@dataclass(frozen=True, slots=True)
class CheaperInput:
    label: str
    share: float


@dataclass(frozen=True, slots=True)
class CheaperCheckpoints:
    label: str
    share: float
    """Of the wall time."""
    is_background: bool


@dataclass(frozen=True, slots=True)
class FewerEvaluations:
    label: str
    share: float
    """Of the wall time."""


@dataclass(frozen=True, slots=True)
class Stabilize:
    """Configurations that diverged."""

    labels: tuple[str, ...]


Recommendation = (
    QuietMachine
    | Repeats
    | MoreRepeats
    | TreatAsEqual
    | ReduceNoise
    | Rebalance
    | Overlap
    | Compress
    | CommunicateLess
    | MoreWorkers
    | CheaperInput
    | CheaperCheckpoints
    | FewerEvaluations
    | Stabilize
)


def recommend(
    ranking: Ranking | None,
    groups: Sequence[RunGroup],
    gaps: Sequence[Difference],
    stragglers: Sequence[Straggler],
    bottlenecks: Sequence[Bottleneck],
    contention: Sequence[CpuContention],
) -> list[Recommendation]:
    """The most important first; empty where nothing stands out.

    `gaps` are those of the later configurations of `ranking` against the first. `bottlenecks` are
    of configurations without contention: the others get no recommendation about a bottleneck.
    """
    found: list[Recommendation] = [QuietMachine(contention[0].share)] if contention else []
    found += _about_ties(ranking, gaps, is_busy=bool(contention))
    found += _about_stragglers(stragglers)
    fastest = ranking.entries[0].group if ranking and ranking.entries else None
    # The rules name settings of `paceline train`.
    if fastest is not None and fastest.settings.kind == "train":
        # A configuration that was not run, or could not be, has no settings to compare with.
        tried = [group for group in groups if group.runs]
        for bottleneck in bottlenecks:
            if bottleneck.label == fastest.label:
                for rule in BOTTLENECK_RULES:
                    found += rule(fastest, tried, bottleneck)
        found += _about_wall_time(fastest)
    diverged = [
        group.label for group in groups if any(run.status == "diverged" for run in group.runs)
    ]
    if diverged:
        found.append(Stabilize(tuple(diverged)))
    return found


def _about_ties(
    ranking: Ranking | None, gaps: Sequence[Difference], *, is_busy: bool
) -> Iterator[Recommendation]:
    if ranking is None or len(ranking.entries) < 2:
        return
    if min(len(one.values) for one in ranking.entries) < 2:
        yield Repeats()
    elif not is_busy:
        first, *others = ranking.entries
        ties = [(other, gap) for other, gap in zip(others, gaps, strict=True) if gap.is_tie]
        yield from (_about_tie(first, *tie) for tie in ties[:1])


def _about_tie(first: RankedGroup, tie: RankedGroup, gap: Difference) -> Recommendation:
    labels = first.group.label, tie.group.label
    measured = abs(gap.share)

    def needed(share: float) -> int | None:
        return repeats_needed(first.values, tie.values, share * tie.mean, gap.comparisons)

    def more(count: int) -> int:
        return max(count, 1 + max(len(first.values), len(tie.values)))

    count = needed(measured)
    if count is not None and count <= MOST_REPEATS:
        return MoreRepeats(*labels, more(count), measured, measured, count)
    bound = max(abs(gap.low), abs(gap.high))
    if bound <= WORTH_DETECTING:
        return TreatAsEqual(*labels, bound, gap)
    coarse = needed(WORTH_DETECTING)
    if coarse is None or coarse > MOST_REPEATS:
        return ReduceNoise(*labels, WORTH_DETECTING, coarse)
    return MoreRepeats(*labels, more(coarse), WORTH_DETECTING, measured, count)


def _about_stragglers(stragglers: Sequence[Straggler]) -> Iterator[Recommendation]:
    movable = [one for one in stragglers if one.can_rebalance]
    yield from (Rebalance(one) for one in sorted(movable, key=lambda one: -one.wait_share)[:1])


def _about_communication(
    fastest: RunGroup, tried: Sequence[RunGroup], bottleneck: Bottleneck
) -> Iterator[Recommendation]:
    split = iteration_breakdown(fastest)
    exposed = bottleneck.shares["communication"]
    if split is None or exposed < COSTLY_COMMUNICATION:
        return
    strategies = {group.settings.strategy for group in tried}
    if not strategies & {"overlap", "ddp"}:
        yield Overlap(exposed, min(1.0, split.seconds["backward"] / split.seconds["exchange"]))
    if _can_gain_by_codec(fastest, bottleneck) and not any(
        "codec" in group.settings.options for group in tried
    ):
        yield Compress(exposed)
    if "local_sgd" not in strategies:
        yield CommunicateLess(exposed)


def _can_gain_by_codec(group: RunGroup, bottleneck: Bottleneck) -> bool:
    """Fewer bytes help only where bytes are what takes the time."""
    if group.settings.strategy not in ALL_REDUCE_STRATEGIES or bottleneck.cause is not None:
        return False
    wire = bottleneck.wire
    if wire is not None:
        return wire.bytes / wire.bytes_per_second >= BOTTLENECK_SHARE * bottleneck.exchange_seconds
    # Between processes of one machine an exchange is CPU work, and a codec adds to it.
    has_gpus = bool((group.finished[0].result or {}).get("hardware", {}).get("gpus"))
    return group.settings.nnodes > 1 or has_gpus


def _about_compute(
    fastest: RunGroup, tried: Sequence[RunGroup], bottleneck: Bottleneck
) -> Iterator[Recommendation]:
    workers, compute = 2 * fastest.workers, bottleneck.shares["compute"]
    if bottleneck.kind != "compute-bound" or workers <= max(group.workers for group in tried):
        return
    serial = 1 - compute
    speedup = None if fastest.workers == 1 else 1 / (serial + (1 - serial) / 2)
    yield MoreWorkers(workers, compute, speedup, _too_few_cores(fastest, workers))


def _too_few_cores(group: RunGroup, workers: int) -> float | None:
    """The cores of the machine, where `workers` workers would have more threads than these."""
    hardware = (group.finished[0].result or {}).get("hardware", {})
    cores = hardware.get("cores")
    if group.settings.nnodes > 1 or hardware.get("gpus") or not is_number(cores):
        return None
    # Without a setting, the workers share all cores.
    threads = group.settings.threads or max(1, cores // group.workers)
    return cores if workers * threads > cores else None


def _about_input(
    fastest: RunGroup, tried: Sequence[RunGroup], bottleneck: Bottleneck
) -> Iterator[Recommendation]:
    split = iteration_breakdown(fastest)
    if split is not None and split.share("input") > COSTLY_INPUT:
        yield CheaperInput(fastest.label, split.share("input"))


def _about_wall_time(fastest: RunGroup) -> Iterator[Recommendation]:
    whole = run_breakdown(fastest)
    if whole is None:
        return
    if whole.share("checkpoint") > COSTLY_CHECKPOINTS:
        is_background = fastest.settings.get("checkpoint_mode") == "background"
        yield CheaperCheckpoints(fastest.label, whole.share("checkpoint"), is_background)
    if whole.share("evaluate") > COSTLY_EVALUATION:
        yield FewerEvaluations(fastest.label, whole.share("evaluate"))


BOTTLENECK_RULES: tuple[
    Callable[[RunGroup, Sequence[RunGroup], Bottleneck], Iterator[Recommendation]], ...
] = (_about_communication, _about_compute, _about_input)
