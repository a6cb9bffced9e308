"""Expand a grid into points: the product of its axes, plus `include`, minus `exclude`.

An axis is a setting with a list of values, or a name with a list of mappings, each with a label and
settings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import bare, shown, suggest
from paceline.study.settings import FIELDS, as_text, check_key, is_setting
from paceline.study.yaml_nodes import Diagnostics, YamlNode


@dataclass(frozen=True, slots=True)
class Value:
    """One value of an axis."""

    label: str
    text: str
    """The value in the label of a cell, with the name of the axis if the label lacks context."""
    layer: dict[str, YamlNode]


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    values: tuple[Value, ...]

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A cell without its repeats: its position in the grid and its settings over the base."""

    name: str
    label: str
    axes: dict[str, str]
    layers: tuple[dict[str, YamlNode], ...]
    location: YamlNode
    """Where to report problems that no setting of the point causes."""


def read_axes(grid: YamlNode | None, problems: Diagnostics) -> tuple[Axis, ...]:
    """Return the axes of a grid, without those that a scale sets to null."""
    if grid is None:
        return ()
    if not grid.is_mapping:
        problems.add(grid, "must be a mapping of axes to lists of values")
        return ()
    axes = []
    for name, node in grid.items():
        if node.content is None:
            continue
        if not isinstance(node.content, list) or not node.content:
            problems.add(node, "must be a list of values")
            continue
        values: dict[str, Value] = {}
        for item in node.content:
            value = _read_value(name, item, problems)
            if value is not None and value.label in values:
                problems.add(item, f"two values have the label {shown(value.label)}")
            elif value is not None:
                values[value.label] = value
        axes.append(Axis(name, tuple(values.values())))
    return tuple(axes)


def _read_value(axis: str, node: YamlNode, problems: Diagnostics) -> Value | None:
    if node.is_mapping:
        labeled = _read_labeled(node, problems)
        return None if labeled is None else Value(labeled[0], labeled[0], labeled[1])
    if not is_setting(axis):
        if "." in axis or suggest(axis, FIELDS).startswith("did"):
            check_key(axis, node, problems)
        else:
            problems.add(
                node, "the axis is not a setting: its values must be mappings with a label"
            )
        return None
    short = axis.rpartition(".")[2].replace("_", " ")
    return Value(_label_of(node), f"{short} {_label_of(node)}", {axis: node})


def _read_labeled(node: YamlNode, problems: Diagnostics) -> tuple[str, dict[str, YamlNode]] | None:
    """Return the label and the settings of a mapping; None, and a problem, if it is invalid."""
    label_node = node.get("label")
    label = text_of(label_node, problems) if label_node else ""
    if not label:
        problems.add(node, "needs a label")
        return None
    pairs = [(key, value) for key, value in node.items() if key != "label"]
    # A list, so that every key is checked.
    known = [check_key(key, YamlNode(None, value.file, value.line, node.path), problems)
             for key, value in pairs]  # fmt: skip
    return (label, dict(pairs)) if all(known) else None


def expand(
    prefix: str,
    title: str,
    axes: Sequence[Axis],
    include: YamlNode | None,
    exclude: YamlNode | None,
    location: YamlNode,
    problems: Diagnostics,
) -> list[GridPoint]:
    """Return the points of a grid in file order; the last axis varies fastest."""
    excluded = _read_excluded(axes, exclude, problems)
    hits = [0] * len(excluded)
    points = []
    has_grid = bool(axes) or include is None
    # An axis without a valid value was reported; the other settings are still checked.
    valid = [axis for axis in axes if axis.values]
    for values in itertools.product(*(axis.values for axis in valid)) if has_grid else ():
        labels = {axis.name: value.label for axis, value in zip(valid, values, strict=True)}
        matches = [_matches(rule, labels) for rule in excluded]
        hits = [count + match for count, match in zip(hits, matches, strict=True)]
        if any(matches):
            continue
        names = [slug(f"{axis.short_name}-{labels[axis.name]}") for axis in valid]
        points.append(
            GridPoint(
                name=".".join([*([prefix] if prefix else []), *names]) or "run",
                label=", ".join(value.text for value in values) or title,
                axes=labels,
                layers=tuple(value.layer for value in values),
                location=location,
            )
        )
    for rule, count in zip(excluded, hits, strict=True):
        if not count and rule.is_valid:
            problems.add(rule.location, "excludes no cell of the grid")
    return points + _included(prefix, axes, include, problems)


def _included(
    prefix: str, axes: Sequence[Axis], include: YamlNode | None, problems: Diagnostics
) -> list[GridPoint]:
    points = []
    for entry in include.listed() if include else []:
        labeled = _read_labeled(entry, problems) if entry.is_mapping else None
        if labeled is None:
            if not entry.is_mapping:
                problems.add(entry, "must be a list of mappings, each with a label")
            continue
        label, layer = labeled
        labels = {axis.name: _label_of(layer[axis.name]) for axis in axes if axis.name in layer}
        name = f"{prefix}.{slug(label)}" if prefix else slug(label)
        points.append(GridPoint(name, label, labels, (layer,), entry))
    return points


@dataclass(frozen=True, slots=True)
class _Rule:
    wanted: dict[str, set[str]]
    """Labels by axis."""
    location: YamlNode
    is_valid: bool


def _matches(rule: _Rule, labels: dict[str, str]) -> bool:
    return all(labels.get(axis) in wanted for axis, wanted in rule.wanted.items())


def _read_excluded(
    axes: Sequence[Axis], exclude: YamlNode | None, problems: Diagnostics
) -> list[_Rule]:
    known = {axis.name: [value.label for value in axis.values] for axis in axes}
    rules = []
    for entry in exclude.listed() if exclude else []:
        if not entry.is_mapping or not entry.content:
            problems.add(entry, "must be a list of rules such as {nodes: 1, strategy: DDP}")
            continue
        invalid = [name for name, _ in entry.items() if name not in known]
        for name in invalid:
            problems.add(entry, f"no axis {shown(name)} in this grid: {suggest(name, known)}")
        wanted = {
            name: {_label_of(item) for item in node.listed()}
            for name, node in entry.items()
            if name in known
        }
        # The labels of an axis without a valid value are unknown.
        invalid += [name for name in wanted if not known[name]]
        for name, labels in wanted.items():
            for label in sorted(labels - set(known[name])) if known[name] else ():
                hint = suggest(label, known[name])
                problems.add(entry, f"no value {shown(label)} on axis {bare(name)}: {hint}")
                invalid.append(label)
        rules.append(_Rule(wanted, entry, not invalid))
    return rules


def _label_of(node: YamlNode) -> str:
    value = node.plain()
    if isinstance(value, bool):
        return "on" if value else "off"
    return as_text(value) if value not in (None, [], "") else "none"


def text_of(node: YamlNode, problems: Diagnostics) -> str:
    """Return a label or a title as one line of text."""
    if isinstance(node.content, list | dict):
        problems.add(node, "must be text")
    return " ".join(as_text(node.plain()).split())


def slug(label: str) -> str:
    """Return a label as part of a folder name; keeps letters of any alphabet."""
    return re.sub(r"[^\w.]+", "-", label.lower()).strip("-.") or "x"
