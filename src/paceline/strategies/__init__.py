"""Strategies by name: the ways of keeping replicas in step. An entry is a `Strategy` class.

`strategy.py` is the contract. Several names are presets of one class: gradient averaging with
another algorithm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.strategies.strategy import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry("strategy")

ALL_REDUCE = "all-reduce"
"""Tag of strategies that all-reduce the gradients in every iteration."""

_AVERAGING = "paceline.strategies.gradient_averaging:GradientAveraging"

STRATEGIES.register(
    "single", "paceline.strategies.strategy:SingleProcess", "one worker, nothing to keep in step"
)
STRATEGIES.register(
    "gather_scatter",
    _AVERAGING,
    "rank 0 gathers the gradients, sums them and sends them back",
    algorithm="root",
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "allreduce",
    _AVERAGING,
    "the library's all-reduce, tensor by tensor or flat",
    algorithm="library",
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "ring",
    _AVERAGING,
    "all gradients at once around a ring",
    algorithm="ring",
    flat=True,
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "tree",
    _AVERAGING,
    "all gradients at once up and down a tree",
    algorithm="tree",
    flat=True,
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "halving_doubling",
    _AVERAGING,
    "all gradients at once in pairs of halves",
    algorithm="halving_doubling",
    flat=True,
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "overlap",
    "paceline.strategies.overlap:Overlap",
    "buckets of gradients, during the backward pass",
    tags=[ALL_REDUCE],
)
STRATEGIES.register(
    "ddp", "paceline.strategies.ddp:Ddp", "PyTorch's own DistributedDataParallel", tags=[ALL_REDUCE]
)
STRATEGIES.register(
    "shared",
    "paceline.strategies.shared.strategy:SharedWeights",
    "one copy of the weights per host, in memory that its workers share",
)
STRATEGIES.register(
    "local_sgd",
    "paceline.strategies.local_sgd:LocalSgd",
    "steps of one's own, then the mean of weights",
)
STRATEGIES.register(
    "easgd", "paceline.strategies.easgd:Easgd", "steps of one's own, on a spring to a common centre"
)
STRATEGIES.register(
    "sharded", "paceline.strategies.sharded:Sharded", "optimizer state split over the workers"
)
STRATEGIES.register(
    "fsdp",
    "paceline.strategies.fsdp:Fsdp",
    "PyTorch's own fully_shard: weights split over the workers",
)
STRATEGIES.register(
    "parameter_server",
    "paceline.strategies.parameter_server.strategy:ParameterServer",
    "servers hold the weights, in step or not",
)
