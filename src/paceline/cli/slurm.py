"""`paceline slurm`: train a model in a SLURM batch job."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

from paceline.cli.config_flags import add_config_flags, add_control_flags, given_flags
from paceline.config import RunConfig, flag_of, from_mapping, to_argv
from paceline.errors import ConfigError, RunError, StoppedError, bare, shown

if TYPE_CHECKING:
    from paceline.launch.slurm import Job, Request
    from paceline.records import Result, RunFolder

SUMMARY = "submit a run as a SLURM batch job"

SBATCH_FLAGS = {
    "cpus_per_task": ("N", "CPU cores per worker"),
    "gpus_per_node": ("N", "GPUs per node, one for each worker"),
    "time": ("TIME", "time limit of the job, as in 01:30:00"),
    "partition": ("NAME", "partition to run in"),
    "account": ("NAME", "account to charge"),
}
"""Options of sbatch with their own flag: metavar and meaning."""

TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|(?i:unlimited|infinite)")
"""The time formats of sbatch."""

COUNTS = {"nnodes": "nodes", "nproc_per_node": "ntasks_per_node"}
"""Settings of a run that are options of sbatch."""

SET_BY_SLURM = (
    "node_rank",
    "master_addr",
    "master_port",
    "hosts",
    "cluster",
    "launcher",
    "elastic",
)
"""Settings of placement and rendezvous, which SLURM determines."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline slurm [SLURM flags] [train flags]"
    slurm = parser.add_argument_group("SLURM")
    slurm.add_argument("--nodes", metavar="N", help="number of nodes (default: 1)")
    slurm.add_argument("--ntasks-per-node", metavar="N", help="workers per node (default: 1)")
    for name, (metavar, meaning) in SBATCH_FLAGS.items():
        slurm.add_argument(flag_of(name), metavar=metavar, help=meaning)
    slurm.add_argument(
        "--sbatch",
        metavar="OPTION",
        action="append",
        default=[],
        help="any other option of sbatch without its dashes, as in mem=8G; repeatable",
    )
    slurm.add_argument(
        "--setup",
        metavar="LINE",
        action="append",
        default=[],
        help="shell command before the run, as in 'module load cuda'; repeatable",
    )
    slurm.add_argument(
        "--dry-run", action="store_true", help="print the batch script without submitting it"
    )
    slurm.add_argument(
        "--wait",
        action="store_true",
        help="show the output of the job until it ends, and its outcome",
    )
    add_config_flags(parser)
    add_control_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    values = _with_counts(arguments, given_flags(arguments))
    # Validate before importing torch, which takes two seconds.
    config = from_mapping(values) if arguments.resume is None else None
    from paceline.launch import launcher, slurm
    from paceline.launch.validation import validate
    from paceline.records import RunFolder

    if config is None:
        folder, config = launcher.resumable(arguments.resume, values)
        validate(config)
    else:
        validate(config)
        folder = RunFolder.unused(config)
    script = slurm.batch_script(_request(arguments, config), folder, _train_argv(arguments, folder))
    if arguments.dry_run:
        sys.stdout.write(script)
        return 0
    before = folder.readable_result() if arguments.resume else None
    path = slurm.script_path(folder, resumed=arguments.resume is not None)
    job = slurm.submit(script, path, folder)
    sys.stdout.write(f"job {job.id}: script {path}, output {job.output}, records {folder.path}\n")
    sys.stdout.flush()
    return _wait(job, folder, before) if arguments.wait else 0


def _with_counts(arguments: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the number of nodes and workers of the job."""
    problems = [
        f"{flag_of(name)}: set by SLURM: omit it" for name in SET_BY_SLURM if name in values
    ]
    for name, option in COUNTS.items():
        requested = getattr(arguments, option)
        if requested is None:
            continue
        if not requested.isdecimal() or not requested.strip("0"):
            problems.append(f"{flag_of(option)}: must be a number above 0, got {shown(requested)}")
        elif values.setdefault(name, requested) != requested:
            problems.append(
                f"{flag_of(name)}: {flag_of(option)} is {bare(requested)}, got {bare(values[name])}"
            )
    if arguments.time is not None and not TIME.fullmatch(arguments.time):
        problems.append(
            "--time: must be minutes, hours:minutes:seconds or days-hours:minutes:seconds,"
            f" got {shown(arguments.time)}"
        )
    if problems:
        raise ConfigError(problems)
    return values


def _request(arguments: argparse.Namespace, config: RunConfig) -> Request:
    from paceline.launch.slurm import Request

    own = [
        f"{name.replace('_', '-')}={value}"
        for name in SBATCH_FLAGS
        if (value := getattr(arguments, name)) is not None
    ]
    return Request(
        nodes=config.nnodes,
        ntasks_per_node=config.nproc_per_node,
        options=(*own, *(option.lstrip("-") for option in arguments.sbatch)),
        setup=tuple(arguments.setup),
    )


def _train_argv(arguments: argparse.Namespace, folder: RunFolder) -> list[str]:
    """Return the train flags for the batch script, without those that srun sets."""
    flags = given_flags(arguments)
    argv = to_argv({name: value for name, value in flags.items() if name not in COUNTS})
    if arguments.quiet:
        argv.append("--quiet")
    if arguments.resume is not None:
        return ["--resume", arguments.resume, *argv]
    return argv if "name" in flags else [*argv, "--name", folder.id]


def _wait(job: Job, folder: RunFolder, before: Result | None) -> int:
    """Wait for the job; `before` is the previous result of a resumed run."""
    from paceline.launch.slurm import follow
    from paceline.launch.termination import Termination

    try:
        state = follow(job)
    except KeyboardInterrupt:
        raise StoppedError(f"job {job.id} continues; stop it with `scancel {job.id}`") from None
    result = folder.read_result()
    if result is None or result == before:
        # The run was rejected before training; the reason is in the output of the job.
        raise RunError(f"job {job.id} ended as {state} without a result: see {job.output}")
    if result["status"] == "finished":
        return 0
    code = StoppedError.exit_code if result["status"] == "stopped" else RunError.exit_code
    raise Termination(result["cause"], code, result["status"]).error()
