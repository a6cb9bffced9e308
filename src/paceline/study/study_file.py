"""The keys of a study file, with the overrides of a scale.

The `base` settings of file, scale and part are layers, each overriding the one before. In a `grid`,
a scale replaces single axes. Any other key is replaced as a whole. A null removes a key, an axis or
a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from paceline.errors import shown, suggest
from paceline.study.yaml_nodes import Diagnostics, YamlNode

SECTION_NAMES = (
    "verdict",
    "post_mortem",
    "overview",
    "target",
    "winners",
    "curves",
    "accuracy",
    "noise_scale",
    "evaluations",
    "step_cost",
    "iteration_time",
    "ranks",
    "phases",
    "timeline",
    "scaling",
    "batch_size",
    "checkpoint",
    "traffic",
    "bandwidth",
    "resources",
    "order",
    "configuration",
)
"""Sections of a report, in order; the valid values of `report`."""


SCALES = ("quick", "real", "full")
"""Generated data within minutes; a public dataset that many have; the reference experiment."""
_GRID_KEYS = ("base", "grid", "include", "exclude", "report")
_TEXT_KEYS = ("title", "about", "context", "stands_in")
_STUDY_KEYS = ("repeats", "order", "time_limit_minutes", "parts", "answer")
KEYS = (*_TEXT_KEYS, *_GRID_KEYS, *_STUDY_KEYS, "scales")
PART_KEYS = (*_TEXT_KEYS, *_GRID_KEYS)
SCALE_KEYS = (*_TEXT_KEYS, *_GRID_KEYS, *_STUDY_KEYS)


class StudyFile:
    """A study file at one scale."""

    def __init__(self, root: YamlNode, scale: str | None, problems: Diagnostics) -> None:
        self.root, self.problems = root, problems
        self._check_shape(root)
        scales = root.get("scales")
        defined = [name for name in SCALES if scales is not None and scales.get(name)]
        self.scale = scale or ("quick" if "quick" in defined else "full")
        if scale is not None and not defined:
            problems.add(root, "the study has no scales: omit --scale")
        elif self.scale not in (*defined, "full"):
            problems.add(scales or root, f"no scale {self.scale!r}: omit --scale")
        chosen = scales.get(self.scale) if scales else None
        self._layers = [root] if chosen is None else [root, chosen]

    def _check_shape(self, root: YamlNode) -> None:
        self._check_keys(root, KEYS)
        self._check_no_nulls(root)
        for part in self._parts_in(root):
            self._check_keys(part, PART_KEYS)
            self._check_no_nulls(part)
        scales = root.get("scales")
        if scales is not None and not scales.is_mapping:
            self.problems.add(scales, f"must be a mapping with the keys {', '.join(SCALES)}")
        for name, scale in scales.items() if scales else ():
            if name not in SCALES:
                self.problems.add(scale, f"unknown scale {shown(name)}: {suggest(name, SCALES)}")
            if scale.content is not None:
                self._check_keys(scale, SCALE_KEYS)
                for part in self._parts_in(scale):
                    self._check_keys(part, PART_KEYS)

    def _check_no_nulls(self, layer: YamlNode) -> None:
        """A null removes an axis or a part, which makes sense only in a scale."""
        for key, expected in (("grid", "a list of values"), ("parts", "a grid, or {} for none")):
            mapping = layer.get(key)
            for _, node in mapping.items() if mapping else ():
                if node.content is None:
                    self.problems.add(node, f"must be {expected}")

    def _parts_in(self, layer: YamlNode) -> Iterator[YamlNode]:
        parts = layer.get("parts")
        if parts is not None and not parts.is_mapping:
            self.problems.add(parts, "must be a mapping of part names to grids")
        yield from (part for _, part in parts.items() if part.content is not None) if parts else ()

    def _check_keys(self, node: YamlNode, known: tuple[str, ...]) -> None:
        if not node.is_mapping:
            self.problems.add(node, f"must be a mapping with keys such as {known[0]}")
        for key, value in node.items():
            if key not in known:
                location = YamlNode(None, value.file, value.line, node.path)
                self.problems.add(location, f"unknown key {shown(key)}: {suggest(key, known)}")

    def find(self, key: str, part: str | None = None) -> YamlNode | None:
        """Return the value of a key in the last layer that has it; None if it is null there."""
        for layer in reversed(self._layers_of(part)):
            if layer.is_mapping and key in layer.content:
                return layer.get(key)
        return None

    def bases(self, part: str | None) -> list[YamlNode]:
        layers = self._layers_of(None) + (self._layers_of(part) if part is not None else [])
        return [base for layer in layers if (base := layer.get("base"))]

    def grid(self, part: str | None) -> YamlNode | None:
        """Return the grid, with each axis from the last layer that has it."""
        grids = [grid for layer in self._layers_of(part) if (grid := layer.get("grid"))]
        if not all(grid.is_mapping for grid in grids):
            return next(grid for grid in grids if not grid.is_mapping)
        axes: dict[str, YamlNode] = {}
        for grid in grids:
            axes |= dict(grid.items())
        return dataclasses.replace(grids[0], content=axes) if grids else None

    def part_names(self) -> list[str]:
        names: dict[str, bool] = {}
        for layer in self._layers:
            parts = layer.get("parts")
            for name, part in parts.items() if parts else ():
                names[name] = part.content is not None
        return [name for name, is_present in names.items() if is_present]

    def location(self, part: str | None) -> YamlNode:
        layers = self._layers_of(part)
        return layers[-1] if part is not None and layers else self.root

    def _layers_of(self, part: str | None) -> list[YamlNode]:
        if part is None:
            return self._layers
        return [
            found
            for layer in self._layers
            if (parts := layer.get("parts")) and (found := parts.get(part))
        ]
