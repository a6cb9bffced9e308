"""YAML whose values know their lines, so that a problem can be told with the place to mend it.

Only plain data is ever built: mappings, lists and scalars, as YAML's safe loader reads them.
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
"""In one file: aliases of aliases could make any number of them out of a few lines."""
MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value of a file: a scalar, a list of nodes, or nodes by key."""

    content: Any
    file: str
    line: int
    path: tuple[str, ...] = ()
    """The keys that lead to it; places in a list are not counted."""

    @property
    def where(self) -> str:
        path = ".".join(map(bare, self.path))
        return f"{self.file}:{self.line}: {path}" if path else f"{self.file}:{self.line}"

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.content, dict)

    def items(self) -> Iterator[tuple[str, YamlNode]]:
        """Of a mapping; nothing else has any."""
        if isinstance(self.content, dict):
            yield from self.content.items()

    def get(self, key: str) -> YamlNode | None:
        """A key's value where this is a mapping that has it and does not say null."""
        node = self.content.get(key) if isinstance(self.content, dict) else None
        return node if isinstance(node, YamlNode) and node.content is not None else None

    def listed(self) -> list[YamlNode]:
        """A list's nodes; anything else alone, as if it were a list of one."""
        return self.content if isinstance(self.content, list) else [self]

    def plain(self) -> Any:
        """The value without the places."""
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content


class Diagnostics:
    """Everything that is wrong with a file, told at once in the order of its lines."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], str] = {}

    def add(self, node: YamlNode, text: str, cell: str = "") -> None:
        """`cell` is one of perhaps many that have the same problem: the first is told."""
        example = f" (as in {cell})" if cell else ""
        self._found.setdefault((node.line, f"{node.where}: {text}"), example)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        if self._found:
            found = sorted(self._found.items())
            raise ConfigError([text + example for (_, text), example in found])


def read(path: Path, problems: Diagnostics) -> YamlNode:
    """The file as nodes; keys that are given twice are problems, broken YAML ends it at once."""
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
        """Where it is; 0 before it begins."""

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
                self._tell_too_long(node, path)
            else:
                text = f"is no {kind}: {shown(str(node.value))} (quote what is text)"
                self._tell(node, path, text)
            return None
        # Of shorter ones a setting's own limits say more.
        if isinstance(value, int) and abs(value) >= 10 ** (2 * MOST_DIGITS):
            self._tell_too_long(node, path)
            return None
        # A date, which no setting is, stays as it is written.
        return value if isinstance(value, str | bool | int | float | None) else str(node.value)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, YamlNode]:
        values: dict[str, YamlNode] = {}
        for name, (key, value) in self._pairs(node, path).items():
            converted = self.convert(value, (*path, name))
            # The line of the key: a value may begin on the next one.
            where = key.start_mark.line + 1
            values[name] = YamlNode(converted.content, self._file, where, converted.path)
        return values

    def _pairs(
        self, node: yaml.MappingNode, path: tuple[str, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Keys and values by name; what `<<` merges in gives way to the mapping's own."""
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            # A key is taken as it is written: `on` and `1` are words here.
            name = str(key.value)
            if key.tag == MERGE_TAG:
                for source in reversed(self._sources(value, path)):
                    self._enter(source)
                    merged |= self._pairs(source, path)
            elif not isinstance(key, yaml.ScalarNode):
                self._tell(key, path, "a key must be a word")
            else:
                if name in own:
                    self._tell(key, path, f"{shown(name)} is given twice")
                own[name] = key, value
        return merged | own

    def _sources(self, value: yaml.Node, path: tuple[str, ...]) -> list[yaml.MappingNode]:
        """Of a merge, the first of which counts most."""
        listed = value.value if isinstance(value, yaml.SequenceNode) else [value]
        mappings = [source for source in listed if isinstance(source, yaml.MappingNode)]
        if len(mappings) < len(listed):
            self._tell(value, path, "<< takes settings by name, or a list of such")
        return mappings

    def _tell_too_long(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        got = shown(str(node.value))
        self._tell(node, path, f"must be a number of at most {MOST_DIGITS} digits, got {got}")

    def _tell(self, node: yaml.Node, path: tuple[str, ...], text: str) -> None:
        self._problems.add(YamlNode(None, self._file, node.start_mark.line + 1, path), text)
