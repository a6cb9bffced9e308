"""A Ray cluster: connecting to it, and claiming a part of its machines for a while."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

from paceline.errors import RunError, UsageError, in_a_line
from paceline.launch.ray.post import Post

CONNECT_SECONDS = 5.0
TELL_SECONDS = 3.0
"""After which those who wait for machines are told so."""
STORE_BYTES = 100_000_000
"""Of a Ray that is started here, which has few and small objects to hold."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Variables that keep Ray from reporting home and from warning of what does not concern us."""

Say = Callable[[str], None]


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


class LostError(RunError):
    """An actor is gone, or its machine with it."""


def load() -> ModuleType:
    """Ray itself, which not everybody has, and which takes a second to load."""
    return importlib.import_module("ray")


def _check_that_it_is_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--launcher ray: Ray is not installed: pip install 'paceline[ray]'")


@contextlib.contextmanager
def connected(slots: int, say: Say) -> Iterator[str]:
    """Inside, this process drives a Ray cluster; gives its address.

    $RAY_ADDRESS names it, else one that runs on this machine is found, else one of this machine
    alone, with at least so many slots, is started and ended with the block.
    """
    address = os.environ.get("RAY_ADDRESS")
    _check_that_it_is_installed()
    _check_that_it_answers(address)
    with _variables(QUIET), contextlib.ExitStack() as stack:
        ray = load()
        if ray.is_initialized():
            raise UsageError("--launcher ray: this process is connected to Ray already")
        # What was lost is told by us, in a line; Ray would tell it at length as well.
        vars(importlib.import_module("ray._private.worker"))["_worker_logs_enabled"] = False
        if not _is_connected(ray, address):
            say("no Ray cluster is running: starting one on this machine")
            _start(ray, slots, stack.enter_context(_short_folder()))
        stack.callback(ray.shutdown)
        yield str(ray.get_runtime_context().gcs_address)


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    """Ray's sockets lie in it, whose paths must be short."""
    place = "/tmp" if Path("/tmp").is_dir() else None
    return tempfile.TemporaryDirectory(prefix="ray-", dir=place, ignore_cleanup_errors=True)


def _is_connected(ray: ModuleType, address: str | None) -> bool:
    """Connect, if there is a cluster."""
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # noqa: BLE001 - whatever Ray found, it cannot be used
        if address is None and isinstance(error, ConnectionError):
            return False
        raise UsageError(_unreachable(address or "auto", in_a_line(error))) from None
    return True


def _start(ray: ModuleType, slots: int, folder: str) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        ray.init(
            address="local",
            num_cpus=max(slots, cores or 1),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
    except Exception as error:  # noqa: BLE001 - Ray has many reasons
        raise RunError(f"--launcher ray: Ray cannot start here ({in_a_line(error)})") from None


def _check_that_it_answers(address: str | None) -> None:
    """Ray itself would try for a minute, and then end this process."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]]+)\]?:(\d+)", address or "")
    if address is None or match is None:
        return
    try:
        socket.create_connection((match[1], int(match[2])), CONNECT_SECONDS).close()
    except OSError as error:
        raise UsageError(_unreachable(address, error.strerror or str(error))) from None


def _unreachable(address: str, why: str) -> str:
    return (
        f"--launcher ray: no Ray cluster can be used at {address} ({why}): start one with"
        " `ray start --head`, or name another in $RAY_ADDRESS"
    )


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({**values, **{name: text for name, text in before.items() if text}})
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)


@dataclass(frozen=True, slots=True)
class Machine:
    """One that is claimed."""

    post: Any
    """The handle of its actor, a `Post`."""
    node_id: str
    address: str


@contextlib.contextmanager
def claimed(
    wanted: Wanted, at: str, seconds: float, say: Say, first: str | None = None
) -> Iterator[list[Machine]]:
    """Inside, these machines' slots are ours, with an actor on each; refused if there are too few.

    Waits so long for machines to come or to get free. The machine `first` comes first if it is
    among them, or else this one, so that the records need not travel.
    """
    ray = load()
    util = importlib.import_module("ray.util")
    bundle = {"CPU": float(wanted.slots)} | ({"GPU": float(wanted.gpus)} if wanted.gpus else {})
    strategy = "STRICT_SPREAD" if wanted.machines > 1 else "PACK"
    group = util.placement_group([bundle] * wanted.machines, strategy=strategy)
    posts: list[Any] = []
    try:
        _await_group(ray, group, wanted, at, seconds, say)
        posts += (_start_post(ray, group, wanted, number) for number in range(wanted.machines))
        machines = _describe(posts, seconds)
        own = str(ray.get_runtime_context().get_node_id())
        yield sorted(machines, key=lambda each: (each.node_id != first, each.node_id != own))
    finally:
        for post in posts:
            ray.kill(post)
        util.remove_placement_group(group)


def _await_group(
    ray: ModuleType, group: Any, wanted: Wanted, at: str, seconds: float, say: Say
) -> None:
    begun, is_told = monotonic(), False
    while not group.wait(timeout_seconds=0.5):
        if monotonic() - begun > seconds:
            raise TooFewError(f"needs {wanted}; {_what_there_is(ray, at)}")
        if not is_told and monotonic() - begun > TELL_SECONDS:
            say(f"waiting for {wanted}; {_what_there_is(ray, at)}")
            is_told = True


def _what_there_is(ray: ModuleType, at: str) -> str:
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


def _describe(posts: list[Any], seconds: float) -> list[Machine]:
    told = ask_all([post.whereabouts.remote() for post in posts], seconds)
    return [Machine(post, *where) for post, where in zip(posts, told, strict=True)]


def ask_all(answers: list[Any], seconds: float) -> list[Any]:
    """What actors answer, all of them."""
    ray = load()
    try:
        return list(ray.get(answers, timeout=seconds))
    except ray.exceptions.RayError as error:
        raise LostError(f"an actor of Ray does not answer: {cause_of(error)}") from None


def cause_of(error: Exception) -> str:
    """The last line of what Ray quotes, which is what the other machine said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
