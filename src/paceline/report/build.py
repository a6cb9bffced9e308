"""Builds a report: report.html, report.md and its figures."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.analysis.accuracy import find_chance_accuracy
from paceline.analysis.collection import Chapter, RunCollection, collect
from paceline.analysis.contention import find_contention
from paceline.analysis.run_group import RunGroup
from paceline.analysis.verdict import Verdict, make_verdict
from paceline.errors import RecordsError
from paceline.report.charts.svg import standalone
from paceline.report.document import (
    BulletList,
    ChapterPage,
    Document,
    Figure,
    Section,
    Text,
    slug,
)
from paceline.report.html import FIGURES, to_html
from paceline.report.markdown import to_markdown
from paceline.report.one_run import sections_of, without_configurations
from paceline.report.predicted_steps import predicted_steps
from paceline.report.sections import SECTIONS, VERDICT, build_sections, select, unknown
from paceline.report.sections.common import section_context
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import chance_sentence, headline, rerun_sentence
from paceline.report.wording.recommendations import next_steps

TOGETHER = "all-parts"
"""Name of the chapter about all parts of a study."""
MAX_ANSWERS = 3
"""Parts that answer a study which does not name them."""


@dataclass(frozen=True, slots=True)
class Report:
    page: Path
    collection: RunCollection
    headlines: list[str]
    """The answer; of several chapters also that of each other chapter, with its title."""


def write_report(path: Path | str, out: Path | None = None) -> Report:
    """Build the report of the records at `path`, into that folder or `out`."""
    collection = collect(path)
    folder = out or collection.path
    document, headlines = build_report(collection)
    page = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(to_html(document), encoding="utf-8")
        (folder / "report.md").write_text(to_markdown(document), encoding="utf-8")
        _write_figures(document, folder / FIGURES)
    except OSError as error:
        raise RecordsError(f"cannot write the report to {folder}: {error.strerror}") from None
    return Report(page, collection, headlines)


def _write_figures(document: Document, folder: Path) -> None:
    """Replace the figures of an earlier report."""
    if folder.is_dir():
        for old in folder.glob("*.svg"):
            old.unlink()
    figures = list(document.figures())
    if not figures:
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder.mkdir(exist_ok=True)
    for figure in figures:
        (folder / f"{figure.name}.svg").write_text(
            standalone(figure.svg), encoding="utf-8", errors="replace"
        )


def to_document(collection: RunCollection) -> Document:
    return build_report(collection)[0]


def build_report(collection: RunCollection) -> tuple[Document, list[str]]:
    """The document, and its headlines."""
    verdicts = [make_verdict(chapter.groups, collection.comm) for chapter in collection.chapters]
    chapters, answers = [], []
    names = _names([chapter.title for chapter in collection.chapters])
    for name, chapter, verdict in zip(names, collection.chapters, verdicts, strict=True):
        page, answer = _page(name, chapter, verdict, collection.comm, is_alone=len(verdicts) == 1)
        chapters.append(page)
        answers.append(answer)
    document = Document(
        title=collection.title,
        subtitle=_subtitle(collection),
        about=_about(collection, chapters),
        context=collection.chapters[0].context if len(verdicts) == 1 else "",
        stands_in=collection.stands_in,
        headline=answers[0] if verdicts else "Nothing was run yet.",
        points=[],
        next_steps=[],
        chapters=chapters,
        skipped=[(one.name, one.reason) for one in collection.skipped],
    )
    if len(verdicts) == 1:
        document.points = _points(verdicts[0])
        document.next_steps = _next_steps(verdicts[0], collection.chapters[0], collection.comm)
        return document, [document.headline]
    headlines = _open(document, collection, answers)
    chapters.append(_together(collection))
    return document, [*headlines, *(f"{title}: {text}" for title, text in document.points)]


def _about(collection: RunCollection, chapters: Sequence[ChapterPage]) -> str:
    """Of a study; with a single part, also of that."""
    if len(chapters) != 1:
        return collection.about
    own = chapters[0].about
    return own if own.startswith(collection.about) else f"{collection.about} {own}".strip()


def _names(titles: Sequence[str]) -> list[str]:
    """Unique names of chapters, for links and files."""
    taken = {TOGETHER}
    names = []
    for title in titles:
        whole = name = slug(title)
        number = 2
        while name in taken:
            name, number = f"{whole}-{number}", number + 1
        taken.add(name)
        names.append(name)
    return names


def _together(collection: RunCollection) -> ChapterPage:
    """The sections about all parts of a study, and the settings of every configuration."""
    names = [one for one in collection.sections if one in SECTIONS and one != "configuration"]
    about_all = section_context(TOGETHER, collection.groups, collection.comm)
    sections = build_sections(about_all, [*names, "configuration"])
    return ChapterPage(TOGETHER, "All parts together", "", "", sections)


def _open(document: Document, collection: RunCollection, answers: Sequence[str]) -> list[str]:
    """The answer to the question of several parts with its figures, then that of each part.

    A study names the parts and sections that answer it; otherwise its first parts do. Returns the
    sentences of the answer.
    """
    parts = [chapter.name for chapter in collection.chapters]
    texts: list[str] = []
    given: set[tuple[str, str]] = set()
    last_title = ""
    figures: list[tuple[str, Figure]] = []
    for reference in collection.answer or parts[:MAX_ANSWERS]:
        part, _, section_name = reference.partition(".")
        if part not in parts:
            continue
        number = parts.index(part)
        page, answer = document.chapters[number], answers[number]
        section = next((one for one in page.sections if one.name == section_name), None)
        text = (_section_answer(section) if section else "") or answer
        if section is None or section_name == VERDICT:
            section = next((one for one in page.sections if _first_figure([one])), None)
        if (part, text) in given:
            continue
        given.add((part, text))
        # A warning below says it once for all parts.
        contention = find_contention(collection.chapters[number].groups)
        text = text.removesuffix(rerun_sentence(contention))
        # Two answers of one part have its title once.
        is_titled = page.title == last_title or text.startswith(f"{page.title}: ")
        texts.append(text if is_titled else f"{page.title}: {text}")
        last_title = page.title
        figure = _first_figure([section] if section else [])
        if figure is not None:
            figures.append((page.title, replace(figure, name=f"answer-{figure.name}")))
    document.main_figures = _distinct(figures)
    troubled = [group for group in collection.groups if _did_not_finish(group)]
    if troubled:
        texts.append(f"{len(troubled)} of {_count(collection.groups)} did not finish.")
    texts += _warnings(collection)
    document.headline = "\n".join(texts) or document.headline
    document.points = [
        (chapter.title, answer.removeprefix(f"{chapter.title}: "))
        for chapter, answer in zip(collection.chapters, answers, strict=True)
        if (chapter.name, answer) not in given
    ]
    return texts or [document.headline]


def _distinct(figures: Sequence[tuple[str, Figure]]) -> list[Figure]:
    """Figures with their parts; those that have the same title also show the title of the part."""
    titles = [figure.title for _, figure in figures]
    return [
        replace(figure, title=f"{figure.title}: {part}")
        if titles.count(figure.title) > 1
        else figure
        for part, figure in figures
    ]


def _warnings(collection: RunCollection) -> list[str]:
    """What may invalidate the figures of any part, which the answers of sections do not say."""
    # As in the verdict of each part; several parts may have a configuration of the same label.
    at_chance = [
        replace(one, label=f"{chapter.title}: {one.label}")
        for chapter in collection.chapters
        for one in find_chance_accuracy(chapter.groups)
    ]
    sentences = (chance_sentence(at_chance), rerun_sentence(find_contention(collection.groups)))
    return [sentence.strip() for sentence in sentences if sentence]


def _section_answer(section: Section) -> str:
    if section.name == VERDICT:
        return next((block.text for block in section.blocks if isinstance(block, Text)), "")
    texts = (one for one in section.blocks if isinstance(one, Text) and one.kind == "answer")
    return next((one.text for one in texts), "")


def _first_figure(sections: Sequence[Section]) -> Figure | None:
    blocks = (block for section in sections for block in section.blocks)
    return next(
        (block for block in blocks if isinstance(block, Figure) and not block.is_wide), None
    )


def _did_not_finish(group: RunGroup) -> bool:
    """A skipped run was not started, so it does not count."""
    return len(group.finished) < len(group.runs) or group.trouble.startswith("failed")


def _page(
    name: str, chapter: Chapter, verdict: Verdict, comm: Sequence[Path], *, is_alone: bool
) -> tuple[ChapterPage, str]:
    """A chapter and its answer."""
    about_groups = section_context("" if is_alone else name, chapter.groups, comm)
    is_one_run = is_alone and about_groups.is_one_run
    names = chapter.sections or (sections_of(chapter.groups) if is_one_run else ())
    sections = build_sections(about_groups, select(names, is_alone=is_alone))
    if is_one_run:
        sections = without_configurations(sections, about_groups.groups[0].label)
    answer = _answer(chapter, sections) or headline(verdict)
    if not is_alone:
        steps = _next_steps(verdict, chapter, comm)
        sections.insert(0, _verdict_section(verdict, answer, steps))
    strange = unknown(chapter.sections)
    about = chapter.about
    if strange:
        about = f"{about} (No such section: {', '.join(strange)}.)".strip()
    page = ChapterPage(name, chapter.title, about, chapter.context, sections, chapter.stands_in)
    return page, answer


def _answer(chapter: Chapter, sections: Sequence[Section]) -> str:
    """Of the first section with an answer, if the study does not put the verdict first."""
    if not chapter.sections or chapter.sections[0] == VERDICT:
        return ""
    return next(filter(None, map(_section_answer, sections)), "")


def _next_steps(verdict: Verdict, chapter: Chapter, comm: Sequence[Path]) -> list[str]:
    # As for bottlenecks, no conclusions are drawn from contended runs.
    contended = {one.label for one in verdict.contention}
    groups = [group for group in chapter.groups if group.label not in contended]
    runs = [run for group in groups for run in group.finished]
    return [*next_steps(verdict), *predicted_steps(runs, comm)]


def _verdict_section(verdict: Verdict, answer: str, steps: Sequence[str]) -> Section:
    text = headline(verdict)
    items = [] if answer == text else [("Step time:", text)]
    items += [(f"{subject}:", text) for subject, text in _points(verdict)]
    items += [("Try next:", step) for step in steps]
    return Section("verdict", "Verdict", [Text(answer), BulletList(items)])


def _points(verdict: Verdict) -> list[tuple[str, str]]:
    return [(point.subject, point.text) for point in findings(verdict)]


def _subtitle(collection: RunCollection) -> str:
    runs = collection.runs
    parts = [] if len(runs) == 1 else [f"{len(runs):,} runs in {_count(collection.groups)}"]
    for name, values in (
        ("model", {text for run in runs if (text := run.settings.model_text)}),
        ("data", {text for run in runs if (text := run.settings.data)}),
        ("script", {text for run in runs if (text := run.settings.script)}),
    ):
        if 0 < len(values) <= 4:
            parts.append(f"{name} {', '.join(sorted(values))}")
    machines = {str(run.result["hardware"].get("cpu", "?")) for run in runs if run.result}
    parts += sorted(machines) if len(machines) <= 2 else [f"{len(machines)} kinds of machine"]
    return " · ".join(parts)


def _count(groups: Sequence[RunGroup]) -> str:
    return f"{len(groups):,} configuration{'s' * (len(groups) != 1)}"
