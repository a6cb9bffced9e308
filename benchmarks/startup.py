"""Start-up: from the command to the end of the first iteration, with two workers.

Alternates `paceline train` with `torchrun` of a minimal DistributedDataParallel script
(startup_scripts/minimal_ddp.py), with the same model and data, and lists the parts of paceline's
start-up. Medians and min–max of the repeats:

    python benchmarks/startup.py --repeats 7

`--checkout DIR` also measures another checkout, by the Python of its virtual environment. `--cells`
measures whole cells of a study instead, from the start of their command to its end: LeNet with two
workers for 400 iterations, and four emulated nodes with half a core for 5 (as root).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).parent / "startup_scripts"
LIMIT_SECONDS = 120.0

CELLS = {
    "two workers, 400 iterations": """
        title: Cells on two workers
        about: The cells of first-look.
        base: {model: lenet, data: digits, train_samples: 8192, test_samples: 1000, trace: 2,
               iterations: 400, batch_size: 64, eval_every: 100, optimizer: adam, lr: 2e-3,
               nproc_per_node: 2, threads: 1, device: cpu}
        grid: {strategy: [ddp, shared]}
        repeats: %d
        report: [verdict]
        """,
    "four emulated nodes, 5 iterations": """
        title: Cells on four nodes
        about: Half a core each.
        base: {model: lenet, data: digits, train_samples: 512, test_samples: 100, iterations: 5,
               batch_size: 64, device: cpu, cluster: "nodes=4,cpus=0.5,bandwidth=1gbit"}
        grid: {strategy: [ddp]}
        repeats: %d
        report: [verdict]
        """,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--checkout", type=Path, help="another checkout, to compare with")
    parser.add_argument("--cells", action="store_true", help="whole cells of a study")
    arguments = parser.parse_args()
    pythons = {"paceline": sys.executable}
    if arguments.checkout:
        pythons["paceline of the checkout"] = str(arguments.checkout / ".venv/bin/python")
    with tempfile.TemporaryDirectory(prefix="paceline-startup-") as folder:
        if arguments.cells:
            measure_cells(pythons, arguments.repeats, Path(folder))
        else:
            measure_commands(pythons, arguments.repeats, Path(folder))


def measure_commands(pythons: dict[str, str], repeats: int, folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    commands: dict[str, Callable[[str], list[str]]] = {
        "torchrun, DDP": lambda _: [*torchrun, "minimal_ddp.py"]
    }
    for label, python in pythons.items():
        for strategy in ("ddp", "overlap"):
            commands[f"{label}, {strategy}"] = _train(python, strategy, folder)
    first: dict[str, list[float]] = {label: [] for label in commands}
    whole: dict[str, list[float]] = {label: [] for label in commands}
    parts: dict[str, list[dict[str, float]]] = {label: [] for label in commands}
    # The first round fills the caches of the file system and is not counted.
    for number in range(repeats + 1):
        for label, command in commands.items():
            name = f"run-{number}-{len(parts[label])}-{abs(hash(label))}"
            to_first, to_end = _time(command(name), folder / f"{name}.mark")
            if not number:
                continue
            first[label].append(to_first)
            whole[label].append(to_end)
            result = folder / name / "result.json"
            if result.exists():
                parts[label].append(json.loads(result.read_text())["workers"][0]["startup_seconds"])
    baseline = statistics.median(first["torchrun, DDP"])
    print("command to the end of the first iteration; whole command of 3 iterations")
    for label in commands:
        ratio = statistics.median(first[label]) / baseline
        print(f"{label:36} {_spread(first[label])}  {ratio:.2f}x   {_spread(whole[label])}")
    print("\nparts of rank 0's start-up, medians")
    for label, found in parts.items():
        if found:
            spent = {part: statistics.median(one[part] for one in found) for part in found[0]}
            print(f"{label:36} " + ", ".join(f"{key} {each:.2f} s" for key, each in spent.items()))


def _train(python: str, strategy: str, folder: Path) -> Callable[[str], list[str]]:
    def command(name: str) -> list[str]:
        flags = ["--model", "network:LeNet", "--data", "network:data", "--strategy", strategy]
        flags += ["--nproc-per-node", "2", "--batch-size", "64", "--iterations", "3"]
        flags += ["--threads", "1", "--quiet", "--out", str(folder), "--name", name]
        return [python, "-m", "paceline", "train", *flags]

    return command


def _time(command: list[str], mark: Path) -> tuple[float, float]:
    """Seconds to the second iteration, and to the end."""
    environment = {**os.environ, "STARTUP_MARK": str(mark), "OMP_NUM_THREADS": "1"}
    # As on most machines: Python keeps its compiled modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.time()
    subprocess.run(
        command,
        cwd=SCRIPTS,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # gloo's threads sometimes abort the minimal script when it exits.
        check=False,
        timeout=LIMIT_SECONDS,
    )
    return float(mark.read_text()) - began, time.time() - began


def measure_cells(pythons: dict[str, str], repeats: int, folder: Path) -> None:
    for title, text in CELLS.items():
        for number, (label, python) in enumerate(pythons.items()):
            study = folder / f"{title.replace(' ', '-')}.yaml"
            study.write_text(text % repeats)
            out = folder / f"{study.stem}-{number}"
            began = time.time()
            subprocess.run(
                [python, "-m", "paceline", "study", "run", str(study), "--out", str(out)],
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=20 * LIMIT_SECONDS,
            )
            total = time.time() - began
            cells = json.loads((out / "study.json").read_text())["cells"]
            seconds = [cell["elapsed_seconds"] for cell in cells]
            runs = [
                json.loads(path.read_text()) for path in sorted(out.glob("cells/*/result.json"))
            ]
            trained = [run["workers"][0]["wall_seconds"] for run in runs]
            print(
                f"{title}, {label}: a cell takes {_spread(seconds)}, its workers"
                f" {_spread(trained)}; first cell {seconds[0]:.2f} s;"
                f" study of {len(cells)} cells with its report {total:.1f} s",
                flush=True,
            )


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}–{max(seconds):.2f})"


if __name__ == "__main__":
    main()
