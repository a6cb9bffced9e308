"""Whether `paceline profile` names the fault that a script has, and none if it has none.

    python benchmarks/planted_faults.py [--faults slow_rank,item] [--seeds 20] [--seconds 2.5]
                                        [--out FILE] [--limit SECONDS]

Each run trains a multilayer perceptron with DDP (gloo, two ranks of one thread) for a few seconds.
Its seed chooses the width of the model, the batch size, the rank of the fault and its severity:

- none: no fault. Right if no fault is named.
- slow_rank: forward and backward passes of one rank take 1.25 to 1.45 times as long.
- slow_input: the batches of one rank take 8 to 16 ms longer.
- item: every step calls `loss.item()`; with odd seeds after an all-reduce of the loss. A CPU does
  not run ahead of Python, so the first costs nothing: it is right to name it as a note.
- no_workers: a DataLoader without workers takes 15 to 30 ms for a batch, on both ranks.
- threads: each rank has 2 to 4 threads on two cores.

Right means that the planted fault is named with its kind, rank and line, and no other fault is,
except for CPU contention; `contention` in the records is the share of the CPU that other processes
used. Stalled ranks and mismatched collectives do not end: benchmarks/planted_hangs.py plants them.

Results are appended to --out, one JSON line per run, and runs that it has are not repeated: with
--limit, all 120 runs can be made in several parts. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline.analysis.contention import other_processes_share
from paceline.analysis.run import open_run
from paceline.analysis.script import findings as found
from paceline.analysis.script.findings import ScriptFinding, find_in_script, is_fault
from paceline.analysis.script.slow_rank import SlowRank, WaitsForCore
from paceline.report.wording.scripts import sentence, subject

SCRIPTS = Path(__file__).parent / "fault_scripts"
FAULTS = ("none", "slow_rank", "slow_input", "item", "no_workers", "threads")
SEVERITIES = {
    "none": (1.0, 1.0),
    "slow_rank": (1.25, 1.45),
    "slow_input": (8.0, 16.0),
    "item": (1.0, 1.0),
    "item_of_all": (1.0, 1.0),
    "no_workers": (15.0, 30.0),
    "threads": (2.0, 4.0),
}
COMPUTE = ("forward", "backward", "update")


@dataclass(frozen=True)
class Plant:
    fault: str
    seed: int
    rank: int
    severity: float
    width: int
    batch: int

    @classmethod
    def of_seed(cls, fault: str, seed: int) -> Plant:
        chosen = random.Random(f"{fault} {seed}")
        if fault == "item" and seed % 2:
            fault = "item_of_all"
        low, high = SEVERITIES[fault]
        return cls(
            fault,
            seed,
            chosen.randrange(2),
            round(chosen.uniform(low, high), 2),
            chosen.choice((512, 768, 1024)),
            chosen.choice((64, 96, 128)),
        )

    def arguments(self, seconds: float) -> list[str]:
        return [
            self.fault,
            f"--rank={self.rank}",
            f"--severity={self.severity}",
            f"--width={self.width}",
            f"--batch={self.batch}",
            f"--seconds={seconds}",
        ]

    def is_named_by(self, one: ScriptFinding) -> bool:
        match one:
            case SlowRank():
                if self.fault == "slow_rank":
                    return one.rank == self.rank and one.phase in COMPUTE
                return self.fault == "slow_input" and (one.rank, one.phase) == (self.rank, "input")
            case found.BlockingCall():
                names = {
                    "item": ("Tensor.item", "history.append(loss.item())"),
                    "item_of_all": ("dist.all_reduce", "dist.all_reduce(mean)"),
                }
                return (one.call, one.line.code) == names.get(self.fault)
            case found.NoLoaderWorkers():
                has_line = one.line is not None and "DataLoader(" in one.line.code
                return self.fault == "no_workers" and has_line
            case found.TooManyThreads():
                return self.fault == "threads" and one.threads == round(self.severity)
        return False

    def is_right(self, findings: list[ScriptFinding]) -> bool:
        # A rank that has no core is CPU contention, not a fault of the script.
        faults = [one for one in findings if is_fault(one) and not isinstance(one, WaitsForCore)]
        if self.fault == "none":
            return not faults
        wanted = [one for one in findings if self.is_named_by(one)]
        # The item of an all-reduced loss is a note beside the all-reduce.
        others = [one for one in faults if one not in wanted]
        return bool(wanted) and not others


def run_plant(plant: Plant, folder: Path, seconds: float) -> dict[str, Any]:
    began = perf_counter()
    paceline = [sys.executable, "-m", "paceline", "profile", "--quiet"]
    script = [sys.executable, str(SCRIPTS / "launch.py"), str(SCRIPTS / "train.py")]
    name = f"{plant.fault}-{plant.seed}"
    subprocess.run(
        [*paceline, "--out", folder, "--name", name, "--", *script, *plant.arguments(seconds)],
        check=True,
        timeout=120,
    )
    run = open_run(folder / name)
    findings = find_in_script(run)
    return {
        **asdict(plant),
        "right": plant.is_right(findings),
        "steps": run.iterations,
        "contention": other_processes_share(run),
        "seconds": round(perf_counter() - began, 1),
        "findings": [f"{subject(one)}: {sentence(one)}" for one in findings],
    }


def read_records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def print_counts(records: list[dict[str, Any]], faults: list[str]) -> None:
    for fault in faults:
        own = [one for one in records if one["plant"] == fault]
        right = sum(one["right"] for one in own)
        print(f"{fault}: {right} of {len(own)} right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.5, help="of training, for each run")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all runs")
    parser.add_argument("--out", type=Path, default=Path("planted_faults.jsonl"))
    parser.add_argument("--keep", type=Path, help="folder for the records of all runs")
    options = parser.parse_args()
    faults, began = options.faults.split(","), perf_counter()
    records = read_records(options.out)
    done = {(one["plant"], one["seed"]) for one in records}
    missing = [(fault, seed) for seed in range(options.seeds) for fault in faults]
    with tempfile.TemporaryDirectory() as temporary, options.out.open("a") as out:
        for fault, seed in missing:
            if (fault, seed) in done:
                continue
            if perf_counter() - began > options.limit:
                break
            plant = Plant.of_seed(fault, seed)
            record = run_plant(plant, options.keep or Path(temporary), options.seconds)
            records.append({"plant": fault, **record})
            out.write(json.dumps(records[-1]) + "\n")
            out.flush()
            mark = "right" if record["right"] else f"WRONG {record['findings']}"
            print(f"{plant.fault} {plant.seed}: {mark} ({record['seconds']} s)", flush=True)
    print_counts(records, faults)


if __name__ == "__main__":
    main()
