"""YAML nodes with their line numbers, and a collection of problems at these lines.

Only plain data is built: mappings, lists and scalars, as YAML's safe loader reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.reader import ReaderError

from paceline.config.conversion import MOST_DIGITS
from paceline.errors import ConfigError, UsageError, bare, shown

MOST_VALUES = 20_000
"""In one file: aliases of aliases can expand a few lines to any number of values."""
MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value in a file: a scalar, a list of nodes, or a mapping of nodes."""

    content: Any
    file: str
    line: int
    path: tuple[str, ...] = ()
    """Keys from the root to this value, without list positions."""

    @property
    def where(self) -> str:
        path = ".".join(map(bare, self.path))
        return f"{self.file}:{self.line}: {path}" if path else f"{self.file}:{self.line}"

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.content, dict)

    def items(self) -> Iterator[tuple[str, YamlNode]]:
        """Yield the items of a mapping; other nodes have none."""
        if isinstance(self.content, dict):
            yield from self.content.items()

    def get(self, key: str) -> YamlNode | None:
        """Return the value of a key; None if it is missing or null, or if this is no mapping."""
        node = self.content.get(key) if isinstance(self.content, dict) else None
        return node if isinstance(node, YamlNode) and node.content is not None else None

    def listed(self) -> list[YamlNode]:
        """Return the nodes of a list; any other node counts as a list of one."""
        return self.content if isinstance(self.content, list) else [self]

    def plain(self) -> Any:
        """Return the value without line numbers."""
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content


class Diagnostics:
    """All problems of a file, reported together in line order."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], str] = {}

    def add(self, node: YamlNode, text: str, cell: str = "") -> None:
        """Add a problem; `cell` is an example, and of several the first is shown."""
        example = f" (as in {cell})" if cell else ""
        self._found.setdefault((node.line, f"{node.where}: {text}"), example)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        if self._found:
            found = sorted(self._found.items())
            raise ConfigError([text + example for (_, text), example in found])


def read(path: Path, problems: Diagnostics) -> YamlNode:
    """Parse a file. Duplicate keys are added to `problems`; invalid YAML raises a UsageError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a null byte in the name
        raise UsageError(f"cannot read {path}: {error}") from None
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}:{line}: not UTF-8 text: byte 0x{raw[error.start]:02x} ({error.reason})"
        ) from None
    reader = _Reader(str(path), problems)
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise UsageError(f"{path}:1: the file is empty")
            return reader.convert(root, ())
        except RecursionError:
            line = reader.line or loader.line + 1
            raise UsageError(f"{path}:{line}: too deeply nested") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UsageError(f"{path}:{line}: not YAML: {error.problem or error.context}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"{path}:{line}: not YAML: {error.reason}") from None


class _Reader:
    def __init__(self, file: str, problems: Diagnostics) -> None:
        self._file, self._problems = file, problems
        self._scalars = SafeConstructor()
        self._count = 0
        self.line = 0
        """Current line; 0 before the first node."""

    def convert(self, node: yaml.Node, path: tuple[str, ...]) -> YamlNode:
        self._enter(node)
        line = self.line
        if isinstance(node, yaml.MappingNode):
            return YamlNode(self._mapping(node, path), self._file, line, path)
        if isinstance(node, yaml.SequenceNode):
            values = [self.convert(item, path) for item in node.value]
            return YamlNode(values, self._file, line, path)
        return YamlNode(self._scalar(node, path), self._file, line, path)

    def _enter(self, node: yaml.Node) -> None:
        self._count += 1
        self.line = node.start_mark.line + 1
        if self._count > MOST_VALUES:
            raise UsageError(f"{self._file}:{self.line}: more than {MOST_VALUES:,} values")

    def _scalar(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        try:
            value = self._scalars.construct_object(node)
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            kind = node.tag.rpartition(":")[2]
            if kind == "int" and len(node.value) > MOST_DIGITS:
                self._add_too_long(node, path)
            else:
                text = f"is not a valid {kind}: {shown(str(node.value))} (quote it if it is text)"
                self._add(node, path, text)
            return None
        # For shorter numbers, the limits of the setting give a better message.
        if isinstance(value, int) and abs(value) >= 10 ** (2 * MOST_DIGITS):
            self._add_too_long(node, path)
            return None
        # Dates stay text: no setting is a date.
        return value if isinstance(value, str | bool | int | float | None) else str(node.value)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, YamlNode]:
        values: dict[str, YamlNode] = {}
        for name, (key, value) in self._pairs(node, path).items():
            converted = self.convert(value, (*path, name))
            # The line of the key, because a value may begin on the next line.
            line = key.start_mark.line + 1
            values[name] = YamlNode(converted.content, self._file, line, converted.path)
        return values

    def _pairs(
        self, node: yaml.MappingNode, path: tuple[str, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return keys and values by name; own keys override those merged in with `<<`."""
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            # Keys are text, also `on` and `1`.
            name = str(key.value)
            if key.tag == MERGE_TAG:
                for source in reversed(self._sources(value, path)):
                    self._enter(source)
                    merged |= self._pairs(source, path)
            elif not isinstance(key, yaml.ScalarNode):
                self._add(key, path, "a key must be a scalar")
            else:
                if name in own:
                    self._add(key, path, f"{shown(name)} is a duplicate key")
                own[name] = key, value
        return merged | own

    def _sources(self, value: yaml.Node, path: tuple[str, ...]) -> list[yaml.MappingNode]:
        """Return the mappings that `<<` merges in; the first has precedence."""
        listed = value.value if isinstance(value, yaml.SequenceNode) else [value]
        mappings = [source for source in listed if isinstance(source, yaml.MappingNode)]
        if len(mappings) < len(listed):
            self._add(value, path, "<< must be a mapping or a list of mappings")
        return mappings

    def _add_too_long(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        got = shown(str(node.value))
        self._add(node, path, f"must be a number of at most {MOST_DIGITS} digits, got {got}")

    def _add(self, node: yaml.Node, path: tuple[str, ...], text: str) -> None:
        self._problems.add(YamlNode(None, self._file, node.start_mark.line + 1, path), text)
