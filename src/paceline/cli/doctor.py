"""`paceline doctor`: what this machine supports, and what is missing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

SUMMARY = "show what this machine supports, and what is missing"

LEAST_TORCH = (2, 9)
LEAST_PYTHON = (3, 11)
LEAST_SHARED_MEMORY_BYTES = 512 << 20
"""A few copies of a model with 25 million parameters; containers often have 64 MiB."""

TOOLS = {
    "ssh": ("starting workers on other machines (--hosts)", "install an OpenSSH client"),
    "srun": ("starting workers under SLURM", "run on a SLURM cluster"),
    "tensorboard": ("viewing the scalars of a run", "pip install tensorboard"),
}
"""Optional programs: purpose and remedy."""
PACKAGES = {
    "ui": (("starlette", "uvicorn"), "paceline ui"),
    "ray": (("ray",), "--launcher ray"),
}
"""Optional extras of this package: modules and purpose."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Literal["ok", "absent", "problem"]
    fact: str
    advice: str = ""
    blocks_training: bool = False


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs", help="folder of runs")
    parser.add_argument("--data-dir", help="folder of datasets")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    findings = examine(Path(arguments.out), arguments.data_dir)
    can_train = not any(finding.blocks_training for finding in findings)
    if arguments.json:
        report = {"can_train": can_train, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _print(findings, can_train)
    return 0 if can_train else 1


def examine(out: Path, data_dir: str | None) -> list[Finding]:
    """Return all findings; requirements of training come first."""
    return [
        _python(),
        *_torch(),
        *_processor(),
        _shared_memory(),
        _loopback(),
        _output_folder(out),
        _measuring(),
        _emulated_cluster(),
        *_datasets(data_dir),
        *(_tool(name, purpose, remedy) for name, (purpose, remedy) in TOOLS.items()),
        *(_extra(name, modules, purpose) for name, (modules, purpose) in PACKAGES.items()),
        _compiler(),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        return Finding("python", "problem", version, "use Python 3.11 or newer", True)
    return Finding("python", "ok", version)


def _torch() -> Iterator[Finding]:
    """torch, its backends, and the GPUs that it sees."""
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Finding("torch", "problem", cause, "pip install torch", True)
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < LEAST_TORCH:
        wanted = ".".join(map(str, LEAST_TORCH))
        yield Finding(
            "torch", "problem", torch.__version__, f"install torch {wanted} or newer", True
        )
    else:
        yield Finding("torch", "ok", torch.__version__)
    has_distributed = distributed.is_available()
    if has_distributed and distributed.is_gloo_available():
        yield Finding("gloo", "ok", "workers can communicate over TCP")
    else:
        yield Finding(
            "gloo",
            "problem",
            "this torch has no gloo backend",
            "install a build of torch with it; until then only one worker can train",
        )
    nccl = has_distributed and distributed.is_nccl_available()
    yield from _gpus(torch.version.cuda, torch.cuda.device_count(), nccl)


def _gpus(cuda: str | None, usable: int, nccl: bool) -> Iterator[Finding]:
    from paceline.measure.gpus import describe_gpus
    from paceline.measure.machine import installed_version

    gpus = describe_gpus()
    if not gpus and not usable:
        yield Finding("gpu", "absent", "none: training runs on the CPU")
        return
    names = ", ".join(sorted({gpu["name"] or "unnamed" for gpu in gpus})) or "of unknown name"
    if cuda is None:
        advice = "install a CUDA build of torch to use them"
        yield Finding("gpu", "problem", f"{len(gpus)} ({names}), unused: torch is CPU-only", advice)
        return
    if not usable:
        advice = "compare the driver's version with what torch needs"
        yield Finding("gpu", "problem", f"{len(gpus)} ({names}), but torch can use none", advice)
        return
    yield Finding("gpu", "ok", f"{usable} usable ({names}), CUDA {cuda}")
    if nccl:
        yield Finding("nccl", "ok", "GPUs can communicate directly")
    else:
        yield Finding(
            "nccl", "absent", "GPUs communicate through gloo, slowly", "install torch with NCCL"
        )
    if installed_version("nvidia-ml-py") is None:
        yield Finding(
            "nvml", "absent", "needed for GPU use and power", "pip install 'paceline[gpu]'"
        )


def _processor() -> Iterator[Finding]:
    from paceline.measure.machine import (
        cores_usable,
        cpu_model,
        cpu_quota,
        memory_usable_bytes,
    )

    quota = cpu_quota()
    limit = "" if quota is None else f", quota of {quota:g}"
    yield Finding(
        "cores", "ok", f"{cores_usable()} usable of {os.cpu_count()}{limit} ({cpu_model()})"
    )
    yield Finding("memory", "ok", f"{_gibibytes(memory_usable_bytes())} usable")


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "absent", "needed for shared memory between workers", "mount it")
    fact = f"{_gibibytes(usage.free)} free"
    if usage.free < LEAST_SHARED_MEMORY_BYTES:
        advice = "make it larger (docker run --shm-size=2g) to share memory between workers"
        return Finding("/dev/shm", "problem", fact, advice)
    return Finding("/dev/shm", "ok", fact)


def _loopback() -> Finding:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        advice = "bring up the loopback interface: ip link set lo up"
        return Finding("loopback", "problem", str(error), advice)
    return Finding("loopback", "ok", "workers of this machine can connect on 127.0.0.1")


def _output_folder(out: Path) -> Finding:
    existing = next((folder for folder in (out, *out.absolute().parents) if folder.exists()), out)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".paceline-"):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        fact = f"cannot write to {existing}: {error.strerror}"
        return Finding("output folder", "problem", fact, "choose another with --out", True)
    return Finding("output folder", "ok", f"{out}: {_gibibytes(free)} free")


def _measuring() -> Finding:
    if Path("/proc/self/smaps_rollup").exists():
        return Finding("measuring", "ok", "CPU, memory, disk and network of the workers")
    return Finding("measuring", "absent", "memory with shared pages counted once: needs Linux 4.14")


def _emulated_cluster() -> Finding:
    from paceline.emulation.cluster import examine as examine_cluster
    from paceline.errors import ClusterError

    try:
        can = examine_cluster()
    except ClusterError as error:
        return Finding("cluster", "absent", "no emulated machines", str(error))
    who = "as root" if can.as_root else "in a user namespace"
    latency = f"latency by {can.latency}" if can.latency else "no latency: needs netem or gcc"
    if not can.has_quotas:
        advice = "run as root, or ask for a delegated control group"
        return Finding("cluster", "ok", f"{who}, {latency}, without CPU quotas", advice)
    return Finding("cluster", "ok", f"{who}, {latency}, with CPU quotas")


def _datasets(data_dir: str | None) -> Iterator[Finding]:
    from paceline.data import DATASETS
    from paceline.data.manifest import OFFICIAL_SETS, data_folder

    folder = data_folder(data_dir)

    yield Finding("data folder", "ok" if folder.is_dir() else "absent", str(folder))
    for entry in DATASETS:
        if entry.argument:
            continue
        official = OFFICIAL_SETS.get(entry.name)
        if official is None:
            yield Finding(f"data {entry.name}", "ok", "needs no files")
        elif official.is_in(folder):
            yield Finding(f"data {entry.name}", "ok", "files present")
        else:
            size = f"{official.download_bytes / 1e6:.0f} MB to download"
            advice = f"paceline data fetch {entry.name}"
            yield Finding(f"data {entry.name}", "absent", size, advice)


def _tool(name: str, purpose: str, remedy: str) -> Finding:
    # Also in the folder of this Python, which may not be on PATH.
    bin_folder = str(Path(sys.executable).parent)
    if shutil.which(name) or shutil.which(name, path=bin_folder):
        return Finding(name, "ok", f"for {purpose}")
    return Finding(name, "absent", f"needed for {purpose}", remedy)


def _extra(name: str, modules: Sequence[str], purpose: str) -> Finding:
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return Finding(name, "ok", f"for {purpose}")
    fact = f"needed for {purpose}: {' and '.join(missing)}"
    return Finding(name, "absent", fact, f"pip install 'paceline[{name}]'")


def _compiler() -> Finding:
    from paceline.emulation.latency import compiler

    purpose = "latency of emulated links where the kernel has no netem"
    if compiler():
        return Finding("C compiler", "ok", f"for {purpose}")
    return Finding("C compiler", "absent", f"needed for {purpose}", "install gcc")


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _print(findings: list[Finding], can_train: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from paceline.terminal import open_console

    colors = {"ok": "green", "absent": "yellow", "problem": "red"}
    table = Table(box=None, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("details and remedy", overflow="fold")
    for finding in findings:
        text = ": ".join(filter(None, (finding.fact, finding.advice)))
        # As Text, because rich would interpret markup in str.
        table.add_row(
            Text(finding.name), Text(finding.status, style=colors[finding.status]), Text(text)
        )
    console = open_console(max_columns=80)
    console.print(table)
    console.print()
    if can_train:
        console.print("Training can run here. Try: paceline demo")
    else:
        blocking = ", ".join(finding.name for finding in findings if finding.blocks_training)
        console.print(f"Training cannot run here until this is fixed: {blocking}")
