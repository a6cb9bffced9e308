"""The registry of synchronization strategies; strategy.py defines the contract.

Several strategies are presets of gradient averaging that differ in the all-reduce algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.errors import UserCodeError
from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.strategies.strategy import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry("strategy")

ALL_REDUCE = "all-reduce"
"""Tag of strategies that all-reduce the gradients in every iteration."""

_AVERAGING = "paceline.strategies.gradient_averaging:GradientAveraging"

STRATEGIES.register(
    "single", "paceline.strategies.strategy:SingleProcess", "one worker, no synchronization"
)
STRATEGIES.register(
    "gather_scatter",
    _AVERAGING,
    "rank 0 gathers, sums and broadcasts the gradients",
    algorithm="root",
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "allreduce",
    _AVERAGING,
    "the library's all-reduce, per tensor or flat",
    algorithm="library",
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "ring",
    _AVERAGING,
    "flat ring all-reduce",
    algorithm="ring",
    flat=True,
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "tree",
    _AVERAGING,
    "flat tree all-reduce",
    algorithm="tree",
    flat=True,
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "halving_doubling",
    _AVERAGING,
    "flat recursive halving and doubling",
    algorithm="halving_doubling",
    flat=True,
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "overlap",
    "paceline.strategies.overlap:Overlap",
    "all-reduce in buckets during the backward pass",
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "ddp", "paceline.strategies.ddp:Ddp", "PyTorch's DistributedDataParallel", tags=[ALL_REDUCE]
)
STRATEGIES.register(
    "shared",
    "paceline.strategies.shared.strategy:SharedWeights",
    "one copy of the weights per host, in shared memory",
)
STRATEGIES.register(
    "local_sgd",
    "paceline.strategies.local_sgd:LocalSgd",
    "local steps, then weight averaging",
)
STRATEGIES.register(
    "easgd",
    "paceline.strategies.easgd:Easgd",
    "local steps with elastic averaging around center weights",
)
STRATEGIES.register(
    "sharded",
    "paceline.strategies.sharded:Sharded",
    "optimizer state sharded across the workers (ZeRO)",
)
STRATEGIES.register(
    "fsdp",
    "paceline.strategies.fsdp:Fsdp",
    "PyTorch's fully_shard: weights sharded across the workers",
)
STRATEGIES.register(
    "parameter_server",
    "paceline.strategies.parameter_server.strategy:ParameterServer",
    "servers hold the weights, synchronous or asynchronous",
)

RENAMED = {
    "refusals": "check",
    "attach": "setup",
    "consensus": "eval_weights",
    "claim": "next_assignment",
    "lockstep": "synchronous",
    "equal": "replicas_equal",
    "most_workers": "max_world_size",
    "holds_all_weights": "checkpoint.has_full_weights",
    "model_state": "checkpoint.model_state_dict",
    "load_model_state": "checkpoint.load_model_state_dict",
    "optimizer_state": "checkpoint.optimizer_state_dict",
    "load_optimizer_state": "checkpoint.load_optimizer_state_dict",
    "notes": "meter.take",
    "account": "meter.summary",
    "settle_accounts": "meter.settle",
}
"""Former names of methods and attributes of strategies."""


def create_strategy(name: str, options: Mapping[str, str]) -> Strategy:
    """Create a registered or user-defined strategy; unknown options are errors."""
    # Not at the top of the file: listing the strategies must not import torch.
    from paceline.strategies.strategy import ServerStrategy, Strategy

    strategy_class = STRATEGIES.load_class(name, Strategy, "paceline.Strategy")
    # A method with a former name would never be called, and training would be silently wrong.
    former = [each for each in RENAMED if hasattr(strategy_class, each)]
    if former:
        changes = ", ".join(f"{each} to {RENAMED[each]}" for each in former)
        raise UserCodeError(f"strategy {name!r} uses names of an earlier version: rename {changes}")
    strategy = STRATEGIES.create(name, strategy_class, options)
    has_servers = hasattr(strategy, "serve") or not strategy.synchronous
    if has_servers and not isinstance(strategy, ServerStrategy):
        raise UserCodeError(
            f"strategy {name!r}: servers and asynchronous training need a subclass of"
            " paceline.strategies.strategy.ServerStrategy"
        )
    return strategy
