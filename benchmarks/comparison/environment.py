"""The environment that has the peers: how it is made, and what is in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from comparison.group import extensions_folder
from comparison.progress import progress
from paceline.measure.machine import installed_version, software

BENCHMARKS = Path(__file__).parent.parent
ROOT = BENCHMARKS.parent
REQUIREMENTS = BENCHMARKS / "peers-requirements.txt"
COMPILE = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Op; Op().load()"


def set_up(folder: Path) -> None:
    """A virtual environment with paceline, the pinned torch and the peers."""
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-build-isolation", "-c", str(ROOT / "constraints.txt")]
    # DeepSpeed compiles its operations when it first needs them, which must not be while others
    # are timed; to be told which it could compile, its own setup needs torch to be there.
    environment = os.environ | {
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": extensions_folder(str(folder.absolute())),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
    }
    steps = {
        f"an environment in {folder}": [sys.executable, "-m", "venv", str(folder)],
        "build tools": [*pip, "setuptools", "wheel"],
        "paceline and torch": [*pip, "-e", str(ROOT)],
        "the peers": [*pip, "-r", str(REQUIREMENTS)],
        "DeepSpeed's own compiling": [python, "-c", COMPILE],
    }
    for title, command in steps.items():
        with progress(title):
            done = subprocess.run(
                command, env=environment, text=True, capture_output=True, check=False
            )
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
            sys.exit(f"{title}: failed, see above; peers that are missing will be left out")
    print(f"measure with: {python} benchmarks/peers.py")


def versions() -> dict[str, str | None]:
    peers = [line.split("==")[0] for line in REQUIREMENTS.read_text().splitlines() if "==" in line]
    return {**software(), **{name: installed_version(name) for name in peers}}
