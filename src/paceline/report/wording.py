"""The sentences of a report: each phrases what the analysis found.

A difference within noise is called that, and a single run is named as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis import recommendations as advice
from paceline.analysis.accuracy import (
    ACCURACY,
    AccuracyDifference,
    ChanceAccuracy,
    quality_of,
)
from paceline.analysis.comparison import FigureRow, StudyPair, summarize_pair
from paceline.analysis.contention import CpuContention
from paceline.analysis.phases import Bottleneck, CommunicationCause, Explanation
from paceline.analysis.ranking import (
    TO_TARGET,
    Deviation,
    RankedGroup,
    Ranking,
    deviations,
    is_exact,
)
from paceline.analysis.ranks import Straggler
from paceline.analysis.run import Run
from paceline.analysis.run_group import NOT_RUN, RunGroup
from paceline.analysis.scaling import ScalingPoint, ScalingSeries, superlinear_causes
from paceline.analysis.statistics import FEWEST_ITERATIONS, MOST_PLANNED, Difference
from paceline.analysis.verdict import ScriptVerdict, Verdict
from paceline.analysis.world_sizes import WorldSize
from paceline.report import post_mortem_text, script_wording
from paceline.report.bottleneck_wording import NAMED, listed, several_text, shares_text

MOST_LISTED = 10
MOST_STEPS = 5
SINGLE = "single run"
"""Instead of a significance: the spread between runs is unknown."""
CONTENTION = "CPU contention"
"""Instead of the significance of a time: other processes used the machine."""
NO_RESULT = "no result.json: still running, or killed"

DEVIATIONS = {
    "lossy codec": "codec {} sends lossy gradients",
    "user strategy": "a user-defined strategy is not known to be exact",
    "elastic averaging": "workers train independently around a common center",
    "local steps": "workers train independently between averages",
    "staleness": "mode={} applies stale gradients",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A word or two for its subject, and a sentence."""

    subject: str
    text: str


def headline(verdict: Verdict) -> str:
    """The answer: the fastest configuration, by how much and how surely."""
    ranking = verdict.ranking
    if ranking is None:
        text = "Not compared: every configuration uses a different model or dataset."
    elif not ranking.entries:
        text = _nothing_ranked(verdict.groups)
    else:
        text = _fastest(verdict, ranking)
        if verdict.has_several_kinds:
            text = f"Of {_kind(ranking.entries[0].group)}: {text}"
    text = pause_sentence(verdict.groups) + text
    text += script_sentence(verdict)
    return text + chance_sentence(verdict.at_chance) + rerun_sentence(verdict.contention)


def pause_sentence(groups: Sequence[RunGroup]) -> str:
    """What the headline of a single script begins with if its training paused."""
    if len(groups) != 1 or len(groups[0].runs) != 1:
        return ""
    pauses = filter(post_mortem_text.is_pause, groups[0].runs[0].post_mortems)
    return "".join(f"{post_mortem_text.headline(pause)} " for pause in pauses)


def script_sentence(verdict: Verdict) -> str:
    """What to append to the headline of a single script: its costliest fault."""
    if len(verdict.groups) != 1 or not verdict.scripts or not verdict.scripts[0].faults:
        return ""
    first, *others = verdict.scripts[0].faults
    more = f" {len(others)} more finding{'s' * (len(others) > 1)} below." if others else ""
    return f" {script_wording.subject(first)}: {script_wording.sentence(first)}{more}"


def _fastest(verdict: Verdict, ranking: Ranking) -> str:
    if verdict.approximate is not None:
        text = f"{ranking_headline(ranking, verdict.lead, 'exact')} " + beside_exact(
            verdict.approximate, verdict.approximate_lead, ranking.entries[0]
        )
    else:
        text = ranking_headline(ranking, verdict.lead)
        if len(ranking.entries) > 1 and not any(is_exact(one.group) for one in ranking.entries):
            quality = quality_of(one.group for one in ranking.entries)
            text += f" All of these are approximate: compare {quality.name} as well as time."
    return text + "".join(
        f" {point.group.label}: scaling {efficiency_text(series, point)}."
        for series, point in verdict.superlinear
    )


def _kind(group: RunGroup) -> str:
    return group.settings.task


def _nothing_ranked(groups: Sequence[RunGroup]) -> str:
    count = sum(len(group.runs) for group in groups)
    if not count:
        return "Nothing was run yet."
    runs = [run for group in groups for run in group.finished]
    if runs:
        is_script = all(run.settings.kind == "profile" for run in runs)
        step = "training step" if is_script else "iteration of a finished run"
        return f"No {step} was {'measured' if is_script else 'timed'}."
    text = "The run did not finish" if count == 1 else f"None of the {count} runs finished"
    # A configuration that was not run does not explain why others did not finish.
    troubled = [group for group in groups if group.runs and cause_text(group)]
    if not troubled:
        return f"{text}."
    if count == 1 and (reports := troubled[0].runs[0].post_mortems):
        text = f"{post_mortem_text.headline(reports[-1])} {text}"
    first = min(troubled, key=lambda group: not group.has_failed)
    reason = cause_text(first) if count == 1 else describe_trouble(first)
    return f"{text}: {reason.rstrip('.')}."


def ranking_headline(ranking: Ranking, lead: Difference | None, scope: str = "") -> str:
    """The fastest, by how much, and how surely; `scope` is `exact` or `approximate`.

    `lead` is how much longer the second takes; None where there is no second.
    """
    first = ranking.entries[0]
    time = f"{formatting.seconds(first.mean)} {ranking.name}"
    label = first.group.label
    if lead is None:
        return f"Fastest {scope}: {label}, {time}." if scope else _only(ranking, first)
    second = ranking.entries[1].group.label
    if lead.is_tie:
        among = f" among {scope} configurations" if scope else ""
        return (
            f"No clear winner{among}: {label} took {time}, {formatting.share(lead.share)} less time"
            f" than {second}, which is within noise ({_interval(lead)})."
        )
    if lead.is_significant:
        lead_text = f"{time}, {_less_time(lead)} than {second}"
    else:
        gap = formatting.share(lead.share)
        lead_text = f"{time}, {gap} less time than {second} ({_single_run(ranking.entries[:2])})"
    if scope:
        return f"Fastest {scope}: {label}, {lead_text}."
    return f"{label} {'is' if lead.is_significant else 'was'} fastest: {lead_text}."


def beside_exact(ranking: Ranking, lead: Difference | None, exact: RankedGroup) -> str:
    """The fastest approximate configuration, and its result beside that of the fastest exact."""
    text = "Approximate configurations can change the result"
    first = ranking.entries[0].group
    quality = quality_of((first, exact.group))
    own, other = first.mean_of(quality.key), exact.group.mean_of(quality.key)
    if own is not None and other is not None:
        text += f": {quality.name} {own:.4f} with {first.label}, {other:.4f} with exact training"
        text += f" ({exact.group.label})"
    return f"{ranking_headline(ranking, lead, 'approximate')} {text}."


def _only(ranking: Ranking, only: RankedGroup) -> str:
    text = f"{only.group.label}: {_only_time(ranking, only)}"
    quality = quality_of([only.group])
    value = only.group.mean_of(quality.key)
    if value is not None:
        text += f", {quality.name} {value:.4f}"
    return f"{text}."


def _only_time(ranking: Ranking, only: RankedGroup) -> str:
    """A pause makes the mean say nothing about the steps before and after it."""
    mean = formatting.seconds(only.mean)
    timing = only.group.runs[0].timing
    if not pause_sentence([only.group]) or timing is None:
        return f"{mean} {ranking.name}"
    return f"{formatting.seconds(timing.median)} {ranking.name} (median; {mean} mean)"


def _single_run(pair: Sequence[RankedGroup]) -> str:
    fewest = min((run.iterations for one in pair for run in one.group.finished), default=0)
    if fewest < FEWEST_ITERATIONS and not all(one.blocks for one in pair):
        return f"single run of {fewest} iterations, significance unknown"
    return "single run, significance unknown"


def _less_time(gap: Difference) -> str:
    return f"{formatting.share(gap.share)} less time ({_interval(gap)})"


def _interval(gap: Difference) -> str:
    # Nothing takes less than no time, whatever the interval's arithmetic gives.
    high = formatting.share(min(gap.high, 1.0))
    low = formatting.share(gap.low)
    if gap.low < 0 < gap.high:
        # A sign would say the opposite of the same interval in the table of differences.
        low, high = f"{formatting.share(-gap.low)} more", f"{high} less"
    return f"{interval_name(gap)} {low} to {high}"


def format_difference(
    gap: Difference,
    format_amount: Callable[[float], str] | None = None,
    *,
    is_brief: bool = False,
) -> str:
    """A signed difference with its interval and significance.

    For example `+7.6% (95% CI +1.7% to +13.4%; significant)`, or with `format_amount`
    `+0.20 s (+7.6%; 95% CI +1.7% to +13.4%; significant)`. A brief one has only the interval, or
    that it is within noise.
    """
    percent = _signed_percent(gap.share)
    text, notes = percent, []
    if format_amount is not None:
        text, notes = f"{'+' * (gap.amount >= 0)}{format_amount(gap.amount)}", [percent]
    # No figure is negative, so none can be less by more than all of the other.
    span = f"{_signed_percent(max(gap.low, -1.0))} to {_signed_percent(gap.high)}"
    span = f"{interval_name(gap)} {span}{'' if gap.across_runs else ' over iterations'}"
    if is_brief:
        notes += ["within noise" if not gap.is_significant else span] if gap.has_interval else []
    else:
        notes += [span, _significance(gap)] if gap.has_interval else [_significance(gap)]
    return f"{text} ({'; '.join(notes)})" if notes else text


def _significance(gap: Difference) -> str:
    if gap.is_significant:
        return "significant"
    return "within noise" if gap.is_tie else "single run, significance unknown"


def _signed_percent(share: float) -> str:
    """Zero after rounding has no sign."""
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f}%" if rounded else "0.0%"


def interval_name(gap: Difference) -> str:
    return "corrected interval" if gap.is_corrected else "95% CI"


def interval_note(gaps: Sequence[Difference]) -> str:
    """What the intervals of differences that are tested together are; empty for a plain CI."""
    most = max((gap.comparisons for gap in gaps if gap.has_interval), default=1)
    if most < 2:
        return ""
    return (
        "Corrected interval: Welch's t at the level of Holm's method for"
        f" {most:,} comparisons. It excludes zero exactly where the difference is significant."
    )


def rerun_sentence(found: Sequence[CpuContention]) -> str:
    """What to append to a headline, which may be all that is read; empty on a quiet machine."""
    if not found:
        return ""
    most = formatting.share(max(one.share for one in found))
    return (
        f" Other processes used up to {most} of the CPU meanwhile: rerun on a quiet machine"
        " before drawing conclusions."
    )


def chance_sentence(found: Sequence[ChanceAccuracy]) -> str:
    """What to append to a headline; empty if every accuracy is above chance."""
    if not found:
        return ""
    names = listed([f"{one.label} ({one.accuracy:.4f})" for one in found], NAMED)
    levels = " or ".join(f"{chance:.2f}" for chance in sorted({one.chance for one in found}))
    return (
        f" Test accuracy is not distinguishable from chance ({levels}) with {names}:"
        " train longer or evaluate on more samples before comparing accuracies."
    )


def speedup_interval(change: Difference) -> str:
    """The interval of a speedup over repeats, for the beginning of a note; empty without one."""
    if not change.across_runs:
        return ""
    tie = "not distinguishable from 1; " if change.is_tie else ""
    low, high = max(0.0, 1 + change.low), 1 + change.high
    return f"{tie}{interval_name(change)} {low:.2f} to {high:.2f}; "


def efficiency_text(series: ScalingSeries, point: ScalingPoint) -> str:
    """Above 100% beyond noise with its likely reason, since linear speedup is the limit."""
    text = f"efficiency {formatting.share(series.efficiency(point))}"
    if not series.is_superlinear(point):
        return text
    return f"{text}, above 100%; likely reason: {superlinear_reason(series, point)}"


def superlinear_reason(series: ScalingSeries, point: ScalingPoint) -> str:
    causes = superlinear_causes(series, point)
    reasons = []
    if causes.contention is not None:
        used = formatting.share(causes.contention)
        reasons.append(f"CPU contention (other processes used up to {used} of the machine)")
    if causes.threads is not None:
        before, after = causes.threads
        reasons.append(f"threads ({before} per worker in the base, {after} here)")
    if causes.cores is not None:
        reasons.append(
            f"a slow base run ({causes.cores:g} cores cannot give a speedup of {point.speedup:.2f})"
        )
    if reasons:
        return " and ".join(reasons)
    if series.kind == "strong":
        return "CPU cache (each worker has a smaller batch) or a slow base run"
    return "a slow base run"


def findings(verdict: Verdict) -> list[Finding]:
    """Everything besides the headline: the comparison, then limits, accuracy and failures."""
    ranked = verdict.ranking.entries if verdict.ranking else []
    return [
        *(one for script in verdict.scripts for one in _about_script(script, verdict)),
        *(_about_ranking(verdict, verdict.ranking) if verdict.ranking and len(ranked) > 1 else ()),
        *(
            Finding("Ranked separately", f"{_first_kind(other)}: {headline(other)}")
            for other in verdict.others[:MOST_LISTED]
        ),
        *_about_deviations(verdict.groups),
        *_about_contention(verdict),
        *_about_bottlenecks(verdict.bottlenecks),
        *map(_about_straggler, verdict.stragglers[:NAMED]),
        *_about_accuracy(verdict),
        *_about_targets(verdict.groups),
        *_about_resized(verdict.groups),
        *_about_resumed(verdict.groups),
        *_about_trouble(verdict.groups),
    ]


def script_faults(verdict: Verdict) -> list[str]:
    """The faults of each profiled script, with its label."""
    return [
        f"{script.label}: {script_wording.subject(one)}: {script_wording.sentence(one)}"
        for script in verdict.scripts
        for one in script.faults
    ]


def _about_script(script: ScriptVerdict, verdict: Verdict) -> Iterator[Finding]:
    label = f"{script.label}: " if len(verdict.groups) > 1 else ""
    for one in script.findings:
        yield Finding(script_wording.subject(one), f"{label}{script_wording.sentence(one)}")


def _first_kind(verdict: Verdict) -> str:
    return _kind(verdict.groups[0])


def _about_ranking(verdict: Verdict, ranking: Ranking) -> Iterator[Finding]:
    first, second = ranking.entries[:2]
    also = [tie.group.label for tie in verdict.ties if tie is not second]
    if also:
        yield Finding("Tied with the fastest", f"{listed(also, NAMED)}.")
    if verdict.clear is not None:
        other, gap = verdict.clear
        yield Finding(
            "First clear difference",
            f"{other.group.label} takes {formatting.seconds(other.mean)} {ranking.name};"
            f" {first.group.label} takes {_less_time(gap)}.",
        )
    last = verdict.slowest
    if last is not None:
        times = f", {last.mean / first.mean:.2f} times the fastest" if first.mean else ""
        text = f"{last.group.label}: {formatting.seconds(last.mean)} {ranking.name}{times}."
        yield Finding("Slowest", text)
    if verdict.lead is not None:
        yield Finding("Confidence", _confidence(ranking, verdict.lead))
    if verdict.compared is not None:
        fastest, slower = verdict.compared
        if ranking.name == TO_TARGET:
            yield Finding("Why", f"{_to_target(fastest.group)}; {_to_target(slower.group)}.")
        elif verdict.explanation is not None and verdict.explanation.seconds > 0:
            yield Finding("Why", explanation_text(verdict.explanation))


def explanation_text(explanation: Explanation) -> str:
    """A sentence on the phase in which the two differ most."""
    phase = explanation.largest
    part = explanation.by_phase[phase]
    text = (
        f"{explanation.slower} takes {formatting.seconds(explanation.seconds)} more"
        f" {explanation.work} than {explanation.faster}"
    )
    if part <= 0:
        return f"{text}; the phase breakdown does not explain it."
    most = "mostly in" if part >= explanation.seconds / 2 else "most of all in"
    against = [
        f"{name} {formatting.seconds(value)}"
        for name, value in sorted(explanation.by_phase.items(), key=lambda item: item[1])
        if value < -0.1 * explanation.seconds
    ]
    tail = f"; {', '.join(against[:2])}" if against else ""
    return f"{text}, {most} {phase} (+{formatting.seconds(part)}){tail}."


def _to_target(group: RunGroup) -> str:
    """How many iterations, and how long: fewer or shorter ones reach the target faster."""
    counts = group.values(lambda run: run.iterations_to_target)
    text = (
        f"{group.label} took {formatting.spread(counts, formatting.count)} iterations to the target"
    )
    if group.iteration_means:
        text += f" of {formatting.spread(group.iteration_means, formatting.seconds)} each"
    return text


def _confidence(ranking: Ranking, lead: Difference) -> str:
    corrected = (
        f", corrected for {lead.comparisons:,} comparisons (Holm)" if lead.is_corrected else ""
    )
    if not lead.has_interval:
        return "single run, significance unknown: run-to-run variation was not measured."
    if not lead.across_runs:
        return (
            "single run, significance unknown: intervals are from blocks of iterations within each"
            f" run{corrected}; probably too narrow."
        )
    repeats = [len(one.values) for one in ranking.entries]
    several = [count for count in repeats if count > 1]
    low, high = min(several), max(several)
    span = f"{low}" if low == high else f"{low} to {high}"
    text = f"intervals are over {span} repeats of each configuration (Welch's t){corrected}"
    if len(several) < len(repeats):
        text += (
            "; for a configuration with a single run they are from blocks of its iterations,"
            " probably too narrow, and significance is unknown"
        )
    return f"{text}."


def _about_deviations(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    """Approximate configurations, and how they differ from synchronous training."""
    labels: dict[Deviation, list[str]] = {}
    for group, deviation in deviations(groups):
        labels.setdefault(deviation, []).append(group.label)
    for deviation, names in labels.items():
        text = DEVIATIONS[deviation.kind].format(deviation.setting)
        yield Finding("Approximate", f"{listed(names, NAMED)}: {text}.")


def _about_contention(verdict: Verdict) -> Iterator[Finding]:
    found = verdict.contention
    if found:
        names = [f"{one.label} ({formatting.share(one.share)})" for one in found]
        scripts = {script.label: script for script in verdict.scripts}
        if all(one.label in scripts for one in found):
            # Profiled ranks record how long they waited for a core.
            text = script_wording.contention([scripts[one.label].core_wait for one in found])
        else:
            text = (
                "Contention can explain differences, stragglers and bottlenecks of these"
                " configurations, so no straggler or bottleneck is named for them."
            )
        during = "" if len(verdict.groups) == 1 else f" during {listed(names, NAMED)}"
        share = formatting.share(found[0].share) + " of the CPU" if not during else "CPU time"
        yield Finding(
            "CPU contention",
            f"timings may be affected: other processes used {share}{during}. {text}",
        )


def _about_bottlenecks(found: Sequence[Bottleneck]) -> Iterator[Finding]:
    """One finding for each kind and cause, naming the configurations that it holds for."""
    kinds: dict[tuple[str, CommunicationCause | None], list[Bottleneck]] = {}
    for bottleneck in found:
        kinds.setdefault((bottleneck.kind, bottleneck.cause), []).append(bottleneck)
    for (kind, _), alike in kinds.items():
        text = (
            f"{alike[0].label}: {shares_text(alike[0])}."
            if len(alike) == 1
            else several_text(alike)
        )
        yield Finding(kind.capitalize(), text)


def _about_straggler(one: Straggler) -> Finding:
    return Finding(
        "Straggler",
        f"{one.label}: worker {one.rank} on node {one.node}"
        f"{' (slowed down on purpose)' if one.is_injected else ''} computes for"
        f" {formatting.seconds(one.computing_seconds)} per iteration (others:"
        f" {formatting.seconds(one.others_seconds)}); the others wait"
        f" {formatting.seconds(one.wait_seconds)} for it,"
        f" {formatting.share(one.wait_share)} of their time.",
    )


def _about_accuracy(verdict: Verdict) -> Iterator[Finding]:
    if verdict.lengths is not None:
        shortest, longest = verdict.lengths.shortest, verdict.lengths.longest
        has_accuracy = quality_of((shortest, longest)) is ACCURACY
        results = "accuracies, losses" if has_accuracy else "losses"
        yield Finding(
            "Training length",
            f"{shortest.label} was trained on {verdict.lengths.fewest_samples:,} samples,"
            f" {longest.label} on {verdict.lengths.most_samples:,}: {results} and wall times are"
            " not comparable, times per iteration are.",
        )
    loss = verdict.accuracy_loss
    if loss is not None:
        note = accuracy_note(loss.difference)
        yield Finding(
            "Accuracy" if loss.quality is ACCURACY else "Test loss",
            f"the fastest reaches {loss.fastest:.4f}, {loss.best_label} reaches {loss.best:.4f}"
            f"{note and f', {note}'}.",
        )


def accuracy_note(difference: AccuracyDifference) -> str:
    """What to add to a sentence about a difference in accuracy; empty where it is significant."""
    if difference.is_equal:
        return "the same"
    if difference.test_samples is not None:
        return f"within the noise of {difference.test_samples:,} test samples"
    if difference.is_single:
        return "in a single run"
    return "within noise" if difference.is_chance else ""


def _about_targets(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    """Configurations that finished without reaching their target."""
    missed = []
    for group in groups:
        if not group.finished or group.settings.target is None:
            continue
        reached = sum(run.seconds_to_target is not None for run in group.finished)
        if reached < len(group.finished):
            part = f", reached by {reached} of {len(group.finished)} runs" if reached else ""
            missed.append(f"{group.label} ({group.settings.target.value:g}{part})")
    if missed:
        yield Finding("Target not reached", f"{listed(missed, MOST_LISTED)}.")


def _about_resized(groups: Sequence[RunGroup]) -> list[Finding]:
    """Runs whose timings do not cover all their iterations."""
    resized = [(group, run) for group in groups for run in group.finished if run.is_resized]
    return [
        Finding(
            "Workers changed",
            f"{group.label}: {world_sizes_text(run.worlds)}; timings cover the last world size"
            " only.",
        )
        for group, run in resized[:NAMED]
    ]


def _about_resumed(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    resumed = [
        f"{group.label} ({run.timing.processes} sessions)"
        for group in groups
        for run in group.finished
        if run.timing and run.timing.processes > 1 and not run.is_resized
    ]
    if resumed:
        yield Finding("Resumed", f"{listed(resumed, NAMED)}; wall time includes all sessions.")


def _about_trouble(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    """Each configuration that failed with its cause; those that are not run yet are only named."""
    if len(groups) == 1 and len(groups[0].runs) == 1 and not groups[0].trouble:
        # The headline says it.
        return
    troubled = [group for group in groups if group.is_troubled]
    troubled.sort(key=lambda group: not group.has_failed)
    for group in troubled[:NAMED]:
        yield Finding("Not finished", describe_trouble(group))
    if len(troubled) > NAMED:
        rest = [group.label for group in troubled[NAMED:]]
        yield Finding("Not finished", f"also {listed(rest, MOST_LISTED)}")
    waiting = [group.label for group in groups if not group.runs and group.trouble == NOT_RUN]
    if waiting:
        yield Finding("Not run yet", listed(waiting, MOST_LISTED))


def describe_trouble(group: RunGroup) -> str:
    if group.runs and len(group.finished) == len(group.runs):
        return f"{group.label}: a repeat {cause_text(group)}"
    status = group.status if group.runs else ""
    return ": ".join(filter(None, (group.label, status, cause_text(group))))


def cause_text(group: RunGroup) -> str:
    """Why a run is missing or did not finish, a failure before others; empty where all did."""
    return next(filter(None, map(run_cause, group.unfinished)), group.trouble)


def run_cause(run: Run) -> str:
    return NO_RESULT if run.result is None else run.cause


def world_sizes_text(worlds: Sequence[WorldSize]) -> str:
    first, *others = worlds
    changes = [f"{_workers(world.workers)} from iteration {world.begin:,} on" for world in others]
    return f"{_workers(first.workers)} at first, {', '.join(changes)}"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def next_steps(verdict: Verdict) -> list[str]:
    findings = (one for script in verdict.scripts for one in script.findings)
    changes = filter(None, map(script_wording.remedy, findings))
    steps = (*changes, *map(recommendation_text, verdict.recommendations))
    return list(dict.fromkeys(steps))[:MOST_STEPS]


def recommendation_text(one: advice.Recommendation) -> str:
    match one:
        case advice.QuietMachine():
            return (
                f"Rerun on a quiet machine: other processes used up to"
                f" {formatting.share(one.share)} of the CPU."
            )
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
        case advice.Rebalance(slow):
            return (
                f"Try --shares auto with {slow.label}: worker {slow.rank} needs"
                f" {slow.slowdown:.1f} times as long for its share,"
                f" and the others wait {formatting.share(slow.wait_share)} of their time."
            )
        case advice.Overlap():
            return (
                f"Try --strategy overlap: exposed communication is {formatting.share(one.exposed)}"
                f" of each iteration; at most {formatting.share(one.overlappable)} of it can"
                " overlap with the backward pass."
            )
        case advice.Compress():
            return (
                f"Try a codec (-o codec=fp16 halves the bytes; it is lossy, so compare accuracy):"
                f" exposed communication is {formatting.share(one.exposed)} of each iteration."
            )
        case advice.CommunicateLess():
            return (
                "Try a larger --batch-size, or --strategy local_sgd, which is approximate: both"
                f" communicate less often; communication takes {formatting.share(one.exposed)} of"
                " each iteration."
            )
        case advice.MoreWorkers():
            return _more_workers(one)
        case advice.CheaperInput():
            return (
                f"Make the input cheaper (less --augment, more --threads): it takes"
                f" {formatting.share(one.share)} of an iteration of {one.label}."
            )
        case advice.CheaperCheckpoints():
            remedy = (
                "Checkpoint less often (--checkpoint-every)"
                if one.is_background
                else "Try --checkpoint-mode background"
            )
            return (
                f"{remedy}: checkpoints block training for {formatting.share(one.share)} of the"
                f" wall time of {one.label}."
            )
        case advice.FewerEvaluations():
            return (
                f"Evaluate less often (--eval-every): it takes {formatting.share(one.share)} of the"
                f" wall time of {one.label}."
            )
        case advice.Stabilize():
            return (
                f"Lower --lr, or add --warmup-epochs or --clip-norm, for"
                f" {'; '.join(one.labels[:3])}: the loss became NaN or infinite."
            )


def _more_workers(one: advice.MoreWorkers) -> str:
    where = f" on more cores than the {one.cores:g} of this machine" if one.cores else ""
    text = f"Try {one.workers} workers{where}: {formatting.share(one.compute)} of each iteration is"
    if one.speedup is None:
        return f"{text} compute, which is divided among workers; communication is extra."
    return f"{text} compute, which allows a speedup of at most {one.speedup:.2f}x."


def _repeats(count: int | None) -> str:
    return f"more than {MOST_PLANNED:,}" if count is None else f"about {count:,}"


def ratio_interval(row: FigureRow) -> str:
    if row.change is None or not row.change.across_runs or row.is_disturbed:
        return "-"
    # No figure is negative, so neither is a ratio.
    return f"{max(0.0, 1 + row.change.low):.3f} to {1 + row.change.high:.3f}"


def row_significance(row: FigureRow) -> str:
    if row.change is None:
        return "-"
    if row.is_disturbed:
        return CONTENTION
    if not row.change.across_runs:
        return SINGLE
    return "significant" if row.change.is_significant else "within noise"


def pair_headline(pair: StudyPair) -> str:
    """In how many configurations the other study is faster or slower, and by how much."""
    if not pair.matches:
        return (
            f"{pair.other} and {pair.first} have no configurations with the same settings or names."
        )
    count = f"{len(pair.matches)} matching configuration{'s' * (len(pair.matches) != 1)}"
    summary = summarize_pair(pair)
    if summary is None:
        return f"{pair.other} against {pair.first}: {count}, none of them timed in both."
    counts = {
        "faster": summary.faster,
        "slower": summary.slower,
        "within noise": summary.within_noise,
        "with a single run (significance unknown)": summary.single,
        "with CPU contention (not tested)": summary.disturbed,
        "not timed in both": summary.untimed,
    }
    parts = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    ratio = summary.ratio
    mean = "" if ratio is None else f" Geometric mean of the ratios: {ratio:.3f}."
    contention = [found for one in pair.matches for found in one.contention]
    return (
        f"{pair.other} against {pair.first}, {pair.tables[0].title.lower()} of {count}: {parts}."
        f"{mean}{rerun_sentence(contention)}"
    )


def pair_notes(pair: StudyPair) -> list[str]:
    """How to read the tables."""
    found = [
        "Ratio: the second study's mean over the first's. The rows of all tables are tested"
        " together: the chance that any of them is significant without a real difference is at most"
        " 5%."
    ]
    rows = [row for table in pair.tables for row in table.rows]
    if note := interval_note([row.change for row in rows if row.change]):
        found.append(note)
    significances = {row_significance(row) for row in rows}
    if SINGLE in significances:
        found.append(f"{SINGLE.capitalize()}: one of the two has no repeats, so the spread between"
                     " runs, and with it the significance, is unknown.")  # fmt: skip
    if CONTENTION in significances:
        found.append(f"{CONTENTION}: other processes used the machine during runs of one of the"
                     " two, so its times are not tested.")  # fmt: skip
    return found
