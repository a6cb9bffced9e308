"""Expand a study file at one scale into cells, and check them before any of them runs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import RunConfig
from paceline.config import key as config_key
from paceline.config.conversion import LARGEST_INTEGER
from paceline.errors import ConfigError, UsageError, bare, shown, suggest
from paceline.study.folder import Cell, Part, Study
from paceline.study.grid import GridPoint, expand, read_axes, slug, text_of
from paceline.study.settings import Settings, check_key
from paceline.study.study_file import SECTION_NAMES, StudyFile
from paceline.study.yaml_nodes import Diagnostics, YamlNode, read

ORDERS = ("interleaved", "sequential")
GRID_KEYS = ("grid", "include", "exclude", "context")
MOST_REPEATS = 1000
MOST_CELLS = 10_000
LONGEST_ID = 150
"""In bytes. File names have at most 255 on common file systems; a replaced run gets a suffix."""
DEFAULT_LIMIT_MINUTES = 12 * 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A study with the configs of its cells and how to run them."""

    study: Study
    order: str
    time_limit_seconds: float
    configs: dict[str, RunConfig]
    """By cell id."""
    _origins: dict[str, tuple[Settings, YamlNode]] = field(repr=False)

    def in_running_order(self) -> list[Cell]:
        """Return the cells to run; of cells that share a run, the first.

        Interleaved order runs the first repeat of all cells, then the second: drift of the machine
        then affects all cells alike.
        """
        cells = [cell for cell in self.study.cells if cell.run == cell.id]
        if self.order == "interleaved":
            return sorted(cells, key=lambda cell: cell.repeat)
        return cells

    def report(self, cell: Cell, texts: tuple[str, ...], problems: Diagnostics) -> None:
        """Add problems of a cell at the lines of its settings."""
        settings, location = self._origins[cell.id]
        for text in texts:
            settings.report(text, location, cell.group, problems)


def load(path: Path, scale: str | None = None, repeats: int | None = None) -> Plan:
    """Read and check a study file; a ConfigError has every problem with its line.

    `repeats` overrides the file's value.
    """
    problems = Diagnostics()
    root = read(path, problems)
    document = StudyFile(root, scale, problems)
    plan = _Planner(document, path.stem, repeats, problems).plan()
    problems.raise_if_any()
    return plan


class _Planner:
    def __init__(
        self, document: StudyFile, name: str, repeats: int | None, problems: Diagnostics
    ) -> None:
        self._document, self._name, self._problems = document, name, problems
        self._repeats = repeats or int(self._number("repeats", 1, 1, MOST_REPEATS))
        self._configs: dict[str, RunConfig] = {}
        self._origins: dict[str, tuple[Settings, YamlNode]] = {}
        self._runs: dict[str, str] = {}
        """Config key to the id of the first cell that has it."""
        self._groups: dict[tuple[str, str], str] = {}
        """Part and config key to the first group that has them."""
        self._duplicates: list[tuple[YamlNode, str]] = []
        self._planned = 0

    def plan(self) -> Plan:
        document = self._document
        names: list[str | None] = list(document.part_names())
        for key in GRID_KEYS if names else ():
            if (misplaced := document.find(key)) is not None:
                self._problems.add(misplaced, "belongs inside a part, because the study has parts")
        parts, cells = [], []
        for name in names or [None]:
            part, its_cells = self._part(name)
            parts.append(part)
            cells += its_cells
        self._check_ids(cells)
        plan = Plan(
            study=Study(
                name=self._name,
                scale=document.scale,
                title=self._text("title") or self._name,
                about=self._text("about"),
                stands_in=self._text("stands_in"),
                report=self._sections() if names else (),
                answer=self._answer(parts),
                parts=tuple(parts),
                cells=tuple(cells),
            ),
            order=self._order(),
            time_limit_seconds=60
            * self._number("time_limit_minutes", DEFAULT_LIMIT_MINUTES, 0.01, 1e6),
            configs=self._configs,
            _origins=self._origins,
        )
        # Settings that are invalid may be those in which two cells differ.
        for location, text in [] if self._problems else self._duplicates:
            self._problems.add(location, text)
        return plan

    def _part(self, name: str | None) -> tuple[Part, list[Cell]]:
        document, problems = self._document, self._problems
        base = Settings()
        for layer in document.bases(name):
            base.apply(self._checked_layer(layer))
        axes = read_axes(document.grid(name), problems)
        title = self._text("title", name) or name or self._text("title") or self._name
        part = Part(
            name=name or self._name,
            title=title,
            about=self._text("about", name),
            context=self._text("context", name),
            stands_in=self._text("stands_in", name) if name else "",
            report=self._sections(name),
            axes={axis.name: tuple(value.label for value in axis.values) for axis in axes},
        )
        include, exclude = document.find("include", name), document.find("exclude", name)
        # Before the grid is expanded: a few long axes make more cells than fit into memory.
        max_points = math.prod(len(axis.values) or 1 for axis in axes)
        max_points += len(include.listed()) if include else 0
        self._planned += max_points * self._repeats
        if self._planned > MOST_CELLS:
            problems.add(document.root, f"more than {MOST_CELLS:,} cells")
            return part, []
        points = expand(
            "" if name is None else slug(name),
            title,
            axes,
            include,
            exclude,
            document.location(name),
            problems,
        )
        return part, [cell for point in points for cell in self._cells(point, part, base)]

    def _checked_layer(self, layer: YamlNode) -> dict[str, YamlNode]:
        if not layer.is_mapping:
            self._problems.add(layer, "must be a mapping of settings")
            return {}
        return {
            key: node
            for key, node in layer.items()
            if check_key(key, YamlNode(None, node.file, node.line, layer.path), self._problems)
        }

    def _cells(self, point: GridPoint, part: Part, base: Settings) -> Iterator[Cell]:
        settings = base.copy()
        for layer in point.layers:
            settings.apply(layer)
        config = settings.check(point.location, point.name, self._problems)
        if config is None:
            return
        last_seed = config.seed + self._repeats - 1
        if last_seed > LARGEST_INTEGER:
            text = f"--seed: must be at most {LARGEST_INTEGER - self._repeats + 1}"
            text += f" with {self._repeats} repeats, got {config.seed}"
            settings.report(text, point.location, point.name, self._problems)
            return
        for repeat in range(1, self._repeats + 1):
            values = settings.mapping()
            if repeat > 1:
                # Repeats differ in initial weights and sample order.
                values["seed"] = config.seed + repeat - 1
            repeated = dataclasses.replace(config, seed=config.seed + repeat - 1)
            cell_id = f"{point.name}.r{repeat}"
            self._configs[cell_id] = repeated
            self._origins[cell_id] = settings, point.location
            run_key = config_key(repeated)
            first = self._groups.setdefault((part.name, run_key), point.name)
            if first != point.name:
                # The run would be compared with itself.
                text = f"{point.name} has the settings and seeds of {first}"
                self._duplicates.append((point.location, f"{text}: remove one of them"))
            yield Cell(
                id=cell_id,
                part=part.name,
                group=point.name,
                label=point.label,
                repeat=repeat,
                axes=point.axes,
                settings=values,
                run=self._runs.setdefault(run_key, cell_id),
            )

    def _check_ids(self, cells: list[Cell]) -> None:
        counts = Counter(cell.id for cell in cells)
        for cell_id, count in counts.items():
            _, location = self._origins[cell_id]
            if count > 1:
                self._problems.add(location, f"{count} cells have the name {cell_id}")
            if len(cell_id.encode()) > LONGEST_ID:
                self._problems.add(location, f"too long for a folder name: {bare(cell_id)}")
        if not cells and not self._problems:
            self._problems.add(self._document.root, "no cells remain: exclude fewer of them")

    def _text(self, key: str, part: str | None = None) -> str:
        node = self._document.find(key, part)
        return text_of(node, self._problems) if node else ""

    def _sections(self, part: str | None = None) -> tuple[str, ...]:
        node = self._document.find("report", part)
        items = node.listed() if node else []
        for item in items:
            name = str(item.plain())
            if name not in SECTION_NAMES:
                hint = suggest(name, SECTION_NAMES)
                self._problems.add(item, f"unknown section {shown(name)}: {hint}")
        return tuple(str(item.plain()) for item in items)

    def _answer(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """The parts, or sections of parts, that answer the question of the study."""
        node = self._document.find("answer")
        items = node.listed() if node else []
        known = [f"{part.name}.{section}" for part in parts for section in part.report]
        known += [part.name for part in parts]
        for item in items:
            name = str(item.plain())
            if name not in known:
                self._problems.add(
                    item, f"no part or section {shown(name)}: {suggest(name, known)}"
                )
        return tuple(str(item.plain()) for item in items)

    def _order(self) -> str:
        node = self._document.find("order")
        if node is None:
            return ORDERS[0]
        if node.plain() not in ORDERS:
            self._problems.add(node, f"must be {' or '.join(ORDERS)}, got {shown(node.plain())}")
        return str(node.plain())

    def _number(self, key: str, default: float, least: float, most: float) -> float:
        node = self._document.find(key)
        if node is None:
            return default
        value = node.plain()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (key == "repeats" and value % 1):
            self._problems.add(
                node, f"must be a number from {least:g} to {most:g}, got {shown(value)}"
            )
            return default
        return float(value)


def check_parts(plan: Plan) -> None:
    """Check each cell's strategy, world size, and options of strategy and model.

    A ConfigError has the lines. Loads torch.
    """
    from paceline.launch import validation

    problems = Diagnostics()
    for cell in plan.study.cells:
        if cell.repeat > 1 or cell.run != cell.id:
            continue
        try:
            validation.check_parts(plan.configs[cell.id])
        except ConfigError as error:
            plan.report(cell, error.problems, problems)
        except UsageError as error:
            plan.report(cell, (str(error),), problems)
    problems.raise_if_any()
