"""Which of the machine's cores a node may run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.cluster.namespaces import program
from paceline.errors import ClusterError

FULL = 1.0 + 1e-9
"""Of a core, with room for rounding."""

HOLD_SCRIPT = (
    f'"$1" -cp "$2" $$ > /dev/null 2>&1 || {{ echo "$3" >&2; exit {ClusterError.exit_code}; }}; '
    'shift 3; exec "$@"'
)


def core_each(
    cpus_of: Mapping[int, float], cores: Sequence[int], taken: Mapping[int, float]
) -> dict[int, list[int]]:
    """A core for every node, such that none has more to do than it can; else nothing.

    A node of at most one cpu stands for a machine with one core. Were it on several, the kernel
    would deal its quota out to them in pieces: its threads would run side by side for a moment, and
    then all stop until the next period, too long for what is on a fast link to wait.
    `taken` is what other clusters have taken of the cores.
    """
    load = {core: taken.get(core, 0.0) for core in cores}
    placed: dict[int, list[int]] = {}
    for node, cpus in sorted(cpus_of.items(), key=lambda item: -item[1]):
        core = min(load, key=lambda each: load[each])
        load[core] += cpus
        if load[core] > FULL:
            return {}
        placed[node] = [core]
    return placed


def words_on(cores: Sequence[int] | None, who: str) -> list[str]:
    """Before a command's own words: it runs on these cores; None: on any.

    Where it may not, it says so and ends. That is found out there, since a control group that it
    joins may allow other cores than this process's own does.
    """
    if not cores:
        return []
    listed = ",".join(map(str, cores))
    refusal = (
        f"paceline: error: {who} runs on core {' or '.join(map(str, cores))}, which commands from"
        " here may not use: take the cluster down, and make it from here"
    )
    return ["sh", "-c", HOLD_SCRIPT, "sh", program("taskset"), listed, refusal]
