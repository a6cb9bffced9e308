"""`paceline train`: train a model."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

from paceline.cli.config_flags import add_config_flags, add_control_flags, given_flags
from paceline.config import RunConfig, from_mapping
from paceline.errors import ERROR_PREFIX, StoppedError
from paceline.launch import environment
from paceline.measure.startup import begin_command, importing
from paceline.records import RunFolder
from paceline.training.gpu import cuda_context

SUMMARY = "train a model and record metrics"


def configure(parser: argparse.ArgumentParser) -> None:
    # The default usage lists all flags, which fills a screen.
    parser.usage = "paceline train [flags]"
    add_config_flags(parser)
    add_control_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    values = given_flags(arguments)
    # Validate before importing torch, which takes two seconds.
    config = from_mapping({**_counts(), **values}) if arguments.resume is None else None
    begin_command()
    is_alone = config is not None and _trains_in_this_process(config)
    if is_alone:
        cuda_context.create_in_background()
    with importing():
        from paceline.launch import launcher
        from paceline.launch.fork_server import ForkServer
        from paceline.training.process import keep_freed_memory

    keep_freed_memory()
    # Before this process has threads; with a CUDA context its forks would be of no use.
    with (None if is_alone else ForkServer.fork()) or nullcontext() as fork_server:
        if config is None:
            outcome = launcher.resume(arguments.resume, values, arguments.quiet, fork_server)
        else:
            outcome = launcher.train(config, arguments.quiet, fork_server)
    if outcome.result is not None:
        # Imported after training, which would wait for it.
        from paceline.report.summary import print_summary
        from paceline.training.checkpoint import iterations

        folder = _unresolved(outcome.folder, arguments.resume)
        print_summary(folder, outcome.result)
        is_stopped = outcome.exit_code == StoppedError.exit_code
        if outcome.exit_code:
            prefix = "paceline: " if is_stopped else ERROR_PREFIX
            sys.stderr.write(f"{prefix}{outcome.result['cause']}\n")
        if is_stopped and iterations(folder.checkpoints):
            path = shlex.quote(str(folder.path))
            sys.stderr.write(f"paceline: resume with `paceline train --resume {path}`\n")
    return outcome.exit_code


def _trains_in_this_process(config: RunConfig) -> bool:
    """Return whether the run certainly needs no other process that trains, and may use a GPU."""
    starts_processes = config.hosts or config.cluster or config.elastic or config.launcher == "ray"
    is_worker = environment.detect() is not None
    return (
        config.device != "cpu"
        and config.workers == 1
        and config.strategy == "single"
        and not starts_processes
        and not is_worker
    )


def _unresolved(folder: RunFolder, resume_path: str | None) -> RunFolder:
    """Return the folder with the path of --resume, instead of the resolved one."""
    path = Path(resume_path) if resume_path else folder.path
    return RunFolder(path) if path.resolve() == folder.path.resolve() else folder


def _counts() -> dict[str, int]:
    """Return the number of nodes and workers under torchrun or srun."""
    rank_info = environment.detect()
    if rank_info is None:
        return {}
    return {"nnodes": rank_info.nnodes, "nproc_per_node": rank_info.local_world_size}
