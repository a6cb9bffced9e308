"""A part of a Ray cluster, claimed for a while: machines with free slots, and an actor on each.

The claimed machines of a Ray cluster, as a fleet that commands can be started on."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, cast

from paceline.child_process import pythonpath
from paceline.errors import PacelineError, RunError, UsageError
from paceline.launch.ray.cluster import HeadLostError, HeadMonitor, Say, ask_all, load
from paceline.launch.ray.process import LOST, PYTHON, NodeActor, RayProcess
from paceline.launch.remote.control_channel import NodeExit
from paceline.launch.remote.machines import describe_end

PREFERRED_SECONDS = 2.0
"""How long to hope for the machine that suits best; after that any will do."""
TELL_SECONDS = 3.0
"""After which those who wait for machines are told so."""
A_LITTLE = 0.001
"""Of the resource that stands for a machine, to be placed there."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
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
    """The handle of its actor, a `NodeActor`."""
    node_id: str
    address: str


@contextlib.contextmanager
def reserve_nodes(
    wanted: ResourceRequest, head: HeadMonitor, seconds: float, say: Say, first: str | None = None
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
def _placed(
    wanted: ResourceRequest, head: HeadMonitor, seconds: float, say: Say, first: str
) -> Iterator[Any]:
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
def _removed(group: Any, head: HeadMonitor) -> Iterator[None]:
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


def _wait(group: Any, wanted: ResourceRequest, head: HeadMonitor, seconds: float, say: Say) -> None:
    begun, is_told = monotonic(), False
    while not group.wait(timeout_seconds=0.5):
        _check(head, wanted)
        if monotonic() - begun > seconds:
            raise TooFewError(f"needs {wanted}; {_what_there_is(head.address)}")
        if not is_told and monotonic() - begun > TELL_SECONDS:
            say(f"waiting for {wanted}; {_what_there_is(head.address)}")
            is_told = True


def _check(head: HeadMonitor, wanted: ResourceRequest) -> None:
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


def _start_post(ray: ModuleType, group: Any, wanted: ResourceRequest, number: int) -> Any:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    options = {
        "num_cpus": wanted.slots,
        "num_gpus": wanted.gpus,
        "max_restarts": 0,
        "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number
        ),
    }
    return ray.remote(NodeActor).options(**options).remote()


ANSWER_SECONDS = 30.0
"""How long an actor may take for something small; the machine may have much else to do."""
PASSED_ON = ("PACELINE_", "OMP_", "MKL_")
"""Beginnings of the variables that processes get from here."""


class RayMachines:
    """`lost` has the nodes whose actor is gone."""

    python = PYTHON
    cluster_file = None

    def __init__(self, machines: Sequence[Machine], head: HeadMonitor) -> None:
        self.addresses = [machine.address for machine in machines]
        self.first_node_id = machines[0].node_id
        self._machines = machines
        self._head = head
        self._processes: list[tuple[int, RayProcess]] = []

    def free_port(self) -> int:
        """On the first machine."""
        first = self._machines[0]
        return int(self._ask([first.post.free_port.remote(first.address)])[0])

    def set_aside(self, path: Path, name: str) -> None:
        """On all machines, give a folder another name beside it, where it exists."""
        asked = [
            machine.post.set_aside.remote(str(path), name, str(Path.cwd()))
            for machine in self._machines
        ]
        self._ask(asked)

    def start(self, node: int, words: Sequence[str], given: bytes) -> subprocess.Popen[bytes]:
        machine, folder = self._machines[node], str(Path.cwd())
        process = RayProcess(machine.post, self._head, words, given, _variables(), folder)
        self._processes.append((node, process))
        # It has all that is asked of a process that a fleet starts.
        return cast("subprocess.Popen[bytes]", process)

    def explain(self, end: NodeExit) -> PacelineError:
        address = self.addresses[end.node]
        if end.code != LOST:
            return RunError(describe_end(end, address))
        return RunError(f"lost node {end.node} ({address}): {self._how_it_was_lost(end.node)}")

    @property
    def lost(self) -> list[int]:
        return sorted({node for node, process in self._processes if process.is_lost})

    def _ask(self, answers: list[Any]) -> list[Any]:
        return ask_all(answers, self._head, ANSWER_SECONDS)

    def _how_it_was_lost(self, node: int) -> str:
        if not self._head.answers():
            return "no answer"
        living = {each["NodeID"] for each in load().nodes() if each["Alive"]}
        if self._machines[node].node_id not in living:
            return "the machine left the Ray cluster"
        return "its Ray actor was killed"


def _variables() -> dict[str, str]:
    """What the processes' surroundings share with this one, whatever Ray was started with."""
    passed = {name: text for name, text in os.environ.items() if name.startswith(PASSED_ON)}
    return {**passed, "PYTHONPATH": pythonpath()}


@contextlib.contextmanager
def ray_machines(
    wanted: ResourceRequest, head: HeadMonitor, seconds: float, say: Say, first: str | None = None
) -> Iterator[RayMachines]:
    """Machines of the connected cluster, for as long as the block lasts."""
    with reserve_nodes(wanted, head, seconds, say, first) as machines:
        yield RayMachines(machines, head)
