"""Create, find, use and remove emulated clusters."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.config.cluster_spec import ClusterSpec
from paceline.emulation import calibration, cpu_limits, latency, namespaces, network
from paceline.emulation.processes import ProcessId
from paceline.emulation.removal import Guardian, end_runs, pids_of, remove, remove_orphans
from paceline.emulation.state import (
    VARIABLE,
    Calibration,
    ClusterState,
    all_paths,
    allocation_lock,
    load,
    path_of,
)
from paceline.errors import ClusterError

SHARED_VARIABLE = "PACELINE_SHARED_CLUSTER"
"""State file of a cluster that a study keeps up for its runs, in their environment."""

_counter = itertools.count()
_log = logging.getLogger("paceline")


class EmulatedCluster:
    """Nodes with their own network, limited to the bandwidths and CPU shares of a spec.

    As a context manager it is removed on exit. If this process is killed, its guardian removes the
    cluster; if that is killed too, the next `up`, `status` or `down` of the same user does.
    """

    def __init__(self, state: ClusterState, guardian: Guardian | None = None) -> None:
        self.state = state
        self._guardian = guardian
        self.name: str = state.name
        self.spec: ClusterSpec = state.spec
        self.addresses: list[str] = state.addresses[: state.spec.nodes]

    @property
    def calibration(self) -> Calibration | None:
        return self.state.calibration

    @classmethod
    def up(
        cls,
        spec: ClusterSpec,
        name: str | None = None,
        calibrate: bool = True,
        *,
        is_kept: bool = False,
        quiet: bool = True,
        idle: Collection[Path] = (),
    ) -> EmulatedCluster:
        """Create a cluster; on ClusterError nothing is left behind.

        The cluster ends with this process unless `is_kept`. Unless `quiet`, a log line announces
        the creation, which takes seconds. `idle` are state files of clusters that are not used
        at the same time as this one.
        """
        name = f"run-{os.getpid()}-{next(_counter)}" if name is None else name
        _check(spec, name)
        remove_orphans()
        state = ClusterState(path_of(name), spec, owner=ProcessId.of(os.getpid()))
        state.create()
        if not quiet:
            _log_creation(spec, calibrate)
        guardian = None
        try:
            # A kept cluster outlives this process.
            guardian = None if is_kept else Guardian.start(state.path)
            _build(state, idle)
            if calibrate:
                state.calibration = calibration.calibrate(state)
            if is_kept:
                state.owner = None
            state.save()
        except BaseException:
            try:
                remove(state)
            finally:
                if guardian is not None:
                    guardian.close()
            raise
        return cls(state, guardian)

    @classmethod
    def open(cls, name: str) -> EmulatedCluster:
        return cls(load(path_of(name)))

    @classmethod
    @contextlib.contextmanager
    def for_run(cls, spec: ClusterSpec, quiet: bool) -> Iterator[EmulatedCluster]:
        """The cluster that the study of this run keeps up, otherwise one for the block only."""
        shared = _shared_state(spec)
        if shared is not None:
            yield cls(shared)
            return
        with cls.up(spec, quiet=quiet) as cluster:
            yield cluster

    def clear(self) -> bool:
        """End the processes that a run left in the nodes; returns whether the cluster is whole."""
        return self.state.is_whole() and end_runs(self.state) and self.state.is_whole()

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Wrap a command so that it runs inside a node, in its network and CPU group.

        The wrapper execs the command, so process id, exit code and streams are the command's.
        """
        if not 0 <= node < self.spec.nodes:
            raise ClusterError(
                f"cluster {self.name} has nodes 0 to {self.spec.nodes - 1}, not {node}"
            )
        namespace, label = self.state.nodes[node], self.state.name_of(node)
        if not namespace.is_held():
            raise ClusterError(f"{label} no longer exists: `paceline cluster down {self.name}`")
        wrapped = namespace.command(["env", f"{VARIABLE}={self.state.path}", *argv])
        wrapped = [*cpu_limits.core_prefix(self.state.cores.get(node), label), *wrapped]
        group = self.state.groups.get(node)
        if group is None:
            return wrapped
        return [*cpu_limits.cgroup_prefix(group), *wrapped]

    def processes(self, node: int) -> list[int]:
        """Process ids inside a node."""
        return pids_of(self.state, node)

    def down(self) -> None:
        """End all processes inside and remove the cluster; idempotent."""
        try:
            if self.state.path.exists():
                remove(self.state)
        finally:
            guardian, self._guardian = self._guardian, None
            if guardian is not None:
                guardian.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()


def _log_creation(spec: ClusterSpec, calibrate: bool) -> None:
    nodes = f"{spec.nodes} node{'s' if spec.nodes > 1 else ''}"
    calibrating = " and calibrating it" if calibrate else ""
    _log.info("creating an emulated cluster of %s%s ...", nodes, calibrating)


def all_clusters() -> list[EmulatedCluster]:
    """The clusters of this user, after removing those whose owner died."""
    remove_orphans()
    found = []
    for path in all_paths():
        try:
            found.append(EmulatedCluster(load(path)))
        except ClusterError:
            if path.exists():  # otherwise its owner has just removed it
                raise
    return found


def _check(spec: ClusterSpec, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ClusterError(f"invalid cluster name {name!r}: use letters, digits, '-', '_' and '.'")
    cores = len(os.sched_getaffinity(0))
    shares = [spec.cpus_of(node, cores) for node in range(spec.nodes)]
    if any(share is not None and share < cpu_limits.MIN_CPUS for share in shares):
        raise ClusterError(f"a node needs at least {cpu_limits.MIN_CPUS:g} cpus")


def _shared_state(spec: ClusterSpec) -> ClusterState | None:
    """The state of the cluster that a study shares with this process, if it is intact."""
    path = os.environ.pop(SHARED_VARIABLE, None)
    with contextlib.suppress(ClusterError):
        if path and (state := load(Path(path))).spec == spec and state.is_whole():
            return state
    return None


def _build(state: ClusterState, idle: Collection[Path]) -> None:
    """Every resource enters the state file once it exists, so that a crash leaves no orphan."""
    as_root = namespaces.can_be_root()
    environment = state.environment()
    with allocation_lock():
        state.addresses = network.addresses(state.name, state.spec.nodes + 1)
        state.save()
    state.switch = namespaces.create_namespace(environment, None, as_root=as_root)
    state.save()
    for _ in range(state.spec.nodes):
        state.nodes.append(namespaces.create_namespace(environment, state.switch, as_root=as_root))
        state.save()
    _limit_cpus(state, idle)
    state.save()
    network.connect(state.switch, state.nodes, state.addresses)
    for number, node in enumerate(state.nodes):
        if (rate := state.spec.bandwidth(number)) is not None:
            network.shape(node, {"eth0": rate})
    latency.join_ports(state, state.switch)
    state.save()


def _limit_cpus(state: ClusterState, idle: Collection[Path]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shares = {node: state.spec.cpus_of(node, len(cores)) for node in range(state.spec.nodes)}
    limited = {node: share for node, share in shares.items() if share is not None}
    if not limited:
        return
    total = sum(limited.values())
    if total > len(cores):
        state.notes.append(
            f"the nodes' {total:g} cpus exceed the machine's {len(cores)}: "
            "nodes that are busy at the same time get less"
        )

    def record_plan(planned: dict[int, Path], offering: Path | None) -> None:
        state.groups = planned
        state.offering = offering or _offering_already(planned)
        state.save()

    groups = cpu_limits.create_cgroups(state.group_name, limited, record_plan)
    if groups is not None:
        parent = groups[min(groups)].parent
        if cpu_limits.is_outside_own_group(groups[min(groups)]):
            state.notes.append(
                f"the nodes' CPU groups are in {parent}, outside the control group of this process:"
                " its limits do not apply to them"
            )
        if len(limited) == state.spec.nodes:
            with allocation_lock():
                state.cores = cpu_limits.assign_cores(
                    limited, cores, _load_of_other_clusters({state.path, *idle})
                )
                state.save()
        return
    turns = itertools.cycle(cores)
    state.cores = {
        node: sorted({next(turns) for _ in range(max(1, round(share)))})
        for node, share in limited.items()
    }
    state.notes.append(
        "no CPU quotas: no control group accepts them (run as root or in a delegated group, and "
        "request no more than its quota); nodes are only pinned to cores"
    )


def _load_of_other_clusters(excluded: Collection[Path]) -> dict[int, float]:
    """CPU shares by core of other clusters' nodes that are pinned to it."""
    load_by_core: dict[int, float] = {}
    for path in all_paths():
        if path in excluded:
            continue
        with contextlib.suppress(ClusterError):
            other = load(path)
            for node, cores in other.cores.items():
                cpus = other.spec.cpus_of(node, len(os.sched_getaffinity(0))) or len(cores)
                for core in cores:
                    share = min(1.0, cpus / len(cores))
                    load_by_core[core] = load_by_core.get(core, 0.0) + share
    return load_by_core


def _offering_already(planned: dict[int, Path]) -> Path | None:
    """The parent that another cluster enabled; the last cluster to end disables it again."""
    parents = {group.parent for group in planned.values()}
    for path in all_paths():
        with contextlib.suppress(ClusterError):
            if (offering := load(path).offering) in parents:
                return offering
    return None


TRIED_CPUS = 0.1
"""Small enough for a group that is itself limited to less than a core."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an emulated cluster on this machine can do."""

    as_root: bool
    has_quotas: bool
    latency: str | None
    """Mechanism: netem or forwarder; None: unavailable."""


def examine() -> Abilities:
    """Probe this machine for `paceline doctor`; ClusterError if it cannot have any cluster."""
    as_root = namespaces.can_be_root()
    fallback = "forwarder" if latency.compiler() else None
    mechanism = "netem" if latency.has_netem(as_root=as_root) else fallback
    return Abilities(as_root, _has_quotas(), mechanism)


def _has_quotas() -> bool:
    offerings: list[Path | None] = []
    name = f"paceline-doctor-{os.getpid()}"
    groups = cpu_limits.create_cgroups(
        name, {0: TRIED_CPUS}, lambda _, offering: offerings.append(offering)
    )
    cpu_limits.remove_groups((groups or {}).values())
    if (offering := offerings[-1] if offerings else None) is not None:
        cpu_limits.disable_cpu_controller(offering)
    return groups is not None
