"""Unchanged training scripts of other libraries: only the name of the backend differs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from time import monotonic
from typing import Any

from peer_comparison.group import PACKAGES, TITLES, ContenderError, last_words, worker_environment
from peer_comparison.iteration import loss_text
from peer_comparison.rounds import (
    Skipped,
    Spread,
    milliseconds,
    progress,
    quartiles,
    ratio_text,
    speed_ups,
    take_turns,
)

SCRIPTS = Path(__file__).parent.parent / "peer_scripts"
NAMES = ("ddp", "fabric", "accelerate")
BACKENDS = ("gloo", "paceline")
RUN_LIMIT_SECONDS = 180.0


@dataclass(frozen=True)
class Row:
    script: str
    workers: int
    gloo: Spread
    paceline: Spread
    speed_up: Spread
    last_loss: float
    losses_off_by: float
    """Maximum difference of a step's loss, as a fraction of the first loss."""


def compare_scripts(world_size: int, repeats: int, skipped: Skipped) -> list[dict[str, Any]]:
    print(f"\nunchanged scripts, {world_size} workers, backend gloo and backend paceline")
    print(f"{'':17}{'gloo, ms per step':^19}{'paceline':^19}{'speedup':^17}{'losses':>8}")
    rows = []
    for name in NAMES:
        try:
            check_possible(name)
            with progress(f"{TITLES[name]}'s script, {repeats} times with each backend"):
                rows.append(measure(name, world_size, repeats))
        except ContenderError as error:
            skipped.add(TITLES[name], "script", str(error))
        else:
            show(rows[-1])
    return [asdict(row) for row in rows]


def check_possible(name: str) -> None:
    if "paceline" not in entry_points(group="torch.backends").names:
        raise ContenderError("torch is not told of paceline's backend: install paceline again")
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        raise ContenderError(f"{PACKAGES[name]} is not installed (see --setup)")


def measure(name: str, world_size: int, repeats: int) -> Row:
    losses: dict[str, list[float]] = {}

    def run(backend: str) -> float:
        printed = run_script(SCRIPTS / f"train_{name}.py", backend, world_size)
        losses[backend] = printed["losses"]
        return float(printed["step_seconds"])

    blocks = take_turns(BACKENDS, repeats, run)
    gloo, ours = losses["gloo"], losses["paceline"]
    return Row(
        script=name,
        workers=world_size,
        gloo=Spread.of_blocks(blocks["gloo"]),
        paceline=Spread.of_blocks(blocks["paceline"]),
        speed_up=Spread.of(speed_ups(blocks["paceline"], blocks["gloo"])),
        last_loss=ours[-1],
        losses_off_by=max(abs(a - b) for a, b in zip(gloo, ours, strict=True)) / gloo[0],
    )


def run_script(script: Path, backend: str, world_size: int) -> dict[str, Any]:
    """Output of the script's first worker."""
    environment = worker_environment(world_size, threads=1)
    command = [sys.executable, str(script), "--backend", backend]
    workers = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    deadline = monotonic() + RUN_LIMIT_SECONDS
    try:
        printed = [worker.communicate(timeout=deadline - monotonic())[0] for worker in workers]
    except subprocess.TimeoutExpired:
        raise ContenderError(f"no end within {RUN_LIMIT_SECONDS:g} s with {backend}") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, text in zip(workers, printed, strict=True):
        if worker.returncode:
            raise ContenderError(f"with {backend}: {last_words(text)}")
    lines = [line for line in printed[0].splitlines() if line.startswith("{")]
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def show(row: Row) -> None:
    print(
        f"{TITLES[row.script]:17}{milliseconds(row.gloo.median):>7}{quartiles(row.gloo):>12}"
        f"{milliseconds(row.paceline.median):>7}{quartiles(row.paceline):>12}"
        f"{ratio_text(row.speed_up.median):>6}{quartiles(row.speed_up, ratio_text):>11}"
        f"{loss_text(row.losses_off_by):>8}"
    )
