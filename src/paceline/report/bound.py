"""What limits the step time of a configuration: compute, communication, waiting or input.

Exposed communication alone does not show that the network is slow: on busy cores a message waits
for a process to run. Where the link was measured, the bytes of an iteration tell how long they can
take at most, and what is left has another cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import formatting
from paceline.analysis.communication import Measured, link_bytes_per_second, measured_limit
from paceline.analysis.phases import COMPUTE_PHASES, iteration_breakdown
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number

MOST = 0.5
"""A share of an iteration from which on something is what limits it."""
LITTLE = 0.25
"""With no more exposed communication and waiting than this, compute is the limit."""
EXPLAINED = 0.5
"""The link is the cause of communication if it takes this part of the exposed time."""

NAMES = {
    "compute": "compute",
    "communication": "exposed communication",
    "waiting": "waiting",
    "input": "input",
}


@dataclass(frozen=True, slots=True)
class WireTime:
    """How long the bytes of an iteration are on the link at most."""

    bytes: float
    """Over the busiest link."""
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    label: str
    kind: str
    telling: str
    """The key of `shares` that shows it."""
    shares: dict[str, float]
    """Of an iteration: compute, communication, waiting, input."""
    exchange_seconds: float = 0.0
    """Exposed communication of an iteration."""
    wire: WireTime | None = None
    """None where no link was measured."""
    cause: str = ""
    """Of communication that the link does not explain."""

    def reason(self) -> str:
        parts = [
            f"{formatting.share(value)} {NAMES[name]}"
            for name, value in self.shares.items()
            if name != "input" and value >= 0.0005
        ]
        text = f"iteration time: {', '.join(parts)}"
        if not self.cause or self.wire is None:
            return text
        wire = self.wire
        return (
            f"{text}; {formatting.size(wire.bytes)} take {formatting.seconds(wire.seconds)} of the"
            f" {formatting.seconds(self.exchange_seconds)} at the measured"
            f" {formatting.rate(wire.bytes_per_second)}, so the likely cause is {self.cause}"
        )


def find_bottleneck(cell: RunGroup, measured: Sequence[Measured] = ()) -> Bottleneck | None:
    """None where there are no phases to tell; `measured` is what `paceline comm` found."""
    split = iteration_breakdown(cell)
    if split is None or not split.total:
        return None
    shares = {
        "compute": split.of(COMPUTE_PHASES) / split.total,
        "communication": split.share("exchange"),
        "waiting": split.share("wait"),
        "input": split.share("input"),
    }
    exchange = split.seconds["exchange"]
    wire = wire_time(cell, measured)
    is_explained = wire is None or wire.seconds >= EXPLAINED * exchange
    is_network = cell.config.nnodes > 1 and is_explained

    def communication(kind: str) -> Bottleneck:
        cause = "" if is_explained else remaining_cause(cell)
        return Bottleneck(cell.label, kind, "communication", shares, exchange, wire, cause)

    if shares["input"] >= MOST:
        return Bottleneck(cell.label, "input-bound", "input", shares)
    if shares["communication"] >= MOST or (
        shares["communication"] > shares["compute"] and shares["communication"] > shares["waiting"]
    ):
        return communication("network-bound" if is_network else "communication-bound")
    if shares["waiting"] >= LITTLE and shares["waiting"] > shares["communication"]:
        return Bottleneck(cell.label, "wait-bound", "waiting", shares)
    if 1 - shares["compute"] <= LITTLE:
        return Bottleneck(cell.label, "compute-bound", "compute", shares)
    if shares["waiting"] > shares["communication"]:
        return Bottleneck(cell.label, "compute and waiting", "waiting", shares)
    return communication("compute and network" if is_network else "compute and communication")


def wire_time(cell: RunGroup, measured: Sequence[Measured] = ()) -> WireTime | None:
    """An upper bound from the first finished run; None where nothing was sent or measured."""
    run = cell.finished[0]
    rate = link_bytes_per_second(run) or measured_limit(measured, cell.workers)
    if not rate or not run.iterations or run.is_resized:
        return None
    by_node: dict[int, float] = {}
    messages = 0.0
    for worker in run.workers:
        kinds = worker.get("traffic", {}).values()
        sent = sum(kind.get("bytes_sent") or 0 for kind in kinds)
        received = sum(kind.get("bytes_received") or 0 for kind in kinds)
        # A node's workers share its link, and the link of a server carries what all of them send.
        node = 0 if cell.config.strategy == "parameter_server" else int(worker["node"])
        by_node[node] = by_node.get(node, 0.0) + max(sent, received)
        messages = max(messages, sum(kind.get("messages") or 0 for kind in kinds))
    count = max(by_node.values(), default=0.0) / run.iterations
    if not count:
        return None
    latency = messages / run.iterations * _round_trip_seconds(run)
    return WireTime(count, rate, count / rate + latency)


def _round_trip_seconds(run: Run) -> float:
    """As measured in the emulated cluster of the run; 0 where it was in none."""
    cluster = (run.result or {}).get("cluster")
    found = cluster.get("got") if isinstance(cluster, dict) else None
    times = [
        item["got"]
        for item in found or ()
        if isinstance(item, dict) and item.get("what") == "round trip" and is_number(item["got"])
    ]
    return float(max(times, default=0.0))


def remaining_cause(cell: RunGroup) -> str:
    """Why communication takes longer than the link needs, as far as the records show."""
    run = cell.finished[0]
    hardware = (run.result or {}).get("hardware", {})
    quota, cores = hardware.get("cpu_quota"), hardware.get("cores_in_machine")
    if is_number(quota):
        return f"the CPU quota of {quota:g} cores per node (processes wait to be scheduled)"
    is_one_machine = cell.config.nnodes == 1 or cell.config.cluster
    threads = cell.workers * (cell.config.threads or 1)
    if is_one_machine and is_number(cores) and threads > cores:
        return f"CPU contention: {threads} threads of the workers share {cores:g} cores"
    return "scheduling or communication software, not the link"
