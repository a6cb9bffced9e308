"""`paceline cluster`: create, inspect, use and remove an emulated cluster."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from paceline.config.cluster_spec import (
    LEAST_CPUS,
    MOST_CPUS,
    MOST_LATENCY_SECONDS,
    MOST_NODES,
    ClusterSpec,
    parse,
)
from paceline.errors import ClusterError, ConfigError, UsageError, shown

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.emulation.cluster import EmulatedCluster
    from paceline.emulation.state import Measured

SUMMARY = "create and use an emulated cluster: nodes with limited links and CPUs"

DEFAULT_NAME = "default"
EXPECTED = {
    "nodes": f"1 to {MOST_NODES}",
    "cpus": f"a number of cores of {LEAST_CPUS:g} to {MOST_CPUS}, such as 0.5",
    "bandwidth": "a rate of 1kbit to 1000gbit, or 1gbit/3:100mbit with exceptions",
    "latency": f"a time such as 200us or 2ms, 1us to {MOST_LATENCY_SECONDS:g}s",
    "slow": f"node:part with parts of {LEAST_CPUS:g} to 1, such as 3:0.25 or 2:0.5/3:0.25",
}
"""Settings of a cluster and their valid values."""
BUSY_CORES = 0.25
"""CPU use of other programs above which measurements are unreliable."""
MOST_PROCESSES_SHOWN = 3


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "create a persistent cluster and measure it"
    up = actions.add_parser("up", help=summary, description=summary)
    up.add_argument("--nodes", required=True, help="number of nodes")
    up.add_argument("--cpus", help="CPU time of each node in cores, such as 0.5")
    up.add_argument("--bandwidth", help="bandwidth of each link: 1gbit, or 1gbit/3:100mbit")
    up.add_argument("--latency", help="round-trip time between two nodes, such as 200us or 2ms")
    up.add_argument("--slow", help="nodes with a fraction of the cpus: 3:0.25, or 2:0.5/3:0.25")
    up.add_argument(
        "--name", default=DEFAULT_NAME, help=f"name of the cluster (default: {DEFAULT_NAME})"
    )
    up.add_argument("--no-calibrate", action="store_true", help="skip the measurement")
    up.add_argument("--quiet", action="store_true", help="show no progress, only the tables")
    summary = "show the existing clusters and their processes"
    actions.add_parser("status", help=summary, description=summary)
    summary = "run a command in a node: exec NODE -- COMMAND ..."
    execute = actions.add_parser("exec", help=summary, description=summary)
    execute.add_argument("--name", help="name of the cluster, if there are several")
    execute.add_argument("node", type=int, help="rank of the node")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    summary = "end the processes of a cluster and remove it"
    down = actions.add_parser("down", help=summary, description=summary)
    down.add_argument("name", nargs="?", help="name of the cluster, if there are several")


def run(arguments: argparse.Namespace) -> int:
    actions = {"up": _up, "status": _status, "exec": _exec, "down": _down}
    return actions[arguments.action](arguments)


def _up(arguments: argparse.Namespace) -> int:
    from paceline.emulation.cluster import EmulatedCluster

    spec = _spec({key: value for key in EXPECTED if (value := getattr(arguments, key)) is not None})
    cluster = EmulatedCluster.up(
        spec,
        arguments.name,
        not arguments.no_calibrate,
        is_kept=True,
        quiet=arguments.quiet,
    )
    console = _console()
    _show_nodes(console, cluster)
    _show_calibration(console, cluster)
    return 0


def _spec(flags: dict[str, str]) -> ClusterSpec:
    """Return the cluster of these flags; reports all problems together."""
    has_nodes = _is_spec(nodes := f"nodes={flags['nodes']}")
    problems = []
    for key, value in flags.items():
        others = f"{nodes if has_nodes else f'nodes={MOST_NODES}'},"
        text = f"{key}={value}" if key == "nodes" else f"{others}{key}={value}"
        # A comma would start another key.
        if "," in value or not _is_spec(text):
            below = f" (nodes below {flags['nodes']})" if has_nodes and ":" in value else ""
            problems.append(f"--{key}: must be {EXPECTED[key]}{below}, got {shown(value)}")
    if problems:
        raise ConfigError(problems)
    return parse(",".join(f"{key}={value}" for key, value in flags.items()))


def _is_spec(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _status(arguments: argparse.Namespace) -> int:
    from paceline.emulation.cluster import all_clusters

    console = _console()
    clusters = all_clusters()
    for cluster in clusters:
        _show_nodes(console, cluster)
    if not clusters:
        console.print("No cluster is up. Create one with: paceline cluster up --nodes 4")
    return 0


def _exec(arguments: argparse.Namespace) -> int:
    name, argv = _name_and_argv(arguments.name, arguments.argv)
    if not argv:
        raise UsageError("missing command: paceline cluster exec NODE -- COMMAND ...")
    command = _chosen(name).command(arguments.node, argv)
    sys.stdout.flush()
    os.execvp(command[0], command)


def _name_and_argv(name: str | None, rest: list[str]) -> tuple[str | None, list[str]]:
    """Split the arguments after the node: `--name` may come before `--`."""
    if not rest or not rest[0].startswith("-") or rest[0] == "--":
        return name, rest[1:] if rest[:1] == ["--"] else rest
    end = rest.index("--") if "--" in rest else len(rest)
    flag, _, value = rest[0].partition("=")
    options = [flag, value, *rest[1:end]] if value else rest[:end]
    if len(options) != 2 or options[0] != "--name" or end == len(rest):
        raise UsageError(
            f"cannot run {shown(rest[0])}: paceline cluster exec [--name NAME] NODE -- COMMAND ..."
        )
    return options[1], rest[end + 1 :]


def _down(arguments: argparse.Namespace) -> int:
    from paceline.emulation.removal import remove_orphans

    try:
        cluster = _chosen(arguments.name)
        cluster.down()
    finally:
        # Last, because the named cluster may itself be an orphan.
        remove_orphans()
    _console().print(f"Cluster {cluster.name} is down.")
    return 0


def _chosen(name: str | None) -> EmulatedCluster:
    """Return the cluster with this name, or the only persistent one."""
    from paceline.emulation.cluster import EmulatedCluster, all_clusters

    clusters = [] if name else all_clusters()
    kept = [cluster for cluster in clusters if cluster.state.owner is None]
    if len(kept) > 1:
        names = ", ".join(cluster.name for cluster in kept)
        raise ClusterError(f"several clusters are up, choose one: {names}")
    return kept[0] if kept else EmulatedCluster.open(name or DEFAULT_NAME)


def _show_nodes(console: Console, cluster: EmulatedCluster) -> None:
    from rich.table import Table

    state, spec = cluster.state, cluster.spec
    until = (
        f"until `paceline cluster down {cluster.name}`"
        if state.owner is None
        else f"as long as process {state.owner.pid}"
    )
    console.print(f"Cluster {cluster.name}, up {until}")
    if spec.latency_seconds:
        made_by = "" if state.is_whole() else ", which has exited: remove the cluster"
        latency = _amount(spec.latency_seconds, "s")
        console.print(f"round trip {latency}, by the {state.delay}{made_by}")
    table = Table(box=None, pad_edge=False)
    for heading in ("node", "address", "link each way", "cpus", "processes"):
        table.add_column(heading, overflow="fold")
    cores = len(os.sched_getaffinity(0))
    for node, address in enumerate(cluster.addresses):
        bandwidth, cpus = spec.bandwidth(node), spec.cpus_of(node, cores)
        table.add_row(
            str(node),
            address,
            "not limited" if bandwidth is None else _amount(bandwidth, "bit/s"),
            "not limited" if cpus is None else f"{cpus:g}",
            _processes(cluster.processes(node)),
        )
    console.print(table)
    for note in state.notes:
        console.print(f"note: {note}")
    console.print()


def _show_calibration(console: Console, cluster: EmulatedCluster) -> None:
    from rich.table import Table

    calibration = cluster.calibration
    if calibration is None:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("quantity", "node", "requested", "measured", "deviation", ""):
        table.add_column(heading, justify="left" if heading in ("quantity", "") else "right")
    for item in calibration.measured:
        table.add_row(*_row(item))
    console.print(table)
    if calibration.busy_cores > BUSY_CORES:
        console.print(
            f"note: other programs kept {calibration.busy_cores:.1f} cores busy: "
            "the measurements are unreliable"
        )


def _row(item: Measured) -> tuple[str, ...]:
    return (
        item.what,
        "all" if item.node is None else str(item.node),
        "-" if item.asked is None else _amount(item.asked, item.unit),
        _amount(item.got, item.unit),
        "-" if item.asked is None else f"{100 * item.deviation:+.1f}%",
        "over 10%" if item.is_off else "",
    )


def _amount(value: float, unit: str) -> str:
    from paceline.emulation.state import amount
    from paceline.formatting import seconds

    return seconds(value) if unit == "s" else amount(value, unit)


def _processes(pids: list[int]) -> str:
    import psutil

    shown = []
    for pid in pids[:MOST_PROCESSES_SHOWN]:
        try:
            shown.append(f"{psutil.Process(pid).name()} ({pid})")
        except psutil.Error:
            continue
    more = len(pids) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])]) or "-"


def _console() -> Console:
    from paceline.terminal import open_console

    return open_console(max_columns=80)
