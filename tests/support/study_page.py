"""The report of a study from the catalogue, built from fake runs with consistent files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from paceline import formatting
from paceline.analysis.collection import collect
from paceline.config import RunConfig
from paceline.report.build import to_document
from paceline.report.document import (
    Block,
    ChapterPage,
    Details,
    Document,
    Figure,
    Table,
    Tabs,
    Text,
)
from paceline.study import catalogue
from paceline.study.cells import load
from paceline.study.folder import Cell, Study, StudyFolder
from tests.support.records import FakeRun, write_run

Plant = Callable[[FakeRun, Cell, RunConfig], None]
"""Changes a run before it is written."""


@dataclass
class Page:
    document: Document
    study: Study
    folder: StudyFolder

    def chapter(self, part: str) -> ChapterPage:
        index = [one.name for one in self.study.parts].index(part)
        return self.document.chapters[index]

    def results(self, part: str) -> dict[str, dict[str, Any]]:
        """Return the results of the runs of a part, by cell label."""
        return {
            cell.label: json.loads(self.folder.run_folder(cell).result_file.read_text())
            for cell in self.study.cells_of(part)
        }

    def blocks(self, part: str) -> Iterator[Block]:
        for section in self.chapter(part).sections:
            yield from flat(section.blocks)

    def table(self, part: str, heading: str) -> list[dict[str, str]]:
        """Return the rows of the first table with this column, by heading; "" is the first one."""
        for block in self.blocks(part):
            if isinstance(block, Table) and heading in block.columns:
                return [
                    dict(zip(block.columns, row, strict=True)) | {"": row[0]} for row in block.rows
                ]
        raise AssertionError(f"no column {heading}")

    def marks(self, part: str, title: str, what: str) -> list[ElementTree.Element]:
        """Return the marks of class `what` in the figure with this title."""
        for block in self.blocks(part):
            if isinstance(block, Figure) and block.title == title:
                found = ElementTree.fromstring(block.svg).iter()
                return [one for one in found if what in one.attrib.get("class", "").split()]
        raise AssertionError(f"no figure {title}")

    def answers(self, part: str) -> list[str]:
        blocks = self.blocks(part)
        return [one.text for one in blocks if isinstance(one, Text) and one.kind == "answer"]


def flat(blocks: Any) -> Iterator[Block]:
    for block in blocks:
        if isinstance(block, Tabs):
            yield from (figure for _, figure in block.figures)
        elif isinstance(block, Details):
            yield from flat(block.blocks)
        else:
            yield block


def page_of(name: str, out: Path, plant: Plant = lambda run, cell, config: None) -> Page:
    """Return the report of a study at quick scale, one run each, changed by `plant`."""
    plan = load(catalogue.find(name), "quick", repeats=1)
    folder = StudyFolder(out / name)
    folder.write(plan.study)
    for number, cell in enumerate(plan.in_running_order()):
        config = plan.configs[cell.id]
        settings = {key: value for key, value in cell.settings.items()
                    if key not in ("epochs", "iterations", "out", "name")}  # fmt: skip
        settings["nproc_per_node"] = config.nproc_per_node
        alone = config.workers == 1
        phases = [
            {"forward": 0.010 + 0.001 * number, "backward": 0.020,
             "exchange": 0.0 if alone else 0.004 + 0.001 * number, "wait": 0.001 * rank}
            for rank in range(config.workers)
        ]  # fmt: skip
        run = FakeRun(cell.run, settings, phases, nodes=config.nnodes,
                      gradient_bytes=0 if alone else 1_500_000)  # fmt: skip
        plant(run, cell, config)
        write_run(folder.cells, run)
    return Page(to_document(collect(folder.path)), plan.study, folder)


def numeral(text: str) -> float:
    return float(text.split()[0].replace(",", "").rstrip("%"))


def in_seconds(text: str) -> float:
    """Parse the text of a table cell; its precision is limited, so compare with TOLERANCE."""
    value, unit = text.split()[:2]
    return float(value.replace(",", "")) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def wall(result: dict[str, Any]) -> str:
    return formatting.seconds(result["wall_seconds"])


def mean_iteration(result: dict[str, Any]) -> float:
    return statistics.fmean(one["iteration_seconds"]["mean"] for one in result["workers"])
