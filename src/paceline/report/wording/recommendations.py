"""What to try next."""

from __future__ import annotations

from paceline import formatting
from paceline.analysis import recommendations as advice
from paceline.analysis.statistics import MOST_PLANNED
from paceline.analysis.verdict import Verdict
from paceline.report.wording import scripts
from paceline.report.wording.differences import interval_name

MOST_STEPS = 5


def next_steps(verdict: Verdict) -> list[str]:
    findings = (one for script in verdict.scripts for one in script.findings)
    changes = filter(None, map(scripts.remedy, findings))
    steps = (*changes, *map(recommendation_text, verdict.recommendations))
    return list(dict.fromkeys(steps))[:MOST_STEPS]


def recommendation_text(one: advice.Recommendation) -> str:
    match one:
        case advice.QuietMachine():
            return (
                f"Rerun on a quiet machine: other processes used up to"
                f" {formatting.share(one.share)} of the CPU."
            )
        case advice.Repeats() | advice.MoreRepeats() | advice.TreatAsEqual() | advice.ReduceNoise():
            return _about_repeats(one)
        case advice.Rebalance(slow):
            return (
                f"Try --shares auto with {slow.label}: worker {slow.rank} needs"
                f" {slow.slowdown:.1f} times as long for its share,"
                f" and the others wait {formatting.share(slow.wait_share)} of their time."
            )
        case advice.Overlap() | advice.Compress() | advice.CommunicateLess():
            return _about_communication(one)
        case advice.MoreWorkers():
            return _more_workers(one)
        case advice.CheaperInput() | advice.CheaperCheckpoints() | advice.FewerEvaluations():
            return _about_time_without_training(one)
        case advice.Stabilize():
            return (
                f"Lower --lr, or add --warmup-epochs or --clip-norm, for"
                f" {'; '.join(one.labels[:3])}: the loss became NaN or infinite."
            )


def _about_repeats(
    one: advice.Repeats | advice.MoreRepeats | advice.TreatAsEqual | advice.ReduceNoise,
) -> str:
    match one:
        case advice.Repeats():
            return (
                "Repeat each configuration (three times or more, with different seeds): a single"
                " run does not show run-to-run variation."
            )
        case advice.MoreRepeats() if one.difference == one.measured:
            return (
                f"Run {one.count} repeats of {one.first} and {one.other}: enough to detect a"
                f" difference of {formatting.share(one.difference)} with a probability of 80%."
            )
        case advice.MoreRepeats():
            return (
                f"Run {one.count} repeats of {one.first} and {one.other} to detect a difference of"
                f" {one.difference:.0%}; the measured {formatting.share(one.measured)} would take"
                f" {_repeats(one.measured_count)}."
            )
        case advice.TreatAsEqual():
            return (
                f"Treat {one.first} and {one.other} as equally fast; more repeats are unlikely to"
                f" separate them: they differ by at most {formatting.share(one.bound)}"
                f" ({interval_name(one.gap)})."
            )
        case advice.ReduceNoise():
            return (
                f"Reduce the noise before comparing {one.first} and {one.other} (quiet machine,"
                " longer runs): it is too large to say which is faster. Even a difference of"
                f" {one.difference:.0%} would take {_repeats(one.count)} repeats."
            )


def _about_communication(one: advice.Overlap | advice.Compress | advice.CommunicateLess) -> str:
    exposed = formatting.share(one.exposed)
    match one:
        case advice.Overlap():
            return (
                f"Try --strategy overlap: exposed communication is {exposed} of each iteration; at"
                f" most {formatting.share(one.overlappable)} of it can overlap with the backward"
                " pass."
            )
        case advice.Compress():
            return (
                f"Try a codec (-o codec=fp16 halves the bytes; it is lossy, so compare accuracy):"
                f" exposed communication is {exposed} of each iteration."
            )
        case advice.CommunicateLess():
            return (
                "Try a larger --batch-size, or --strategy local_sgd, which is approximate: both"
                f" communicate less often; communication takes {exposed} of each iteration."
            )


def _about_time_without_training(
    one: advice.CheaperInput | advice.CheaperCheckpoints | advice.FewerEvaluations,
) -> str:
    share = formatting.share(one.share)
    match one:
        case advice.CheaperInput():
            return (
                f"Make the input cheaper (less --augment, more --threads): it takes {share} of an"
                f" iteration of {one.label}."
            )
        case advice.CheaperCheckpoints():
            remedy = (
                "Checkpoint less often (--checkpoint-every)"
                if one.is_background
                else "Try --checkpoint-mode background"
            )
            return (
                f"{remedy}: checkpoints block training for {share} of the wall time of {one.label}."
            )
        case advice.FewerEvaluations():
            return (
                f"Evaluate less often (--eval-every): it takes {share} of the wall time of"
                f" {one.label}."
            )


def _more_workers(one: advice.MoreWorkers) -> str:
    where = f" on more cores than the {one.cores:g} of this machine" if one.cores else ""
    text = f"Try {one.workers} workers{where}: {formatting.share(one.compute)} of each iteration is"
    if one.speedup is None:
        return f"{text} compute, which is divided among workers; communication is extra."
    return f"{text} compute, which allows a speedup of at most {one.speedup:.2f}x."


def _repeats(count: int | None) -> str:
    return f"more than {MOST_PLANNED:,}" if count is None else f"about {count:,}"
