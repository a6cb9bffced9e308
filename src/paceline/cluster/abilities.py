"""What of an emulated cluster this machine can do, for `paceline doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster import groups
from paceline.cluster.compile import compiler
from paceline.cluster.latency import has_netem
from paceline.cluster.namespaces import can_be_root

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
    made = groups.make_groups(name, {0: TRIED_CPUS}, lambda _, offering: told.append(offering))
    groups.remove_groups((made or {}).values())
    if (offering := told[-1] if told else None) is not None:
        groups.withdraw_cpu(offering)
    return made is not None
