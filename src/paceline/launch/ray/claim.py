"""A part of a Ray cluster, claimed for a while: machines with free slots, and an actor on each."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from types import ModuleType
from typing import Any

from paceline.errors import UsageError
from paceline.launch.ray.cluster import HeadLostError, Say, ask_all, load
from paceline.launch.ray.head import Head
from paceline.launch.ray.post import Post

PREFERRED_SECONDS = 2.0
"""How long to hope for the machine that suits best; after that any will do."""
TELL_SECONDS = 3.0
"""After which those who wait for machines are told so."""
A_LITTLE = 0.001
"""Of the resource that stands for a machine, to be placed there."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is claimed: as many machines, each with so many slots for workers."""

    machines: int
    slots: int
    gpus: int
    """On each machine."""

    def __str__(self) -> str:
        noun = "machine" if self.machines == 1 else "machines"
        each = "" if self.machines == 1 else " each"
        cpus = f"{self.slots} free CPU{'s' * (self.slots > 1)}"
        gpus = f" and {self.gpus} free GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        return f"{self.machines} {noun} with {cpus}{gpus}{each}"


class TooFewError(UsageError):
    """`situation` tells what is needed and what there is."""

    def __init__(self, situation: str) -> None:
        super().__init__(
            f"--launcher ray: {situation}: ask for fewer with --nnodes and --nproc-per-node, or"
            " add machines"
        )
        self.situation = situation


@dataclass(frozen=True, slots=True)
class Machine:
    """One that is claimed."""

    post: Any
    """The handle of its actor, a `Post`."""
    node_id: str
    address: str


@contextlib.contextmanager
def claimed(
    wanted: Wanted, head: Head, seconds: float, say: Say, first: str | None = None
) -> Iterator[list[Machine]]:
    """Inside, these machines' slots are ours, with an actor on each; refused if there are too few.

    Waits so long for machines to come or to get free. If it can be had, the machine `first`, or
    else this one, is the first of them, so that records need not travel.
    """
    ray = load()
    first = first or str(ray.get_runtime_context().get_node_id())
    posts: list[Any] = []
    with _placed(wanted, head, seconds, say, first) as group:
        try:
            posts += (_start_post(ray, group, wanted, number) for number in range(wanted.machines))
            told = ask_all([post.whereabouts.remote() for post in posts], head, seconds)
            machines = [Machine(post, *where) for post, where in zip(posts, told, strict=True)]
            yield sorted(machines, key=lambda machine: machine.node_id != first)
        finally:
            if head.answers():
                for post in posts:
                    ray.kill(post)


@contextlib.contextmanager
def _placed(wanted: Wanted, head: Head, seconds: float, say: Say, first: str) -> Iterator[Any]:
    """A placement group, ready, with a bundle for each machine."""
    util = importlib.import_module("ray.util")
    each = {"CPU": float(wanted.slots)} | ({"GPU": float(wanted.gpus)} if wanted.gpus else {})
    strategy = "STRICT_SPREAD" if wanted.machines > 1 else "PACK"
    others = [each] * (wanted.machines - 1)
    if machine := _resource_of(first, each):
        group = util.placement_group([{**each, machine: A_LITTLE}, *others], strategy=strategy)
        with _removed(group, head):
            if group.wait(timeout_seconds=PREFERRED_SECONDS):
                yield group
                return
    _check(head, wanted)
    group = util.placement_group([each, *others], strategy=strategy)
    with _removed(group, head):
        _wait(group, wanted, head, seconds, say)
        yield group


@contextlib.contextmanager
def _removed(group: Any, head: Head) -> Iterator[None]:
    """At the end of the block."""
    try:
        yield
    finally:
        if head.answers():
            importlib.import_module("ray.util").remove_placement_group(group)


def _resource_of(node_id: str, wanted: dict[str, float]) -> str | None:
    """The resource that only this machine has, if it lives and is large enough."""
    for node in load().nodes():
        has: dict[str, float] = node["Resources"]
        if node["NodeID"] == node_id and node["Alive"]:
            enough = all(has.get(kind, 0.0) >= amount for kind, amount in wanted.items())
            names = (name for name in has if name == f"node:{node['NodeManagerAddress']}")
            return next(names, None) if enough else None
    return None


def _wait(group: Any, wanted: Wanted, head: Head, seconds: float, say: Say) -> None:
    begun, is_told = monotonic(), False
    while not group.wait(timeout_seconds=0.5):
        _check(head, wanted)
        if monotonic() - begun > seconds:
            raise TooFewError(f"needs {wanted}; {_what_there_is(head.address)}")
        if not is_told and monotonic() - begun > TELL_SECONDS:
            say(f"waiting for {wanted}; {_what_there_is(head.address)}")
            is_told = True


def _check(head: Head, wanted: Wanted) -> None:
    """Without its head Ray would find no machine, and hang if it were asked."""
    if not head.answers():
        raise HeadLostError(head, f"was waiting for {wanted}")


def _what_there_is(at: str) -> str:
    ray = load()
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    kinds = ["CPU"] + ["GPU"] * any("GPU" in node for node in alive)
    parts = []
    for kind in kinds:
        each = "+".join(f"{node.get(kind, 0):g}" for node in alive)
        parts.append(f"{each} {kind}s, {free.get(kind, 0):g} free")
    noun = "machine" if len(alive) == 1 else "machines"
    return f"the Ray cluster at {at} has {len(alive)} {noun} ({'; '.join(parts)})"


def has_gpus(machines: int, each: int) -> bool:
    """Whether as many machines of the cluster have so many GPUs each, free or not."""
    nodes = [node["Resources"] for node in load().nodes() if node["Alive"]]
    return len([node for node in nodes if node.get("GPU", 0) >= each]) >= machines


def _start_post(ray: ModuleType, group: Any, wanted: Wanted, number: int) -> Any:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    options = {
        "num_cpus": wanted.slots,
        "num_gpus": wanted.gpus,
        "max_restarts": 0,
        "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number
        ),
    }
    return ray.remote(Post).options(**options).remote()
