"""Makefile and .gitignore, in a fresh copy of the repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE_PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
  printf '#!/bin/sh\\necho demo runs\\n' > "$3/bin/paceline"
  chmod +x "$3/bin/paceline"
fi
"""
"""A fake Python that installs nothing; its virtual environments have a fake `paceline`."""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_announces_the_installation_and_does_not_echo_its_commands(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "demo", f"PYTHON={python}"]
    outputs = [
        subprocess.run(
            command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
        )
        .stdout.decode()
        .splitlines()
        for _ in range(2)
    ]
    announced = "installing paceline and its dependencies into .venv"
    assert outputs[0][0].startswith(announced)
    assert outputs[0][1:] == outputs[1] == [".venv/bin/paceline demo", "demo runs"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("folder", ["runs", "studies", "examples/runs", "examples/studies"])
def test_git_ignores_runs_and_studies_in_any_folder(folder: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    record = f"{folder}/one/config.json"
    asked = subprocess.run(["git", "-C", str(tmp_path), "check-ignore", "-q", record], check=False)
    assert asked.returncode == 0
