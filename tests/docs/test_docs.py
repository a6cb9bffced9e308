"""The docs match the program: every command, setting, key, link and module path."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

import paceline
from paceline.cli import COMMANDS, _parse
from paceline.cli.config_flags import config_page, given_flags
from paceline.config import from_mapping
from paceline.records import PHASES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_config_page_is_up_to_date() -> None:
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


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")))
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text()):
        file = page.parent / target if target else page
        text = re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
        headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
        assert anchor in [heading_anchor(heading) for heading in headings], (target, anchor)


def heading_anchor(heading: str) -> str:
    """Return the anchor that GitHub generates."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\) \|", index, flags=re.M))


def test_the_glossary_is_in_alphabetical_order() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    terms = [term.lower() for term in re.findall(r"^\*\*(.+?)\.\*\*", page, flags=re.M)]
    assert len(terms) > 50
    assert terms == sorted(terms)


def test_the_glossary_names_every_phase() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    entry = page[page.index("**phase names.**") :].split("\n\n")[0]
    assert set(PHASES) == set(re.findall(r"`(\w+)`", entry))


def test_every_make_target_is_described() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.+)$", makefile, flags=re.M)
    assert targets is not None
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## ")[0]
    assert re.findall(r"^\| `make ([\w-]+)` \|", table, flags=re.M) == targets[1].split()


def test_module_paths_in_the_docs_exist() -> None:
    folders = ("src", "tests", "benchmarks", "examples")
    files = chain(*((ROOT / folder).rglob("*.py") for folder in folders))
    known = [path.relative_to(ROOT).as_posix() for path in files]
    for page in (ROOT / "docs").glob("*.md"):
        for path in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text()):
            assert any(name.endswith(f"/{path}") or name == path for name in known), path


def commands(page: Path) -> list[str]:
    """Return the complete paceline commands in the code blocks of a page, without comments."""
    text = page.read_text().replace("\\\n", "")
    lines = re.findall(r"^(?:    |taskset -c \S+ )?(paceline [a-z].*)$", text, flags=re.M)
    cleaned = [re.split(r" {2,}| # ", re.sub(r" +--", " --", line))[0] for line in lines]
    contenders = ("paceline shared", "paceline overlap")  # rows of the output in peers.md
    return [line for line in cleaned if "..." not in line and line not in contenders]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_commands_in_the_docs_are_accepted(page: Path) -> None:
    for command in commands(page):
        arguments = _parse(shlex.split(command)[1:])
        if command.startswith("paceline train") and arguments.resume is None:
            from_mapping(given_flags(arguments))


def test_commands_are_found_in_the_docs() -> None:
    assert "paceline comm" in commands(ROOT / "docs" / "communication.md")
    assert len(commands(ROOT / "README.md")) > 8


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


def test_every_dependency_is_pinned() -> None:
    """Direct and transitive dependencies, by the metadata of installed packages."""
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
