"""A comparison as rows of text, for the terminal, and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline import formatting
from paceline.analysis import comparison
from paceline.analysis.comparison import Comparison, FigureTable, StudyPair, mean, significance
from paceline.analysis.phases import WALL_PHASES, run_breakdown
from paceline.analysis.run import Run
from paceline.analysis.run_group import (
    RunGroup,
    describe_workers,
    differing,
    known_text,
    metric_names,
)
from paceline.analysis.step_cost import worker_memory
from paceline.analysis.verdict import make_verdict
from paceline.errors import RecordsError
from paceline.records import format_name
from paceline.report.charts.svg import standalone
from paceline.report.document import (
    Block,
    BulletList,
    ChapterPage,
    Document,
    Section,
    Table,
    Text,
    slug,
)
from paceline.report.html import to_html
from paceline.report.markdown import to_markdown
from paceline.report.sections import build_sections
from paceline.report.sections.common import section_context
from paceline.report.sections.overview import machine
from paceline.report.sections.timing import first_iteration_note
from paceline.report.wording.differences import format_difference, interval_note
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from paceline.report.wording.recommendations import next_steps
from paceline.report.wording.runs import world_sizes_text
from paceline.report.wording.study_pair import (
    pair_headline,
    pair_notes,
    ratio_interval,
    row_significance,
)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    cells: list[str]


@dataclass(frozen=True, slots=True)
class PairRow:
    """A figure of two studies: both means, their ratio, and its interval and significance."""

    name: str
    first: str
    other: str
    ratio: str
    interval: str
    significance: str

    @property
    def cells(self) -> tuple[str, ...]:
        return self.name, self.first, self.other, self.ratio, self.interval, self.significance


def setting_rows(groups: Sequence[RunGroup]) -> list[Row]:
    """The settings that differ."""
    rows = []
    for name in differing([group.settings for group in groups]):
        texts = [known_text(group.settings, name) for group in groups]
        # A batch or a budget has two settings, of which one is always none.
        rows.append(Row(name.replace("_", " "), ["-" if one == "none" else one for one in texts]))
    formats = [_formats(group) for group in groups]
    if len({text for text in formats if text != "-"}) > 1:
        rows.append(Row("computed in", formats))
    has_nodes = all(group.settings.nnodes > 1 for group in groups)
    has_kinds = len({group.settings.kind for group in groups}) > 1
    if len({group.workers for group in groups}) > 1 and (has_nodes or has_kinds):
        rows.append(Row("workers", [describe_workers(group.settings) for group in groups]))
    # Repeats of one configuration differ in their seeds, so these are compared as sets.
    seeds = [sorted({run.settings.config.seed for run in group.runs if run.settings.config})
             for group in groups]  # fmt: skip
    if any(one != seeds[0] for one in seeds):
        rows.append(Row("seed", [", ".join(map(str, one)) or "-" for one in seeds]))
    return rows


def _formats(group: RunGroup) -> str:
    """Precision and memory format of the runs, as chosen if the setting is auto."""
    found = (run.numerics for run in group.runs)
    names = dict.fromkeys(
        format_name(one["precision"], one["channels_last"]) for one in found if one is not None
    )
    return ", ".join(names) or "-"


def result_rows(groups: Sequence[RunGroup]) -> list[Row]:
    """The figures that some configuration has."""
    figures: dict[str, Callable[[RunGroup], str]] = {}
    for name, text in FIGURES.items():
        figures[name] = text
        if name == "test loss":
            figures |= {
                metric.replace("_", " "): _mean(partial(Run.final, key=metric), formatting.number)
                for metric in metric_names(groups)
            }
    rows = [Row(name, [text(group) for group in groups]) for name, text in figures.items()]
    splits = [run_breakdown(group) for group in groups]
    for phase in WALL_PHASES:
        shares = [split.share(phase) if split else None for split in splits]
        if any(share and share >= 0.0005 for share in shares):
            rows.append(Row(f"phase {phase}", [formatting.share(share) for share in shares]))
    return [row for row in rows if any(text != "-" for text in row.cells)]


def _mean(
    get: Callable[[Run], float | None], text: Callable[[float | None], str]
) -> Callable[[RunGroup], str]:
    return lambda group: text(mean(group.values(get, group.shown)))


def _checkpoints(group: RunGroup) -> str:
    counts = group.values(
        lambda run: run.result["checkpoints"].get("count") if run.result else None, group.shown
    )
    return formatting.count(mean(counts)) if any(counts) else "-"


def _world_sizes(group: RunGroup) -> str:
    resized = [run.worlds for run in group.shown if run.is_resized]
    return world_sizes_text(resized[0]) if resized else "-"


def _weights(group: RunGroup) -> str:
    hashes = {str(run.result["weights_sha256"] or "-")[:8] for run in group.runs if run.result}
    return hashes.pop() if len(hashes) == 1 else ("differ" if hashes else "-")


FIGURES: dict[str, Callable[[RunGroup], str]] = {
    "status": lambda group: group.status,
    "repeats": lambda group: "-" if len(group.runs) < 2 else formatting.count(len(group.runs)),
    "test accuracy": _mean(lambda run: run.final("test_accuracy"), formatting.number),
    "test loss": _mean(lambda run: run.final("test_loss"), formatting.number),
    "training loss": _mean(lambda run: run.final("train_loss"), formatting.number),
    "wall time": _mean(lambda run: run.wall_seconds, formatting.seconds),
    "time to target": _mean(lambda run: run.seconds_to_target, formatting.seconds),
    "iterations": _mean(lambda run: run.iterations, formatting.count),
    "workers changed": _world_sizes,
    "iteration, mean": _mean(lambda run: run.iteration_seconds, formatting.seconds),
    "iteration, median": lambda group: formatting.seconds(
        mean(comparison.rank_figures(group, "median"))
    ),
    "iteration, p95": lambda group: formatting.seconds(mean(comparison.rank_figures(group, "p95"))),
    "traffic sent": lambda group: formatting.size(mean(comparison.sent_bytes(group))),
    "CPU, mean": _mean(lambda run: run.node_sum("cpu_percent_mean"), formatting.percent),
    "memory, mean": _mean(lambda run: run.node_sum("rss_bytes_mean"), formatting.size),
    "memory, peak": _mean(lambda run: run.node_sum("rss_bytes_peak"), formatting.size),
    "memory, worker": _mean(lambda run: worker_memory(run, "peak_bytes"), formatting.size),
    "checkpoints": _checkpoints,
    "weights": _weights,
}


def pair_rows(table: FigureTable) -> list[PairRow]:
    text = formatting.seconds if table.is_time else formatting.number
    return [
        PairRow(
            row.match.name,
            _no_value(row.match.first) if row.first is None else text(row.first),
            _no_value(row.match.other) if row.other is None else text(row.other),
            "-" if row.change is None else f"{1 + row.change.share:.3f}",
            ratio_interval(row),
            row_significance(row),
        )
        for row in table.rows
    ]


def _no_value(group: RunGroup) -> str:
    """Why there is none."""
    if group.finished:
        return "none"
    statuses = {run.status for run in group.runs}
    return statuses.pop() if len(statuses) == 1 else "not finished"


def differences(pair: StudyPair) -> list[tuple[str, str]]:
    """What else differs between two studies: settings of matching configurations, and machines."""
    changed: dict[tuple[str, str, str], list[str]] = {}
    for one in pair.matches:
        for change in one.changes:
            changed.setdefault(change, []).append(one.name)
    found = [
        (
            f"{name.replace('_', '-')}:",
            f"{first} in {pair.first}, {other} in {pair.other}"
            + ("" if len(names) == len(pair.matches) else f" ({'; '.join(names)})"),
        )
        for (name, first, other), names in changed.items()
    ]
    facts = [_facts([getattr(one, side) for one in pair.matches]) for side in ("first", "other")]
    for name in facts[0]:
        if name in facts[1] and facts[0][name] != facts[1][name]:
            texts = ["; ".join(sorted(side[name])) for side in facts]
            found.append((f"{name}:", f"{texts[0]} in {pair.first}, {texts[1]} in {pair.other}"))
    return found


def _facts(groups: Sequence[RunGroup]) -> dict[str, set[str]]:
    facts: dict[str, set[str]] = {}
    for group in groups:
        for run in group.finished:
            for name, text in machine(run):
                facts.setdefault(name, set()).add(text)
    return facts


def unmatched(pair: StudyPair) -> list[tuple[str, str]]:
    sides = ((pair.first, pair.only_first), (pair.other, pair.only_other))
    return [(f"Only in {name}:", "; ".join(groups)) for name, groups in sides if groups]


def write_comparison(compared: Comparison, page: Path) -> None:
    """One HTML file, with curves and phases of the configurations."""
    _write(page, to_html(comparison_document(compared)))


def write_markdown(compared: Comparison, page: Path) -> None:
    """The same as Markdown, with its figures in a folder beside it."""
    document = comparison_document(compared)
    folder = f"{slug(page.stem)}-figures"
    _write(page, to_markdown(document, folder))
    for figure in document.figures():
        _write(page.parent / folder / f"{figure.name}.svg", standalone(figure.svg))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None


def comparison_document(compared: Comparison) -> Document:
    return _pairs_document(compared) if compared.pairs else _groups_document(compared)


def _pairs_document(compared: Comparison) -> Document:
    pairs = compared.pairs
    headlines = [pair_headline(pair) for pair in pairs]
    is_alone = len(pairs) == 1
    return Document(
        title=f"Comparison with {pairs[0].first}",
        subtitle=" · ".join(pair.other for pair in pairs),
        about="",
        headline=headlines[0] if is_alone else f"{len(pairs)} comparisons.",
        points=[]
        if is_alone
        else [(pair.other, text) for pair, text in zip(pairs, headlines, strict=True)],
        next_steps=[],
        chapters=[_pair_page(f"pair-{number}", pair) for number, pair in enumerate(pairs, 1)],
        skipped=[(one.name, one.reason) for one in compared.skipped],
    )


def _pair_page(name: str, pair: StudyPair) -> ChapterPage:
    columns = ("configuration", pair.first, pair.other, "ratio", "corrected interval",
               "significance")  # fmt: skip
    tables = [(table.title, [row.cells for row in pair_rows(table)]) for table in pair.tables]
    sections = [Section(slug(title), title, [Table(columns, rows)]) for title, rows in tables]
    if pair.matches:
        notes = [Text(text, "note") for text in pair_notes(pair)]
        sections.append(Section("reading", "How to read the tables", notes))
    for section, title, items in (
        ("differences", "Other differences", differences(pair)),
        ("unmatched", "Configurations without a match", unmatched(pair)),
    ):
        if items:
            sections.append(Section(section, title, [BulletList(items)]))
    return ChapterPage(name, f"{pair.other} against {pair.first}", "", "", sections)


def _groups_document(compared: Comparison) -> Document:
    groups = compared.groups
    verdict = make_verdict(groups)
    columns = ("", *(group.label for group in groups))
    sections = [_rows("settings", "Settings that differ", columns, setting_rows(groups))]
    results = _rows("results", "Results", columns, result_rows(groups))
    sections.append(replace(results, blocks=[*results.blocks, *first_iteration_note(groups)]))
    tests = significance(groups)
    if tests:
        others = "others" if len(groups) > 2 else "other"
        rows = [(one.name, one.other, format_difference(one.difference)) for one in tests]
        note = interval_note([one.difference for one in tests])
        blocks: list[Block] = [
            Text(f"{groups[0].label} against the {others}, as a share of the other's figure:"),
            Table(("figure", "against", "difference"), rows, text_columns=3),
            *([Text(note, "note")] if note else []),
        ]
        sections.append(Section("significance", "Significance", blocks))
    sections += build_sections(section_context("", groups), ("curves", "iteration_time", "phases"))
    return Document(
        title="Comparison",
        subtitle=" · ".join(group.label for group in groups),
        about="",
        headline=headline(verdict),
        points=[(one.subject, one.text) for one in findings(verdict)],
        next_steps=next_steps(verdict),
        chapters=[
            ChapterPage("comparison", "Comparison", "", "", [s for s in sections if s.blocks])
        ],
        skipped=[(one.name, one.reason) for one in compared.skipped],
    )


def _rows(name: str, title: str, columns: Sequence[str], rows: Sequence[Row]) -> Section:
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(columns, [(row.name, *row.cells) for row in rows]))
    return Section(name, title, blocks)
