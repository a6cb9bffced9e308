"""Branches: short runs from a checkpoint of another run, with another batch size.

They show what a batch size costs at this point of training, without the assumptions of the gradient
noise scale; analysis/branched_check.py compares them. A branch continues with weights, optimizer
and sampling order of the checkpoint, so with the same batch size it is the run itself.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, from_mapping
from paceline.errors import CheckpointError, RunError
from paceline.launch import launcher
from paceline.measure.noise_scale import learning_rate_factor
from paceline.records import RunFolder
from paceline.training.checkpoint import Checkpoint, newest_checkpoint, write_checkpoint
from paceline.training.run_state import kept_settings

EVALUATIONS = 10
"""In each branch."""


def run_branches(
    path: str | Path,
    batch_sizes: list[int],
    samples: int,
    out: str | Path,
    noise_scale: float = math.inf,
) -> list[RunFolder]:
    """Train a branch of a run for each batch size, all with about as many samples.

    They start at the newest checkpoint, one after the other, and are recorded below `out`. With a
    noise scale, the learning rate is that of `paceline plan --advise`; otherwise it is scaled
    linearly (Adam: by the square root).
    """
    folder = RunFolder.open(path)
    checkpoint = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise CheckpointError(f"{path} has no checkpoint to branch from: use --checkpoint-every")
    config = folder.read_config()
    rate = float(checkpoint.state["optimizer"]["param_groups"][0]["lr"])
    base = config.global_batch_size
    return [
        _run(
            config,
            checkpoint,
            batch,
            rate * learning_rate_factor(batch, base, noise_scale, config.optimizer),
            samples,
            out,
        )
        for batch in batch_sizes
    ]


def _run(
    config: RunConfig,
    checkpoint: Checkpoint,
    batch: int,
    rate: float,
    samples: int,
    out: str | Path,
) -> RunFolder:
    first = round(checkpoint.iteration * config.global_batch_size / batch)
    steps = math.ceil(samples / batch)
    branch = _branch_config(config, batch, rate, first + steps, max(1, steps // EVALUATIONS))
    branch = dataclasses.replace(branch, out=str(out), name=f"batch-{batch}")
    folder = RunFolder.create(branch)
    folder.checkpoints.mkdir()
    write_checkpoint(folder.checkpoints, first, _branch_state(checkpoint.state, branch, first))
    outcome = launcher.resume(str(folder.path), {}, quiet=True)
    if outcome.exit_code:
        cause = outcome.result["cause"] if outcome.result else "no result"
        raise RunError(f"the branch with batch size {batch} failed: {cause}")
    return folder


def _branch_config(
    config: RunConfig, batch: int, rate: float, iterations: int, eval_every: int
) -> RunConfig:
    changes: dict[str, Any] = {
        "batch_size": batch,
        "batch_per_worker": None,
        "epochs": None,
        "iterations": iterations,
        "eval_every": eval_every,
        "target_accuracy": None,
        "target_loss": None,
        "lr": rate,
        "schedule": "constant",
        "lr_steps": [],
        "warmup_epochs": 0.0,
        "lr_scaling": "none",
        "checkpoint_every": "never",
        "tensorboard": False,
        "noise_every": "never",
        "trace": 0,
    }
    return from_mapping({**config.to_dict(), **changes})


def _branch_state(state: dict[str, Any], branch: RunConfig, first: int) -> dict[str, Any]:
    """The state of the checkpoint, at the iteration that its samples are with this batch size."""
    progress = {"iteration": first, "steps": first, "history": [], "seconds_to_target": None}
    workers = [
        {"account": {}, "progress": {**each["progress"], **progress}} for each in state["workers"]
    ]
    return {**state, "workers": workers, "settings": kept_settings(branch)}
