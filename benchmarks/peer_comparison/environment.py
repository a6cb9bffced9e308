"""The virtual environment with the peers: how to create it, and its versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paceline.measure.machine import installed_version, software
from peer_comparison.group import extensions_folder
from peer_comparison.rounds import progress

BENCHMARKS = Path(__file__).parent.parent
ROOT = BENCHMARKS.parent
REQUIREMENTS = BENCHMARKS / "peers-requirements.txt"
COMPILE = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Op; Op().load()"


def set_up(folder: Path) -> None:
    """Create a virtual environment with paceline, the pinned torch and the peers."""
    folder = folder.absolute()  # Some steps change the working directory.
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-build-isolation", "-c", str(ROOT / "constraints.txt")]
    # DeepSpeed compiles its operations on first use, which must not happen during timings; its
    # setup finds out which ones it can compile only if torch is installed.
    environment = os.environ | {
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": extensions_folder(str(folder)),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
    }
    needed = {
        f"an environment in {folder}": [sys.executable, "-m", "venv", str(folder)],
        "build tools": [*pip, "setuptools", "wheel"],
        "paceline and torch": [*pip, "-e", str(ROOT)],
    }
    for title, command in needed.items():
        if not succeeds(title, command, environment):
            sys.exit(f"{title}: failed, see above")
    peers = {peer: [*pip, peer] for peer in requirements()}
    peers["what DeepSpeed compiles"] = [python, "-c", COMPILE]
    for title, command in peers.items():
        if not succeeds(title, command, environment):
            print(f"{title}: failed, see above; this peer is skipped")
    print(f"measure with: {python} benchmarks/peers.py")


def succeeds(title: str, command: list[str], environment: dict[str, str]) -> bool:
    with progress(title):
        done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


def requirements() -> list[str]:
    return [line for line in REQUIREMENTS.read_text().splitlines() if "==" in line]


def versions() -> dict[str, str | None]:
    peers = [line.partition("==")[0] for line in requirements()]
    return {**software(), **{name: installed_version(name) for name in peers}}
