"""Everything that defines how a run goes on: gathered for a checkpoint, and taken back from one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline.errors import CheckpointError
from paceline.sync.replica import Replica
from paceline.sync.strategy import Strategy
from paceline.worker.loop import Progress


def gather(replica: Replica, strategy: Strategy, progress: Progress) -> dict[str, Any]:
    """Weights, optimiser, loss scale, strategy, random state and progress, as plain values."""
    return {
        "model": replica.model.state_dict(),
        "optimizer": replica.optimizer.state_dict(),
        "scaler": replica.scaler.state_dict(),
        "strategy": strategy.state_dict(),
        "random": _random_state(),
        "progress": dataclasses.asdict(progress),
    }


def restore(state: dict[str, Any], replica: Replica, strategy: Strategy) -> Progress:
    """Put a gathered state back, so that the next iteration is the one that would have followed."""
    try:
        replica.model.load_state_dict(state["model"])
        replica.optimizer.load_state_dict(state["optimizer"])
        replica.scaler.load_state_dict(state["scaler"])
        strategy.load_state_dict(state["strategy"])
        _restore_random_state(state["random"])
        return Progress(**state["progress"])
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        cause = str(error).splitlines()[0]
        raise CheckpointError(f"the checkpoint does not fit this model: {cause}") from error


def _random_state() -> dict[str, Any]:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "gpus": gpus}


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["gpus"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["gpus"])
