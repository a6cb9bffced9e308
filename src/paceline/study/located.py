"""YAML whose values know their lines, so that a problem can be told with the place to mend it.

Only plain data is ever built: mappings, lists and scalars, as YAML's safe loader reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import ConfigError, UsageError

MOST_VALUES = 20_000
"""In one file: aliases of aliases could make any number of them out of a few lines."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a file: a scalar, a list of nodes, or nodes by key."""

    content: Any
    file: str
    line: int
    path: tuple[str, ...] = ()
    """The keys that lead to it; places in a list are not counted."""

    @property
    def where(self) -> str:
        path = ".".join(self.path)
        return f"{self.file}:{self.line}: {path}" if path else f"{self.file}:{self.line}"

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.content, dict)

    def items(self) -> Iterator[tuple[str, Node]]:
        """Of a mapping; nothing else has any."""
        if isinstance(self.content, dict):
            yield from self.content.items()

    def get(self, key: str) -> Node | None:
        """A key's value where this is a mapping that has it and does not say null."""
        node = self.content.get(key) if isinstance(self.content, dict) else None
        return node if isinstance(node, Node) and node.content is not None else None

    def listed(self) -> list[Node]:
        """A list's nodes; anything else alone, as if it were a list of one."""
        return self.content if isinstance(self.content, list) else [self]

    def plain(self) -> Any:
        """The value without the places."""
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content


class Problems:
    """Everything that is wrong with a file, told at once in the order of its lines."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], str] = {}

    def add(self, node: Node, text: str, cell: str = "") -> None:
        """`cell` is one of perhaps many that have the same problem: the first is told."""
        example = f" (as in {cell})" if cell else ""
        self._found.setdefault((node.line, f"{node.where}: {text}"), example)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        if self._found:
            found = sorted(self._found.items())
            raise ConfigError([text + example for (_, text), example in found])


def read(path: Path, problems: Problems) -> Node:
    """The file as nodes; keys that are given twice are problems, broken YAML ends it at once."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(f"cannot read {path}: {cause}") from None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise UsageError(f"{path} is empty")
        return _Reader(str(path), loader, problems).convert(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UsageError(f"{path}:{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{path}: not usable: too deeply nested") from None
    finally:
        loader.dispose()


class _Reader:
    def __init__(self, file: str, loader: yaml.SafeLoader, problems: Problems) -> None:
        self._file, self._loader, self._problems = file, loader, problems
        self._count = 0

    def convert(self, node: yaml.Node, path: tuple[str, ...]) -> Node:
        self._count += 1
        line = node.start_mark.line + 1
        if self._count > MOST_VALUES:
            raise UsageError(f"{self._file}:{line}: more than {MOST_VALUES:,} values")
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node, path), self._file, line, path)
        if isinstance(node, yaml.SequenceNode):
            values = [self.convert(item, path) for item in node.value]
            return Node(values, self._file, line, path)
        value = self._loader.construct_object(node)
        return Node(value, self._file, line, path)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Node]:
        self._loader.flatten_mapping(node)
        values: dict[str, Node] = {}
        for key, value in node.value:
            # A key is taken as it is written: `on` and `1` are words here.
            name = str(key.value)
            if name in values:
                place = Node(None, self._file, key.start_mark.line + 1, path)
                self._problems.add(place, f"{name!r} is given twice")
            converted = self.convert(value, (*path, name))
            # The line of the key: a value may begin on the next one.
            where = key.start_mark.line + 1
            values[name] = Node(converted.content, self._file, where, converted.path)
        return values
