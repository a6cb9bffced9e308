"""What of an emulated cluster this machine can do, for `paceline doctor`.

A cluster of emulated machines: made, found by name, used and removed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.config.cluster_spec import ClusterSpec
from paceline.emulation import calibration, cpu_limits, latency, namespaces, network
from paceline.emulation.guardian import Guardian
from paceline.emulation.latency import compiler, has_netem
from paceline.emulation.namespaces import can_be_root
from paceline.emulation.processes import ProcessId
from paceline.emulation.removal import pids_of, remove, remove_orphans
from paceline.emulation.state import (
    VARIABLE,
    Calibration,
    ClusterState,
    all_paths,
    choosing,
    load,
    path_of,
)
from paceline.errors import ClusterError

TRIED_CPUS = 0.1
"""Little enough for a group that is itself held to less than a core."""


@dataclass(frozen=True, slots=True)
class Abilities:
    as_root: bool
    has_quotas: bool
    latency: str | None
    """What would make it: netem or forwarder; None: nothing here can."""


def examine() -> Abilities:
    """Tries things out and leaves nothing; ClusterError where no cluster can be made at all."""
    as_root = can_be_root()
    latency = "netem" if has_netem(as_root=as_root) else "forwarder" if compiler() else None
    return Abilities(as_root, _has_quotas(), latency)


def _has_quotas() -> bool:
    told: list[Path | None] = []
    name = f"paceline-doctor-{os.getpid()}"
    made = cpu_limits.create_cgroups(
        name, {0: TRIED_CPUS}, lambda _, offering: told.append(offering)
    )
    cpu_limits.remove_groups((made or {}).values())
    if (offering := told[-1] if told else None) is not None:
        cpu_limits.withdraw_cpu(offering)
    return made is not None


_counter = itertools.count()
_log = logging.getLogger("paceline")


class EmulatedCluster:
    """Nodes with a network of their own, held to the rates and shares of a spec.

    As a context manager it is taken down at the end, whatever happened. Where this process is
    killed, its guardian does so; if that is killed too, the next `up`, `status` or `down` of the
    same user.
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
    ) -> EmulatedCluster:
        """Make a cluster; ClusterError, with nothing left behind, where that cannot be done.

        It ends with this process unless `is_kept`. Unless `quiet`, that it is being made is told,
        since it takes a while.
        """
        name = f"run-{os.getpid()}-{next(_counter)}" if name is None else name
        _check(spec, name)
        remove_orphans()
        state = ClusterState(path_of(name), spec, owner=ProcessId.of(os.getpid()))
        state.create()
        if not quiet:
            _tell(spec, calibrate)
        guardian = None
        try:
            # One that is kept outlives this process.
            guardian = None if is_kept else Guardian.start(state.path)
            _build(state)
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

    def command(self, node: int, words: Sequence[str]) -> list[str]:
        """The words that run a command inside a node: its network, its share of the CPU.

        They become the command itself, so its process id, exit code and streams are the command's.
        """
        if not 0 <= node < self.spec.nodes:
            raise ClusterError(
                f"cluster {self.name} has nodes 0 to {self.spec.nodes - 1}, not {node}"
            )
        inside, who = self.state.nodes[node], self.state.name_of(node)
        if not inside.is_held():
            raise ClusterError(f"{who} is gone: `paceline cluster down {self.name}`")
        entered = inside.words(["env", f"{VARIABLE}={self.state.path}", *words])
        entered = [*cpu_limits.words_on(self.state.cores.get(node), who), *entered]
        group = self.state.groups.get(node)
        if group is None:
            return entered
        return [*cpu_limits.join_words(group), *entered]

    def processes(self, node: int) -> list[int]:
        """Ids of the processes inside a node."""
        return pids_of(self.state, node)

    def down(self) -> None:
        """End everything inside and remove the cluster; a second time does nothing."""
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


def _tell(spec: ClusterSpec, calibrate: bool) -> None:
    nodes = f"{spec.nodes} node{'s' if spec.nodes > 1 else ''}"
    measuring_it = " and measuring it" if calibrate else ""
    _log.info("making an emulated cluster of %s%s ...", nodes, measuring_it)


def check_possible() -> None:
    """ClusterError where no cluster can be made on this machine."""
    namespaces.can_be_root()


def all_clusters() -> list[EmulatedCluster]:
    """Of this user, those of dead owners removed first."""
    remove_orphans()
    found = []
    for path in all_paths():
        try:
            found.append(EmulatedCluster(load(path)))
        except ClusterError:
            if path.exists():  # else its owner has just taken it down
                raise
    return found


def _check(spec: ClusterSpec, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ClusterError(f"a cluster's name is letters, digits, '-', '_' and '.', not {name!r}")
    cores = len(os.sched_getaffinity(0))
    shares = [spec.cpus_of(node, cores) for node in range(spec.nodes)]
    if any(share is not None and share < cpu_limits.LEAST_CPUS for share in shares):
        raise ClusterError(f"a node needs at least {cpu_limits.LEAST_CPUS:g} cpus")


def _build(state: ClusterState) -> None:
    """Each thing is in the state file as soon as it exists, so that a crash leaves no orphan."""
    as_root = namespaces.can_be_root()
    environment = state.environment()
    with choosing():
        state.addresses = network.addresses(state.name, state.spec.nodes + 1)
        state.save()
    state.switch = namespaces.create_namespace(environment, None, as_root=as_root)
    state.save()
    for _ in range(state.spec.nodes):
        state.nodes.append(namespaces.create_namespace(environment, state.switch, as_root=as_root))
        state.save()
    _limit_cpus(state)
    state.save()
    network.connect(state.switch, state.nodes, state.addresses)
    for number, node in enumerate(state.nodes):
        if (rate := state.spec.bandwidth(number)) is not None:
            network.shape(node, {"eth0": rate})
    latency.join_ports(state, state.switch)
    state.save()


def _limit_cpus(state: ClusterState) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shares = {node: state.spec.cpus_of(node, len(cores)) for node in range(state.spec.nodes)}
    limited = {node: share for node, share in shares.items() if share is not None}
    if not limited:
        return
    total = sum(limited.values())
    if total > len(cores):
        state.notes.append(
            f"the nodes' {total:g} cpus are more than the machine's {len(cores)}: "
            "nodes that are busy at once get less"
        )

    def note(planned: dict[int, Path], offering: Path | None) -> None:
        state.groups = planned
        state.offering = offering or _offering_already(planned)
        state.save()

    made = cpu_limits.create_cgroups(state.group_name, limited, note)
    if made is not None:
        if cpu_limits.is_outside_of_ours(made[min(made)]):
            state.notes.append(
                f"the nodes' CPU groups are in {made[min(made)].parent}, not in the group that "
                "this was started in: its limits do not hold for them"
            )
        if len(limited) == state.spec.nodes:
            with choosing():
                state.cores = cpu_limits.core_each(limited, cores, _taken_by_others(state))
                state.save()
        return
    turns = itertools.cycle(cores)
    state.cores = {
        node: sorted({next(turns) for _ in range(max(1, round(share)))})
        for node, share in limited.items()
    }
    state.notes.append(
        "no CPU quotas: no control group takes them (ask for a delegated one or run as root, "
        "and for no more than its own quota); nodes are only held to cores of their own"
    )


def _taken_by_others(state: ClusterState) -> dict[int, float]:
    """Of each core, the cpus of other clusters' nodes that are held to it."""
    taken: dict[int, float] = {}
    for path in all_paths():
        if path == state.path:
            continue
        with contextlib.suppress(ClusterError):
            other = load(path)
            for node, cores in other.cores.items():
                cpus = other.spec.cpus_of(node, len(os.sched_getaffinity(0))) or len(cores)
                for core in cores:
                    taken[core] = taken.get(core, 0.0) + min(1.0, cpus / len(cores))
    return taken


def _offering_already(planned: dict[int, Path]) -> Path | None:
    """Where another cluster made it so: the last of them to go takes it back."""
    parents = {group.parent for group in planned.values()}
    for path in all_paths():
        with contextlib.suppress(ClusterError):
            if (offering := load(path).offering) in parents:
                return offering
    return None
