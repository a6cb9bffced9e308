"""Whether the post-mortem of `paceline profile` names the rank that stops training, and why.

    python benchmarks/planted_hangs.py [--faults stall,mismatch] [--seeds 20] [--limit SECONDS]
                                       [--out FILE]

Each run trains a small model on 2 or 3 ranks with gloo, and one rank stops it. The seed chooses the
rank, the step, the size of the model and how:

- stall: the rank sleeps, computes in a loop of Python, waits for a lock, or waits in its
  DataLoader. Right if the post-mortem names this rank as the missing one of all others, the
  collective that they wait in, and the function in which it stalls.
- mismatch: the rank calls an all-reduce of another size, or a broadcast instead. Right if the first
  mismatch has the number of this collective and the operation and size of every rank.

Results are appended to --out, one JSON line per run, and runs that it has are not repeated: with
--limit, all runs can be made in several parts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from paceline.report.wording.post_mortem import headline, lines

FAULTS = {
    "stall": ("sleep", "compute", "lock", "input"),
    "mismatch": ("size", "operation"),
}
HANG_SECONDS = 3.0
PATIENCE_SECONDS = 90.0

SCRIPT = """
import argparse, threading, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--kind")
for name in ("--rank", "--step", "--width"):
    parser.add_argument(name, type=int)
options = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
is_faulty = dist.get_rank() == options.rank

def sleep():
    time.sleep(1000)

def compute():
    while True:
        pass

def lock():
    threading.Lock().acquire() and threading.Event().wait()

class Samples(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if is_faulty and options.kind == "input" and index == 4 * options.step:
            time.sleep(1000)
        return torch.ones(options.width)

model = torch.nn.Linear(options.width, options.width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, inputs in enumerate(DataLoader(Samples(), batch_size=4)):
    if is_faulty and step == options.step and options.kind in ("sleep", "compute", "lock"):
        globals()[options.kind]()
    model(inputs).sum().backward()
    for parameter in model.parameters():
        gradient = parameter.grad
        if is_faulty and step == options.step and options.kind == "size":
            gradient = torch.zeros(2 * gradient.numel())
        if is_faulty and step == options.step and options.kind == "operation":
            dist.broadcast(gradient, options.rank)
        else:
            dist.all_reduce(gradient)
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Plant:
    fault: str
    seed: int
    kind: str
    rank: int
    world_size: int
    step: int
    width: int

    @classmethod
    def of_seed(cls, fault: str, seed: int) -> Plant:
        chosen = random.Random(f"{fault} {seed}")
        kinds = FAULTS[fault]
        world_size = chosen.choice((2, 3))
        return cls(
            fault,
            seed,
            kinds[seed % len(kinds)],
            chosen.randrange(world_size),
            world_size,
            chosen.randrange(3, 40),
            chosen.choice((8, 64, 256)),
        )

    @property
    def sequence(self) -> int:
        """Number of the first collective of the step: there are two per step."""
        return 2 * self.step

    @property
    def size_bytes(self) -> int:
        return 4 * self.width**2

    def is_named_by(self, report: dict[str, Any]) -> bool:
        if self.fault == "stall":
            return all(self._is_right(state) for state in report["ranks"])
        calls = {
            rank: ("all_reduce", self.size_bytes)
            if rank != self.rank
            else ("broadcast", self.size_bytes)
            if self.kind == "operation"
            else ("all_reduce", 2 * self.size_bytes)
            for rank in range(self.world_size)
        }
        named = [
            (
                one["sequence"],
                {call["rank"]: (call["operation"], call["bytes"]) for call in one["calls"]},
            )
            for one in report["mismatches"]
        ]
        return named[:1] == [(self.sequence, calls)]

    def _is_right(self, state: dict[str, Any]) -> bool:
        if state["rank"] == self.rank:
            function = "__getitem__" if self.kind == "input" else self.kind
            is_in_it = state["line"] is not None and state["line"].endswith(f" in {function}")
            return state["collective"] is None and is_in_it
        call = state["collective"]
        return call is not None and (
            call["operation"],
            call["sequence"],
            call["bytes"],
            call["missing_ranks"],
        ) == ("all_reduce", self.sequence, self.size_bytes, [self.rank])


def run_plant(plant: Plant, folder: Path) -> dict[str, Any]:
    """Run until the first post-mortem, then end the job."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    name = f"{plant.fault}-{plant.seed}"
    paceline = [sys.executable, "-m", "paceline", "profile", "--quiet", "--out", str(folder)]
    watched = [*paceline, "--name", name, "--hang-seconds", str(HANG_SECONDS), "--"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments = [f"--{key}={getattr(plant, key)}" for key in ("kind", "rank", "step", "width")]
    began = monotonic()
    process = subprocess.Popen(
        [*watched, *launcher, f"--nproc-per-node={plant.world_size}", str(script), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (folder / name / "post-mortem.json").exists() and process.poll() is None:
            if monotonic() - began > PATIENCE_SECONDS:
                break
            sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    result = json.loads((folder / name / "result.json").read_text())
    reports = result.get("post_mortem", [])
    return {
        **asdict(plant),
        "right": bool(reports) and plant.is_named_by(reports[0]),
        "seconds": round(monotonic() - began, 1),
        "text": [headline(reports[0]), *lines(reports[0])] if reports else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all runs")
    parser.add_argument("--out", type=Path, default=Path("planted_hangs.jsonl"))
    options = parser.parse_args()
    faults, began = options.faults.split(","), monotonic()
    known = options.out.read_text().splitlines() if options.out.exists() else []
    records = [json.loads(line) for line in known]
    done = {(one["fault"], one["seed"]) for one in records}
    plants = [Plant.of_seed(fault, seed) for seed in range(options.seeds) for fault in faults]
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        for plant in plants:
            if (plant.fault, plant.seed) in done:
                continue
            if monotonic() - began > options.limit:
                break
            records.append(run_plant(plant, Path(folder)))
            out.write(json.dumps(records[-1]) + "\n")
            out.flush()
            mark = "right" if records[-1]["right"] else f"WRONG {records[-1]['text']}"
            seconds = records[-1]["seconds"]
            print(f"{plant.fault} {plant.seed} ({plant.kind}): {mark} ({seconds} s)", flush=True)
    for fault in faults:
        own = [one["right"] for one in records if one["fault"] == fault]
        print(f"{fault}: {sum(own)} of {len(own)} right")


if __name__ == "__main__":
    main()
