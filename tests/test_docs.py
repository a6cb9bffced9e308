"""The docs say what the program has: every command, every setting, every key."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

import paceline
from paceline.cli import COMMANDS
from paceline.cli.config_flags import config_page
from paceline.records import PHASES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_reference_page_is_what_the_config_says() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == config_page(), "run `make docs`"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_mentions_every_command(command: str) -> None:
    assert f"paceline {command}" in README


def test_the_tree_in_the_readme_is_the_tree() -> None:
    packages = {
        path.name
        for path in (ROOT / "src" / "paceline").iterdir()
        if (path / "__init__.py").exists()
    }
    tree = README[README.index("src/paceline/") :]
    shown = set(re.findall(r"^  (\w+)/ ", tree, flags=re.M))
    assert shown == packages


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_phase_is_defined() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for phase in PHASES:
        assert f"| `{phase}` |" in page


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    for requirement in wanted:
        name = re.match(r"[A-Za-z0-9_-]+", requirement)
        assert name is not None
        assert f"| {name.group()} |" in page


def test_every_needed_version_is_pinned() -> None:
    """Direct and transitive, by the metadata of what is installed."""
    pinned = {
        canonical(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    reached: set[str] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [("paceline", ("dev",))]
    while waiting:
        name, extras = waiting.pop()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        reached.add(canonical(name))
        for text in requirements:
            needed, _, condition = text.partition(";")
            wanted = not condition or any(f"'{extra}'" in condition for extra in extras)
            wanted = wanted or any(f'"{extra}"' in condition for extra in extras)
            found = re.match(r"[A-Za-z0-9._-]+", needed)
            assert found is not None
            if wanted and canonical(found.group()) not in reached:
                waiting.append((found.group(), ()))
    assert reached - {"paceline"} <= pinned


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def test_the_public_names_exist() -> None:
    for name in paceline.__all__:
        assert hasattr(paceline, name)
