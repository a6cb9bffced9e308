"""Read sections of a report and the marks of their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from paceline.analysis.run_group import RunGroup
from paceline.report.document import Figure, Section, Tabs
from paceline.report.sections import build_sections
from paceline.report.sections.common import section_context

SVG = "{http://www.w3.org/2000/svg}"


def result_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return values


def section(cells: list[RunGroup], name: str) -> Section:
    return build_sections(section_context("", cells), [name])[0]


def figure(of: Section, name: str) -> ElementTree.Element:
    for block in of.blocks:
        figures = [one for _, one in block.figures] if isinstance(block, Tabs) else [block]
        for one in figures:
            if isinstance(one, Figure) and one.name == name:
                return ElementTree.fromstring(one.svg)
    raise AssertionError(f"no figure {name}")


def numbers(mark: ElementTree.Element, key: str) -> list[float]:
    return [float(text) for text in mark.attrib[key].split(",")]


def series(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return [one for one in svg.iter(f"{SVG}g") if one.attrib.get("class", "").startswith("series")]
