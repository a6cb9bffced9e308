"""The findings of a report besides its headline: each has a subject and a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.accuracy import ACCURACY, quality_of
from paceline.analysis.phases import Bottleneck, CommunicationCause, Explanation
from paceline.analysis.ranking import TO_TARGET, Deviation, Ranking, deviations
from paceline.analysis.ranks import Straggler
from paceline.analysis.run_group import NOT_RUN, RunGroup
from paceline.analysis.statistics import Difference
from paceline.analysis.verdict import ScriptVerdict, Verdict
from paceline.report.wording import scripts
from paceline.report.wording.bottlenecks import several_text, shares_text
from paceline.report.wording.differences import accuracy_note, less_time
from paceline.report.wording.headline import headline
from paceline.report.wording.runs import describe_trouble, world_sizes_text

NAMED = 4
"""Configurations with a finding of their own; the others are listed."""
MOST_LISTED = 10
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


def findings(verdict: Verdict) -> list[Finding]:
    """Everything besides the headline: the comparison, then limits, accuracy and failures."""
    ranked = verdict.ranking.entries if verdict.ranking else []
    return [
        *(one for script in verdict.scripts for one in _about_script(script, verdict)),
        *(_about_ranking(verdict, verdict.ranking) if verdict.ranking and len(ranked) > 1 else ()),
        *(
            Finding("Ranked separately", f"{other.groups[0].settings.task}: {headline(other)}")
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
        f"{script.label}: {scripts.subject(one)}: {scripts.sentence(one)}"
        for script in verdict.scripts
        for one in script.faults
    ]


def _about_script(script: ScriptVerdict, verdict: Verdict) -> Iterator[Finding]:
    label = f"{script.label}: " if len(verdict.groups) > 1 else ""
    for one in script.findings:
        yield Finding(scripts.subject(one), f"{label}{scripts.sentence(one)}")


def _about_ranking(verdict: Verdict, ranking: Ranking) -> Iterator[Finding]:
    first, second = ranking.entries[:2]
    also = [tie.group.label for tie in verdict.ties if tie is not second]
    if also:
        yield Finding("Tied with the fastest", f"{formatting.listed(also)}.")
    if verdict.clear is not None:
        other, gap = verdict.clear
        yield Finding(
            "First clear difference",
            f"{other.group.label} takes {formatting.seconds(other.mean)} {ranking.name};"
            f" {first.group.label} takes {less_time(gap)}.",
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
        yield Finding("Approximate", f"{formatting.listed(names)}: {text}.")


def _about_contention(verdict: Verdict) -> Iterator[Finding]:
    found = verdict.contention
    if found:
        names = [f"{one.label} ({formatting.share(one.share)})" for one in found]
        profiled = {script.label: script for script in verdict.scripts}
        if all(one.label in profiled for one in found):
            # Profiled ranks record how long they waited for a core.
            text = scripts.contention([profiled[one.label].core_wait for one in found])
        else:
            text = (
                "Contention can explain differences, stragglers and bottlenecks of these"
                " configurations, so no straggler or bottleneck is named for them."
            )
        during = "" if len(verdict.groups) == 1 else f" during {formatting.listed(names)}"
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
        yield Finding("Target not reached", f"{formatting.listed(missed, MOST_LISTED)}.")


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
        yield Finding("Resumed", f"{formatting.listed(resumed)}; wall time includes all sessions.")


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
        yield Finding("Not finished", f"also {formatting.listed(rest, MOST_LISTED)}")
    waiting = [group.label for group in groups if not group.runs and group.trouble == NOT_RUN]
    if waiting:
        yield Finding("Not run yet", formatting.listed(waiting, MOST_LISTED))
