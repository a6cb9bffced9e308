"""Machines of a Ray cluster, reserved by a placement group, with an actor on each.

`ray_machines` yields them as `Machines` (launch/remote/machines.py) on which commands can start.
"""

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
from paceline.launch.remote.machines import describe_node_exit

PREFERRED_SECONDS = 2.0
"""How long to wait for the preferred first machine; after that any machine is used."""
REPORT_SECONDS = 3.0
"""After which the user learns that the run waits for machines."""
PLACEMENT_AMOUNT = 0.001
"""Amount of a machine's own resource, to be placed on that machine."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Machines to reserve, each with slots for its workers."""

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
    """Not enough resources; `situation` says what is needed and what is available."""

    def __init__(self, situation: str) -> None:
        super().__init__(
            f"--launcher ray: {situation}: reduce --nnodes or --nproc-per-node, or add machines"
        )
        self.situation = situation


@dataclass(frozen=True, slots=True)
class Machine:
    """A reserved machine."""

    actor: Any
    """The handle of its `NodeActor`."""
    node_id: str
    address: str


@contextlib.contextmanager
def reserve_nodes(
    request: ResourceRequest, head: HeadMonitor, seconds: float, say: Say, first: str | None = None
) -> Iterator[list[Machine]]:
    """Reserve machines for the duration of the block, with an actor on each.

    Waits up to `seconds` for machines; TooFewError if there are not enough. If possible, the
    machine `first`, otherwise this one, is the first of them, so that records stay on it.
    """
    ray = load()
    first = first or str(ray.get_runtime_context().get_node_id())
    actors: list[Any] = []
    with _placed(request, head, seconds, say, first) as group:
        try:
            actors += (
                _start_actor(ray, group, request, number) for number in range(request.machines)
            )
            infos = ask_all([actor.node_info.remote() for actor in actors], head, seconds)
            machines = [Machine(actor, *where) for actor, where in zip(actors, infos, strict=True)]
            yield sorted(machines, key=lambda machine: machine.node_id != first)
        finally:
            if head.answers():
                for actor in actors:
                    ray.kill(actor)


@contextlib.contextmanager
def _placed(
    request: ResourceRequest, head: HeadMonitor, seconds: float, say: Say, first: str
) -> Iterator[Any]:
    """A placement group with a bundle for each machine, once it is ready."""
    util = importlib.import_module("ray.util")
    each = {"CPU": float(request.slots)} | ({"GPU": float(request.gpus)} if request.gpus else {})
    strategy = "STRICT_SPREAD" if request.machines > 1 else "PACK"
    others = [each] * (request.machines - 1)
    if machine := _resource_of(first, each):
        group = util.placement_group(
            [{**each, machine: PLACEMENT_AMOUNT}, *others], strategy=strategy
        )
        with _removed(group, head):
            if group.wait(timeout_seconds=PREFERRED_SECONDS):
                yield group
                return
    _check(head, request)
    group = util.placement_group([each, *others], strategy=strategy)
    with _removed(group, head):
        _wait(group, request, head, seconds, say)
        yield group


@contextlib.contextmanager
def _removed(group: Any, head: HeadMonitor) -> Iterator[None]:
    """Remove the placement group at the end of the block."""
    try:
        yield
    finally:
        if head.answers():
            importlib.import_module("ray.util").remove_placement_group(group)


def _resource_of(node_id: str, amounts: dict[str, float]) -> str | None:
    """The resource that only this machine has, if it is alive and large enough."""
    for node in load().nodes():
        has: dict[str, float] = node["Resources"]
        if node["NodeID"] == node_id and node["Alive"]:
            enough = all(has.get(kind, 0.0) >= amount for kind, amount in amounts.items())
            names = (name for name in has if name == f"node:{node['NodeManagerAddress']}")
            return next(names, None) if enough else None
    return None


def _wait(
    group: Any, request: ResourceRequest, head: HeadMonitor, seconds: float, say: Say
) -> None:
    began, is_reported = monotonic(), False
    while not group.wait(timeout_seconds=0.5):
        _check(head, request)
        if monotonic() - began > seconds:
            raise TooFewError(f"needs {request}; {_available(head.address)}")
        if not is_reported and monotonic() - began > REPORT_SECONDS:
            say(f"waiting for {request}; {_available(head.address)}")
            is_reported = True


def _check(head: HeadMonitor, request: ResourceRequest) -> None:
    """Without its head, Ray finds no machine and calls to it hang."""
    if not head.answers():
        raise HeadLostError(head, f"was waiting for {request}")


def _available(at: str) -> str:
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
    """Whether this many machines of the cluster have `each` GPUs, free or not."""
    nodes = [node["Resources"] for node in load().nodes() if node["Alive"]]
    return len([node for node in nodes if node.get("GPU", 0) >= each]) >= machines


def _start_actor(ray: ModuleType, group: Any, request: ResourceRequest, number: int) -> Any:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    options = {
        "num_cpus": request.slots,
        "num_gpus": request.gpus,
        "max_restarts": 0,
        "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number
        ),
    }
    return ray.remote(NodeActor).options(**options).remote()


ANSWER_SECONDS = 30.0
"""How long an actor may take for a short call; the machine may be busy."""
INHERITED = ("PACELINE_", "OMP_", "MKL_")
"""Prefixes of environment variables that processes get from this one."""


class RayMachines:
    """Reserved machines as `Machines`; `lost` lists the nodes whose actor is gone."""

    python = PYTHON
    cluster_file = None

    def __init__(self, machines: Sequence[Machine], head: HeadMonitor) -> None:
        self.addresses = [machine.address for machine in machines]
        self.first_node_id = machines[0].node_id
        self._machines = machines
        self._head = head
        self._processes: list[tuple[int, RayProcess]] = []

    def free_port(self) -> int:
        """A free TCP port on the first machine."""
        first = self._machines[0]
        return int(self._ask([first.actor.free_port.remote(first.address)])[0])

    def set_aside(self, path: Path, name: str) -> None:
        """Rename a folder on all machines on which it exists."""
        asked = [
            machine.actor.set_aside.remote(str(path), name, str(Path.cwd()))
            for machine in self._machines
        ]
        self._ask(asked)

    def start(self, node: int, argv: Sequence[str], request: bytes) -> subprocess.Popen[bytes]:
        machine, folder = self._machines[node], str(Path.cwd())
        process = RayProcess(machine.actor, self._head, argv, request, _variables(), folder)
        self._processes.append((node, process))
        # It has the attributes of Popen that launch/remote/ uses.
        return cast("subprocess.Popen[bytes]", process)

    def explain(self, end: NodeExit) -> PacelineError:
        address = self.addresses[end.node]
        if end.code != LOST:
            return RunError(describe_node_exit(end, address))
        return RunError(f"lost node {end.node} ({address}): {self._cause_of_loss(end.node)}")

    @property
    def lost(self) -> list[int]:
        return sorted({node for node, process in self._processes if process.is_lost})

    def _ask(self, answers: list[Any]) -> list[Any]:
        return ask_all(answers, self._head, ANSWER_SECONDS)

    def _cause_of_loss(self, node: int) -> str:
        if not self._head.answers():
            return "no answer"
        alive = {each["NodeID"] for each in load().nodes() if each["Alive"]}
        if self._machines[node].node_id not in alive:
            return "the machine left the Ray cluster"
        return "its Ray actor was killed"


def _variables() -> dict[str, str]:
    """Environment variables for the processes, whatever Ray was started with."""
    passed = {name: text for name, text in os.environ.items() if name.startswith(INHERITED)}
    return {**passed, "PYTHONPATH": pythonpath()}


@contextlib.contextmanager
def ray_machines(
    request: ResourceRequest, head: HeadMonitor, seconds: float, say: Say, first: str | None = None
) -> Iterator[RayMachines]:
    """Reserve machines of the connected cluster for the duration of the block."""
    with reserve_nodes(request, head, seconds, say, first) as machines:
        yield RayMachines(machines, head)
