"""Training on one GPU: speed, exactness, busy share, measuring, start-up and exchange.

    python benchmarks/gpu.py --data-dir DIR [PART[:ROUNDS] ...] [--json FILE]

Parts, all by default, each in less than four minutes:

    epochs      seconds per epoch of ResNet-18 on CIFAR-10 with crop and flip, by batch size:
                paceline by default, compiled, eager, and eager in fp32 without
                channels-last, and the usual script (peer_scripts/train_resnet.py)
    equal       whether captured and eager training give the same weights, bit for bit
    gpt         step time, tokens/s and MFU of gpt-mini: paceline captured, compiled and eager,
                bare loops, and a script with torch.compile (peer_scripts/train_gpt.py)
    gpt_equal   `equal` for gpt-nano and gpt-micro
    resume      `equal` for a run that was killed and resumed, and one that was not
    small       steps per second of LeNet and an MLP, captured and eager
    busy        how busy the GPU is with ResNet-18 at batch 128, by NVML and by kernel time, and
                by how much the phases differ from the wall time
    measuring   step time with and without marks of the phase clock
    exchange    two workers that share the GPU: exchange through CUDA IPC and through gloo
    startup     from the command to the first step of a new process, by part
    checkpoint  how long a checkpoint blocks training, written in the background or not

A value is a median with its minimum and maximum. The GPU must be otherwise idle. The race to an
accuracy has a script of its own: benchmarks/cifar_race.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import paceline
from common.stats import min_max
from gpu_gpt import PEAK_FLOPS, BareLoop, PeerScript, flops_per_token, write_tokens
from paceline.config import from_mapping
from paceline.measure import phase_clock
from paceline.measure.machine import hardware, software
from paceline.records import read_lines

SCRIPTS = Path(__file__).parent / "peer_scripts"
TRAIN_SAMPLES = 50_000
LIMIT_SECONDS = 200.0
WINDOWS = 3
"""Intervals that are timed in a run, the first of them as warm-up."""

RESNET = {
    "model": "resnet18",
    "data": "cifar10",
    "augment": ["crop", "flip"],
    "lr": 0.05,
    "weight_decay": 5e-4,
    "device": "cuda",
    "tensorboard": False,
}
GPT_MINI = (6, 192)
"""Layers and width."""
GPT_TRAIN_TOKENS = 5_000_000
EAGER = {"cuda_graph": "off"}
FP32 = {**EAGER, "precision": "fp32", "channels_last": "off"}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "compiled": {"compile": True},
    "eager": EAGER,
    "fp32": FP32,
}
USUAL = "usual"
GOALS = {
    ("default", 32): 2.8,
    ("default", 128): 1.2,
    ("default", 512): 0.8,
    ("compiled", 32): 2.2,
    ("compiled", 128): 1.1,
    ("compiled", 512): 0.6,
}


@dataclass(frozen=True)
class Row:
    part: str
    case: str
    values: list[float]
    """One per repeat."""
    unit: str
    goal: str = ""
    note: str = ""

    def text(self) -> str:
        spec = ",.0f" if self.unit == "steps/s" else ".3g"
        shown = min_max(self.values, spec) if len(self.values) > 1 else f"{self.values[0]:{spec}}"
        return f"{self.part:<10} {self.case:<33} {shown:<18} {self.unit:<7} {self.goal}".rstrip()


@dataclass(frozen=True)
class Bench:
    data_dir: str
    folder: Path
    rounds: int
    batches: Sequence[int]
    variants: Sequence[str]
    steps: int
    gpt_sizes: Sequence[str]
    device: str

    def train(self, **settings: Any) -> tuple[dict[str, Any], Path]:
        """Train in this process; returns result.json and the run folder."""
        name = f"run-{time.time_ns()}"
        result = paceline.train(
            **{**RESNET, "device": self.device, "data_dir": self.data_dir, **settings},
            out=str(self.folder),
            name=name,
        )
        if result.get("status") != "finished":
            raise RuntimeError(f"{settings}: {result.get('cause')}")
        return result, self.folder / name

    def command(self, name: str, **settings: Any) -> list[str]:
        """The command line of a run."""
        merged = {**RESNET, "device": self.device, "data_dir": self.data_dir, **settings}
        flags = [f"--out={self.folder}", f"--name={name}", "--quiet"]
        for key, value in merged.items():
            flag = key.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags.append(f"--{flag}={','.join(value) if isinstance(value, list) else value}")
        return [sys.executable, "-m", "paceline", "train", *flags]


def graph_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """How the first worker ran its steps."""
    missing = {"captured": False, "reason": "not on a GPU", "capture_seconds": 0.0}
    graph: dict[str, Any] = result["workers"][0].get("cuda_graph", missing)
    return graph


def how(result: Mapping[str, Any]) -> str:
    """The numerical format that a run has chosen, and how its steps ran."""
    numerics, graph = result["workers"][0]["numerics"], graph_of(result)
    layout = "channels-last" if numerics["channels_last"] else "contiguous"
    steps = "captured" if graph["captured"] else f"eager ({graph['reason']})"
    return f"{numerics['precision']}, {layout}, {numerics['reason']}; {steps}"


def windows(result: Mapping[str, Any]) -> list[float]:
    """Training seconds between consecutive evaluations, which are not part of them."""
    seconds = [entry["seconds"] for entry in result["history"]]
    return [later - earlier for earlier, later in itertools.pairwise(seconds)]


def measure_epochs(bench: Bench) -> Iterator[Row]:
    """The first window of a run is warm-up. Slow variants have shorter windows than an epoch."""
    spent: dict[tuple[str, int], list[float]] = {}
    notes: dict[tuple[str, int], str] = {}
    for _ in range(bench.rounds):
        for variant in bench.variants:
            is_fast = variant in ("default", "compiled")
            steps = {
                batch: per_epoch(batch) if is_fast else min(per_epoch(batch), bench.steps)
                for batch in bench.batches
            }
            if variant == USUAL:
                found = _usual_windows(bench, steps)
            else:
                found = {}
                for batch, count in steps.items():
                    result, _ = bench.train(
                        **VARIANTS[variant],
                        batch_size=batch,
                        iterations=WINDOWS * count,
                        eval_every=count,
                        test_samples=1000,
                    )
                    found[batch] = windows(result)
                    notes[variant, batch] = how(result)
            for batch, seconds in found.items():
                values = [each * per_epoch(batch) / steps[batch] for each in seconds]
                spent.setdefault((variant, batch), []).extend(values)
                print(f"# batch {batch}, {variant}: {values}", file=sys.stderr, flush=True)
    for (variant, batch), values in spent.items():
        goal = GOALS.get((variant, batch))
        case, note = f"batch {batch}, {variant}", notes.get((variant, batch), "")
        yield Row("epochs", case, values, "s/epoch", f"<= {goal}" if goal else "", note)


def per_epoch(batch: int) -> int:
    return -(-TRAIN_SAMPLES // batch)


def _usual_windows(bench: Bench, steps: Mapping[int, int]) -> dict[int, list[float]]:
    command = [sys.executable, str(SCRIPTS / "train_resnet.py"), f"--data-dir={bench.data_dir}"]
    command += [f"--windows={WINDOWS}", *(f"{batch}:{count}" for batch, count in steps.items())]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    )
    return {
        batch: json.loads(line)["seconds"][1:]
        for batch, line in zip(steps, done.stdout.splitlines(), strict=True)
    }


def measure_equal(bench: Bench) -> Iterator[Row]:
    cases = itertools.product(
        ("lenet", "cnn", "vgg11", "resnet18"), ("sgd", "adamw"), ("fp32", "bf16")
    )
    for model, optimizer, precision in cases:
        yield _equality(
            bench,
            "equal",
            model=model,
            optimizer=optimizer,
            precision=precision,
            # Given, because two measurements may choose different formats.
            channels_last="on" if precision == "bf16" else "off",
            lr=1e-3 if optimizer == "adamw" else 0.02,
            batch_size=64,
            train_samples=64 * 12 + 40,
            test_samples=500,
        )


def _equality(bench: Bench, part: str, **settings: Any) -> Row:
    """Whether captured and eager training with these settings give the same weights."""
    short = {"iterations": 30, "sample_seconds": 0, **settings}
    captured, _ = bench.train(**short)
    eager, _ = bench.train(**short, cuda_graph="off")
    is_captured = graph_of(captured)["captured"]
    is_equal = captured["weights_sha256"] == eager["weights_sha256"]
    losses = [run["final"]["train_loss"] for run in (captured, eager)]
    note = "" if is_captured else f"not captured: {graph_of(captured)['reason']}"
    if not is_equal:
        note += f" training losses {losses}"
    case = ", ".join(str(settings[name]) for name in ("model", "optimizer", "precision"))
    return Row(part, case, [float(is_equal and is_captured)], "equal", "1", note)


def measure_gpt(bench: Bench) -> Iterator[Row]:
    for size in bench.gpt_sizes:
        batch, context = map(int, size.split("x"))
        yield from _gpt_steps(bench, batch, context)


def measure_gpt_equal(bench: Bench) -> Iterator[Row]:
    cases = itertools.product(("gpt-nano", "gpt-micro"), ("sgd", "adamw", "muon"), ("fp32", "bf16"))
    for model, optimizer, precision in cases:
        # Attention over several blocks of keys, whose gradients are added.
        settings = {**_gpt_settings(bench, 16, 1024), "train_samples": 16 * 12 + 10}
        yield _equality(
            bench, "gpt_equal", **{**settings, "model": model, "optimizer": optimizer},
            precision=precision,
        )  # fmt: skip


def _gpt_settings(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    return {
        "model": "gpt-mini",
        "data": "stories",
        "data_dir": str(bench.folder),
        "augment": [],
        "context": context,
        "batch_size": batch,
        "train_samples": max(batch, GPT_TRAIN_TOKENS // context),
        "test_samples": 32,
        "optimizer": "adamw",
        "lr": 1e-3,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "schedule": "cosine",
    }


def _gpt_steps(bench: Bench, batch: int, context: int) -> Iterator[Row]:
    """All contenders take turns in each round; paceline by default chooses its precision."""
    settings, steps = _gpt_settings(bench, batch, context), bench.steps
    config = from_mapping(settings)
    device = torch.device(bench.device)
    bare = {"bare loop": BareLoop(config, device)}
    if device.type == "cuda":
        bare["bare captured loop"] = BareLoop(config, device, captured=True)
    tokens = bench.folder / f"tokens-{context}"
    write_tokens(config, tokens)
    spent: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    with PeerScript.running(tokens, batch, context, bench.device) as peer:
        contenders: dict[str, BareLoop | PeerScript] = {**bare, USUAL: peer}
        # The first steps compile the model and initialize libraries.
        for contender in contenders.values():
            contender.seconds(steps)
        for _ in range(bench.rounds):
            for variant in (name for name in VARIANTS if name in bench.variants):
                precision = {} if variant == "default" else {"precision": "bf16"}
                result, _ = bench.train(
                    **{**settings, **precision, **VARIANTS[variant]},
                    iterations=WINDOWS * steps, eval_every=steps,
                )  # fmt: skip
                spent.setdefault(variant, []).extend(windows(result))
                notes[variant] = how(result)
            for name, contender in contenders.items():
                measured = [contender.seconds(steps) for _ in range(WINDOWS - 1)]
                spent.setdefault(name, []).extend(measured)
    case = f"{batch}x{context}"
    parameters = bare["bare loop"].parameters
    flops = batch * context * flops_per_token(parameters, *GPT_MINI, context)
    for name, seconds in spent.items():
        each = [1e3 * window / steps for window in seconds]
        per_second = 1e3 / statistics.median(each)
        note = f"{batch * context * per_second:,.0f} tokens/s"
        note += f", {100 * flops * per_second / PEAK_FLOPS:.2f}% MFU"
        if name in notes:
            note += f"; {notes[name]}"
        yield Row("gpt", f"{case}, {name}", each, "ms", note=note)
    for ours, other, goal in (
        ("eager", "bare loop", "<= 1.03"),
        ("default", "bare captured loop", "<= 1.03"),
        ("default", USUAL, "<= 1"),
    ):
        if ours in spent and other in spent:
            ratios = [one / two for one, two in zip(spent[ours], spent[other], strict=True)]
            yield Row("gpt", f"{case}, {ours} / {other}", ratios, "times", goal)


def measure_resume(bench: Bench) -> Iterator[Row]:
    """Kill with SIGKILL after the second checkpoint, then resume."""
    for mode in ("sync", "background"):
        settings = {
            "precision": "bf16",
            "channels_last": "on",
            "batch_size": 128,
            "iterations": 1200,
            "checkpoint_every": 100,
            "checkpoint_mode": mode,
            "eval_every": "never",
            "test_samples": 1000,
        }
        whole, _ = bench.train(**settings)
        name = f"killed-{mode}"
        process = subprocess.Popen(bench.command(name, **settings))
        checkpoints = bench.folder / name / "checkpoints"
        deadline = time.monotonic() + LIMIT_SECONDS / 4
        # The checksum of a checkpoint is written before the file gets its name.
        while not list(checkpoints.glob("iteration-*200.pt")):
            if process.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = sorted(int(path.stem.partition("-")[2]) for path in checkpoints.glob("*.pt"))
        is_killed = not (bench.folder / name / "result.json").exists()
        resume = [sys.executable, "-m", "paceline", "train", "--quiet", "--resume"]
        subprocess.run(
            [*resume, str(bench.folder / name)],
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
            check=True,
        )
        result = json.loads((bench.folder / name / "result.json").read_text())
        is_captured = graph_of(result)["captured"]
        is_equal = result["weights_sha256"] == whole["weights_sha256"]
        note = f"killed: {is_killed}, captured: {is_captured}, checkpoints {kept}"
        values = [float(is_equal and is_killed and is_captured)]
        yield Row("resume", f"{mode} checkpoints", values, "equal", "1", note)


def measure_small(bench: Bench) -> Iterator[Row]:
    for model in ("lenet", "mlp"):
        rates: dict[str, list[float]] = {"captured": [], "eager": []}
        for _ in range(bench.rounds):
            for variant, found in rates.items():
                # As many steps as take about a second.
                steps = 4000 if variant == "captured" else 500
                result, _ = bench.train(
                    model=model,
                    batch_size=64,
                    iterations=WINDOWS * steps,
                    eval_every=steps,
                    test_samples=1000,
                    **(EAGER if variant == "eager" else {}),
                )
                found.extend(steps / seconds for seconds in windows(result))
        for variant, found in rates.items():
            yield Row("small", f"{model}, {variant}", found, "steps/s")
        ratios = [one / other for one, other in zip(*rates.values(), strict=True)]
        yield Row("small", f"{model}, captured / eager", ratios, "times", ">= 3")


def measure_busy(bench: Bench) -> Iterator[Row]:
    """Also compares the phases in the events of a rank with the times at which it wrote them."""
    for variant in ("default", "eager"):
        iterations = 5 * per_epoch(128) if variant == "default" else 250
        result, folder = bench.train(
            **VARIANTS[variant], batch_size=128, iterations=iterations, eval_every="never",
            test_samples=1000, trace=50, sample_seconds=0.2,
        )  # fmt: skip
        worker, goal = result["workers"][0], ">= 85" if variant == "default" else ""
        step = worker["iteration_seconds"]["median"]
        (gpu, *_) = result["nodes"][0]["gpus"] or [{}]
        if (busy := gpu.get("utilisation_percent_training_mean")) is not None:
            yield Row("busy", f"{variant}, NVML in training", [busy], "%", goal)
        if (traced := worker["kernel_time"]) is not None:
            each = traced["seconds"] / traced["iterations"]
            share = 100 * traced["seconds"] / traced["window_seconds"]
            yield Row("busy", f"{variant}, kernel time, traced", [share], "%", goal)
            note = f"{1e3 * each:.3f} ms of kernels in a median step of {1e3 * step:.3f} ms"
            case = f"{variant}, kernel time / step"
            yield Row("busy", case, [100 * each / step], "%", goal, note)
        blocks = [
            (event["time"], sum(event["phases"].values()))
            for event in read_lines(folder / "events-0.jsonl")
            if event.get("event") == "iterations"
        ]
        (began, before), (ended, after) = blocks[0], blocks[-1]
        deviation = 100 * abs((after - before) / (ended - began) - 1)
        note = f"over {ended - began:.1f} s with {result['iterations']} iterations"
        yield Row("busy", f"{variant}, phases vs wall time", [deviation], "%", "<= 1", note)


def measure_measuring(bench: Bench) -> Iterator[Row]:
    """In alternation, with a step of about a millisecond."""
    steps = 500
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(bench.rounds):
        for has_marks, found in seconds.items():
            with _marks(has_marks):
                result, _ = bench.train(
                    batch_size=32,
                    model_options={"width": "0.5"},
                    iterations=WINDOWS * steps,
                    eval_every=steps,
                    test_samples=1000,
                )
            found.extend(each / steps for each in windows(result))
            if has_marks:
                stated = 100 * result["measurement_overhead"]["in_loop"]
    pairs = zip(seconds[True], seconds[False], strict=True)
    cost = [100 * (marked / plain - 1) for marked, plain in pairs]
    step = 1e3 * statistics.median(seconds[False])
    note = f"step of {step:.3f} ms without marks; result.json states {stated:.2f}%"
    yield Row("measuring", "marks of the phase clock", cost, "%", "<= 1", note)


@contextmanager
def _marks(has_marks: bool) -> Iterator[None]:
    clock_class = phase_clock.CudaPhaseClock
    if not has_marks:
        phase_clock.CudaPhaseClock = UnmarkedClock  # type: ignore[misc]
    try:
        yield
    finally:
        phase_clock.CudaPhaseClock = clock_class  # type: ignore[misc]


class UnmarkedClock(phase_clock.CudaPhaseClock):
    """Measures in the time of the program, so that nothing is recorded on the GPU."""

    enter = phase_clock.PhaseClock.enter
    arrive = phase_clock.PhaseClock.arrive
    begin_step = phase_clock.PhaseClock.begin_step
    end_step = phase_clock.PhaseClock.end_step
    end_exposed = phase_clock.PhaseClock.end_exposed
    settle_ready = phase_clock.PhaseClock.settle_ready
    _settle = phase_clock.PhaseClock._settle

    @contextmanager
    def capture(self) -> Iterator[phase_clock.CapturedMarks]:
        phase = self.phase
        yield phase_clock.CapturedMarks()
        self.phase = phase

    def before_replay(self, captured: phase_clock.CapturedMarks) -> None: ...

    def replayed(self, captured: phase_clock.CapturedMarks) -> None: ...


def measure_exchange(bench: Bench) -> Iterator[Row]:
    """By benchmarks/gpu_exchange.py, which alternates both transports in the same two processes."""
    file = bench.folder / "exchange.json"
    command = [sys.executable, str(Path(__file__).with_name("gpu_exchange.py")), f"--json={file}"]
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS, check=True)
    measured = json.loads(file.read_text())
    for row in measured["all_reduce"]:
        alone = row["alone"]
        ratios = [one / other for one, other in zip(alone["gloo"], alone["ipc"], strict=True)]
        spent = {name: 1e3 * statistics.median(seconds) for name, seconds in alone.items()}
        note = f"{spent['ipc']:.3f} ms through CUDA IPC, {spent['gloo']:.3f} ms through gloo"
        case = f"{row['bytes'] / 2**20:g} MiB, gloo / IPC"
        yield Row("exchange", case, ratios, "times", ">= 3", note)
    for name, seconds in measured["steps"].items():
        values = [1e3 * each for each in seconds]
        yield Row("exchange", f"ResNet-18 step, {name}", values, "ms")


def measure_startup(bench: Bench) -> Iterator[Row]:
    """Of new processes. The first run fills the caches of Python and Triton, and counts apart."""
    spent: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    caches = {"PYTHONPYCACHEPREFIX": "bytecode", "TRITON_CACHE_DIR": "triton"}
    environment = {**os.environ, **{key: str(bench.folder / it) for key, it in caches.items()}}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in range(bench.rounds + 1):
        name = f"cold-{number}"
        settings = {"batch_size": 128, "iterations": 40, "test_samples": 1000}
        began = time.time()
        subprocess.run(
            bench.command(name, **settings),
            env=environment,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
            check=True,
        )
        whole = time.time() - began
        folder = bench.folder / name
        result = json.loads((folder / "result.json").read_text())
        worker = result["workers"][0]
        parts = worker["startup_seconds"]
        parts["to the first step"] = sum(parts.values())
        parts["first step"] = worker["iteration_seconds"]["first"]
        parts["capturing"] = graph_of(result)["capture_seconds"]
        parts["whole command"] = whole
        if not number:
            first = parts
            continue
        for part, seconds in parts.items():
            spent.setdefault(part, []).append(seconds)
    for part, values in spent.items():
        yield Row("startup", part, values, "s")
    for part in ("to the first step", "first step", "whole command"):
        yield Row("startup", f"{part}, empty caches", [first[part]], "s")


def measure_checkpoint(bench: Bench) -> Iterator[Row]:
    for mode in ("sync", "background"):
        result, _ = bench.train(
            batch_size=128, iterations=1000, checkpoint_every=200, checkpoint_mode=mode,
            eval_every="never", test_samples=1000,
        )  # fmt: skip
        checkpoints = result["checkpoints"]
        blocked = checkpoints["blocked_seconds"] / checkpoints["count"]
        memory = checkpoints["extra_gpu_memory_bytes"] / 2**20
        phase = result["workers"][0]["phases"]["checkpoint"] / checkpoints["count"]
        note = f"{memory:.0f} MiB of GPU memory; phase {1e3 * phase:.1f} ms each"
        yield Row("checkpoint", f"{mode}, blocked each", [1e3 * blocked], "ms", "", note)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "epochs": measure_epochs,
    "equal": measure_equal,
    "gpt": measure_gpt,
    "gpt_equal": measure_gpt_equal,
    "resume": measure_resume,
    "small": measure_small,
    "busy": measure_busy,
    "measuring": measure_measuring,
    "exchange": measure_exchange,
    "startup": measure_startup,
    "checkpoint": measure_checkpoint,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--data-dir", default=os.environ.get("PACELINE_DATA", ""))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="32,128,512")
    parser.add_argument("--variants", default=",".join([*VARIANTS, USUAL]))
    parser.add_argument("--steps", type=int, default=200, help="in a window of a slow variant")
    parser.add_argument("--gpt-sizes", default="64x256,16x1024", help="windows x tokens in each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="also write all rows to a file")
    arguments = parser.parse_args()
    rounds = {
        name: int(count or arguments.rounds)
        for name, _, count in (part.partition(":") for part in arguments.parts or PARTS)
    }
    if unknown := set(rounds) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    machine = {"hardware": hardware(), "software": software()}
    gpus = ", ".join(str(gpu["name"]) for gpu in machine["hardware"]["gpus"])
    print(f"{gpus or 'no GPU'}, torch {machine['software']['torch']}, {time.strftime('%F %R')}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as folder:
        bench = Bench(
            arguments.data_dir,
            Path(folder),
            arguments.rounds,
            [int(size) for size in arguments.batches.split(",")],
            arguments.variants.split(","),
            arguments.steps,
            arguments.gpt_sizes.split(","),
            arguments.device,
        )
        for part, count in rounds.items():
            began = time.monotonic()
            try:
                for row in PARTS[part](replace(bench, rounds=count)):
                    rows.append(row)
                    print(row.text() + (f"\n{'':11}{row.note}" if row.note else ""), flush=True)
            # One part that fails must not hide the others.
            except Exception as error:  # noqa: BLE001
                print(f"{part:<10} failed: {error}", flush=True)
            print(f"# {part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if arguments.json:
                content = {**machine, "rows": [asdict(row) for row in rows]}
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
