"""The answer of a report: the fastest configuration, by how much, and how surely."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.accuracy import ChanceAccuracy, quality_of
from paceline.analysis.contention import CpuContention
from paceline.analysis.ranking import RankedGroup, Ranking, is_exact
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import FEWEST_ITERATIONS, Difference
from paceline.analysis.verdict import Verdict
from paceline.report.wording import post_mortem, scripts
from paceline.report.wording.differences import interval_text, less_time
from paceline.report.wording.runs import cause_text, describe_trouble
from paceline.report.wording.scaling import efficiency_text


def headline(verdict: Verdict) -> str:
    """The answer: the fastest configuration, by how much and how surely."""
    ranking = verdict.ranking
    if ranking is None:
        text = "Not compared: every configuration has a different model, dataset or script."
    elif not ranking.entries:
        text = _nothing_ranked(verdict.groups)
    else:
        text = _fastest(verdict, ranking)
        if verdict.has_several_kinds:
            text = f"Of {ranking.entries[0].group.settings.task}: {text}"
    text = pause_sentence(verdict.groups) + text
    text += script_sentence(verdict)
    return text + chance_sentence(verdict.at_chance) + rerun_sentence(verdict.contention)


def pause_sentence(groups: Sequence[RunGroup]) -> str:
    """What the headline of a single script begins with if its training paused."""
    if len(groups) != 1 or len(groups[0].runs) != 1:
        return ""
    pauses = filter(post_mortem.is_pause, groups[0].runs[0].post_mortems)
    return "".join(f"{post_mortem.headline(pause)} " for pause in pauses)


def script_sentence(verdict: Verdict) -> str:
    """What to append to the headline of a single script: its costliest fault, which is first."""
    if len(verdict.groups) != 1 or not verdict.scripts or not verdict.scripts[0].faults:
        return ""
    first, *others = verdict.scripts[0].findings
    more = f" {len(others)} more finding{'s' * (len(others) > 1)} below." if others else ""
    return f" {scripts.subject(first)}: {scripts.sentence(first)}{more}"


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
        text = f"{post_mortem.headline(reports[-1])} {text}"
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
            f" than {second}, which is within noise ({interval_text(lead)})."
        )
    if lead.is_significant:
        lead_text = f"{time}, {less_time(lead)} than {second}"
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
    names = formatting.listed([f"{one.label} ({one.accuracy:.4f})" for one in found])
    levels = " or ".join(f"{chance:.2f}" for chance in sorted({one.chance for one in found}))
    return (
        f" Test accuracy is not distinguishable from chance ({levels}) with {names}:"
        " train longer or evaluate on more samples before comparing accuracies."
    )
