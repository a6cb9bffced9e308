"""What of an emulated cluster this machine can do, for `paceline doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.cluster import groups
from paceline.cluster.compile import compiler
from paceline.cluster.latency import has_netem
from paceline.cluster.namespaces import can_be_root


@dataclass(frozen=True, slots=True)
class Abilities:
    as_root: bool
    has_quotas: bool
    latency: str | None
    """What would make it: netem or forwarder; None: nothing here can."""


def examine() -> Abilities:
    """Tries things out and leaves nothing; ClusterError where no cluster can be made at all."""
    as_root = can_be_root()
    made = groups.make_groups(f"paceline-doctor-{os.getpid()}", {0: 1.0})
    groups.remove_groups((made or {}).values())
    latency = "netem" if has_netem(as_root=as_root) else "forwarder" if compiler() else None
    return Abilities(as_root, made is not None, latency)
