"""`paceline slurm`: one run, as a batch job of SLURM."""

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

SUMMARY = "submit one run as a batch job of SLURM"

PASSED_ON = {
    "cpus_per_task": ("N", "CPU cores of each worker"),
    "gpus_per_node": ("N", "GPUs of each machine, one for each worker"),
    "time": ("TIME", "longest the job may take, as in 01:30:00; then it is stopped"),
    "partition": ("NAME", "partition to run in"),
    "account": ("NAME", "account to charge"),
}
"""Options of sbatch that have a flag of their own: metavar and meaning."""

TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|(?i:unlimited|infinite)")
"""All that sbatch takes: minutes with or without seconds is one of them."""

COUNTS = {"nnodes": "nodes", "nproc_per_node": "ntasks_per_node"}
"""Settings of a run that are options of sbatch here."""

NOT_HERE = ("node_rank", "master_addr", "master_port", "hosts", "cluster", "launcher", "elastic")
"""Settings that say where workers run and meet, which is SLURM's to say."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline slurm [flags of SLURM] [flags of train]"
    slurm = parser.add_argument_group("SLURM")
    slurm.add_argument("--nodes", metavar="N", help="machines that take part (default: 1)")
    slurm.add_argument(
        "--ntasks-per-node", metavar="N", help="workers on each machine (default: 1)"
    )
    for name, (metavar, meaning) in PASSED_ON.items():
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
        help="shell that comes before the run, as in 'module load cuda'; repeatable",
    )
    slurm.add_argument("--dry-run", action="store_true", help="only show the batch script")
    slurm.add_argument(
        "--wait", action="store_true", help="show the job's output until its end, and its outcome"
    )
    add_config_flags(parser)
    add_control_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    values = _with_counts(arguments, given_flags(arguments))
    # Refused before torch is loaded, which takes two seconds.
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
    script = slurm.batch_script(_request(arguments, config), folder, _words(arguments, folder))
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
    """The settings, with as many machines and workers as SLURM is asked for."""
    problems = [
        f"{flag_of(name)}: SLURM says where workers run and meet: leave it out"
        for name in NOT_HERE
        if name in values
    ]
    for name, option in COUNTS.items():
        asked = getattr(arguments, option)
        if asked is None:
            continue
        if not asked.isdecimal() or not asked.strip("0"):
            problems.append(f"{flag_of(option)}: must be a number above 0, got {shown(asked)}")
        elif values.setdefault(name, asked) != asked:
            problems.append(
                f"{flag_of(name)}: {flag_of(option)} is {bare(asked)}, got {bare(values[name])}"
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
        for name in PASSED_ON
        if (value := getattr(arguments, name)) is not None
    ]
    return Request(
        nodes=config.nnodes,
        ntasks_per_node=config.nproc_per_node,
        options=(*own, *(option.lstrip("-") for option in arguments.sbatch)),
        setup=tuple(arguments.setup),
    )


def _words(arguments: argparse.Namespace, folder: RunFolder) -> list[str]:
    """The flags of train: as they were given, but for what the job's script says elsewhere."""
    given = given_flags(arguments)
    words = to_argv({name: value for name, value in given.items() if name not in COUNTS})
    if arguments.quiet:
        words.append("--quiet")
    if arguments.resume is not None:
        return ["--resume", arguments.resume, *words]
    return words if "name" in given else [*words, "--name", folder.id]


def _wait(job: Job, folder: RunFolder, before: Result | None) -> int:
    """`before` is the result that a resumed run had already."""
    from paceline.launch.slurm import follow
    from paceline.launch.termination import Termination

    try:
        state = follow(job)
    except KeyboardInterrupt:
        raise StoppedError(f"job {job.id} goes on; `scancel {job.id}` would stop it") from None
    result = folder.read_result()
    if result is None or result == before:
        # Nobody trained; with --quiet or not, what was refused stands in the job's output.
        raise RunError(f"job {job.id} ended as {state} without a result: see {job.output}")
    if result["status"] == "finished":
        return 0
    code = StoppedError.exit_code if result["status"] == "stopped" else RunError.exit_code
    raise Termination(result["cause"], code, result["status"]).error()
