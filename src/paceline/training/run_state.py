"""The state of a run: progress, model, optimizer, strategy and random generators of all ranks.

`gather` collects it for a checkpoint, and `restore` continues from it. Before any record changes,
`check_fits` checks that a checkpoint fits a run, and `changed_settings` lists what differs.
"""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.comm.communicator import Communicator
from paceline.comm.objects import gather_bytes, gather_json
from paceline.config import RunConfig, Switch, fields, flag_of, option_of, type_of
from paceline.config.conversion import convert
from paceline.errors import CheckpointError, ConfigError, error_line, whole_error_line
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.snapshot import cloned, without_copy

Account = dict[str, Any]
"""Measurements of one rank so far, as JSON values."""


@dataclass(slots=True)
class Progress:
    """How far a run has come: the part of a checkpoint that is not tensors."""

    iteration: int = 0
    steps: int = 0
    """Of this rank; equal to `iteration` unless parameter servers assign batches to idle ranks."""
    samples: int = 0
    """Of this rank."""
    samples_before: int = 0
    """Of all ranks, when the number of ranks last changed."""
    steps_before: int = 0
    """Of this rank, when the number of ranks last changed."""
    trained_seconds: float = 0.0
    """Since the first step, without evaluation; includes the time before a resume."""
    seconds_to_target: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


def gather(
    replica: Replica, strategy: Strategy, progress: Progress, account: Account
) -> dict[str, Any] | None:
    """Collect the state of all ranks on rank 0; other ranks return None. Collective."""
    communicator = replica.communicator
    model = strategy.checkpoint.model_state_dict()
    optimizer = strategy.checkpoint.optimizer_state_dict()
    strategies = _gather(communicator, strategy.state_dict())
    owns = _gather(communicator, _rank_state(replica))
    workers = gather_json(
        communicator, {"account": account, "progress": dataclasses.asdict(progress)}
    )
    if strategies is None or owns is None or workers is None:
        return None
    return {
        "model": model,
        "optimizer": optimizer,
        "scaler": replica.scaler.state_dict(),
        "strategies": strategies,
        "owns": owns,
        "random": random_state(_device(replica)),
        "workers": workers,
    }


def _gather(communicator: Communicator, state: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Collect a state of each rank on rank 0; other ranks return None. Collective."""
    if communicator.world_size == 1:
        # On its device: packing would wait for a GPU. Cloned, so that it shares no memory with the
        # model's state, in which case a checkpoint would hold one tensor for both.
        return [cloned(state)]
    packed = gather_bytes(communicator, _pack(without_copy(state)), "control")
    return None if packed is None else [_unpack(each) for each in packed]


def restore(
    state: dict[str, Any], replica: Replica, strategy: Strategy
) -> tuple[Progress, Account]:
    """Load a gathered state, so that the next step equals that of an uninterrupted run."""
    communicator = replica.communicator
    try:
        strategy.checkpoint.load_model_state_dict(state["model"])
        strategy.checkpoint.load_optimizer_state_dict(state["optimizer"])
        replica.scaler.load_state_dict(state["scaler"])
        _restore_strategy(state["strategies"], strategy, communicator)
        restore_random_state(state["random"], _device(replica), communicator.rank)
        _restore_rank_state(state.get("owns", []), replica)
        return _rank_progress(state["workers"], communicator)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        cause = whole_error_line(error)
        raise CheckpointError(f"the checkpoint does not fit this run: {cause}") from error


def _restore_strategy(
    states: list[dict[str, Any]], strategy: Strategy, communicator: Communicator
) -> None:
    # A resized run starts without the state of the earlier ranks.
    if len(states) == communicator.world_size:
        strategy.load_state_dict(states[communicator.rank])


def _rank_progress(
    workers: list[dict[str, Any]], communicator: Communicator
) -> tuple[Progress, Account]:
    if len(workers) == communicator.world_size:
        mine = workers[communicator.rank]
        return Progress(**mine["progress"]), mine["account"]
    # A resized run keeps iteration and history, and restarts samples and step times at zero. Steps
    # and phases continue for ranks that existed before.
    first = workers[0]["progress"]
    before = first.get("samples_before", 0) + sum(each["progress"]["samples"] for each in workers)
    had_rank = communicator.rank < len(workers)
    own = workers[communicator.rank] if had_rank else {**workers[0], "account": {}}
    steps = own["progress"]["steps"]
    reset = {"steps": steps, "steps_before": steps, "samples": 0, "samples_before": before}
    return Progress(**{**first, **reset}), own["account"]


def _rank_state(replica: Replica) -> dict[str, Any]:
    """Return what differs between ranks with equal weights: buffers such as batch-norm statistics,
    and random generators."""
    buffers = dict(replica.model.named_buffers())
    return {"buffers": buffers, "random": random_state(_device(replica))}


def _restore_rank_state(owns: list[dict[str, Any]], replica: Replica) -> None:
    communicator = replica.communicator
    # Otherwise all ranks continue with rank 0's.
    if len(owns) == communicator.world_size:
        own = owns[communicator.rank]
        for name, buffer in replica.model.named_buffers():
            buffer.copy_(own["buffers"][name])
        restore_random_state(own["random"], _device(replica), communicator.rank)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators that a rank on this device uses."""
    cpu = {"cpu": torch.get_rng_state()}
    return {**cpu, "gpu": torch.cuda.get_rng_state(device)} if device.type == "cuda" else cpu


def restore_random_state(state: dict[str, Any], device: torch.device, rank: int) -> None:
    """Restore the result of `random_state`, on any device and with any number of visible GPUs."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cuda":
        return
    gpu = state.get("gpu")
    # Older checkpoints hold a list instead: the states of all GPUs that were visible to the rank.
    if gpu is None and (gpus := state.get("gpus")):
        is_as_before = len(gpus) == torch.cuda.device_count()
        gpu = gpus[(device.index if is_as_before else rank) % len(gpus)]
    if gpu is not None:
        torch.cuda.set_rng_state(gpu, device)


def _device(replica: Replica) -> torch.device:
    return next(iter(replica.model.parameters())).device


def _pack(state: dict[str, Any]) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> dict[str, Any]:
    # On the CPU: another rank's device may not exist on this node.
    file = io.BytesIO(packed.numpy().tobytes())
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def check_fits(state: dict[str, Any], config: RunConfig, model: nn.Module) -> None:
    """Raise if this run cannot resume from a checkpoint; loads its weights into `model`.

    `changed_settings` warns about other settings that differ.
    """
    saved, settings = saved_settings(state), kept_settings(config)
    changed = [name for name, value in settings.items() if saved.get(name, value) != value]
    # The state of one optimizer does not fit another kind. Another strategy may fit: weights and
    # optimizer state have the layout of a single process.
    unusable = {"optimizer"}
    if config.precision == "fp16" and not state.get("scaler"):
        unusable.add("precision")
    mismatch = _load_weights(state.get("model", {}), model)
    if mismatch:
        unusable |= {"model", "model_options", "data"}
    problems = [
        f"{flag_of(name)} is {settings[name]!r} in config.json, but the checkpoint was written with"
        f" {saved[name]!r}: restore it"
        for name in changed
        if name in unusable
    ]
    if problems:
        raise ConfigError(problems)
    if mismatch:
        raise CheckpointError(
            f"the checkpoint does not fit model {config.model_text!r}: {mismatch}"
        )


def _load_weights(weights: dict[str, Any], model: nn.Module) -> str | None:
    """Return why the weights do not fit, or None."""
    try:
        model.load_state_dict(weights)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        # The first line of torch's message only says that there are errors.
        first, *details = str(error).splitlines() or [error_line(error)]
        return (details or [first])[0].strip()
    return None


def changed_settings(saved: dict[str, Any], config: RunConfig) -> list[str]:
    """Return one warning per setting that differs from the checkpoint's.

    `saved` are the settings of the checkpoint.
    """
    return [
        f"{flag_of(name)} is {value!r}, but the checkpoint was written with {saved[name]!r}:"
        " the weights will differ from those of a run that was never interrupted"
        for name, value in kept_settings(config).items()
        if name in saved and saved[name] != value
    ]


def saved_settings(state: dict[str, Any]) -> dict[str, Any]:
    """Return the `kept_settings` of a checkpoint; old checkpoints have none."""
    switches = {item.name for item in fields() if type_of(item) == Switch}
    return {
        # Older versions had true or false.
        name: convert(Switch, value) if name in switches else value
        for name, value in state.get("settings", {}).items()
    }


def kept_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that a resumed run must keep, by field name."""
    values = config.to_dict()
    kept = {
        item.name: values[item.name]
        for item in fields()
        if (option := option_of(item)).is_in_checkpoints and not option.mutable_on_resume
    }
    # --batch-size and --batch-per-worker can express the same global batch.
    return {**kept, "batch_size": config.global_batch_size}
