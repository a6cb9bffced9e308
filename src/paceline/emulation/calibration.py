"""Measure an emulated cluster: link rates, round-trip time and CPU shares."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from paceline.emulation import cpu_limits, probe
from paceline.emulation.namespaces import Namespace
from paceline.emulation.state import Calibration, ClusterState, Measured
from paceline.errors import ClusterError

RATE_SECONDS = 0.3
SPIN_SECONDS = 0.4
PING_SECONDS = 0.3
MAX_PINGS = 400
MIN_PINGS = 5
BUSY_SAMPLE_SECONDS = 0.2
MAX_LINKS = 8
"""Limits calibration time; links with their own rate come first."""
MAX_TRIES = 3
"""A briefly busy machine can distort a measurement, so the closest of several counts."""


def calibrate(state: ClusterState) -> Calibration:
    """Measure for a few seconds; leaves no process behind."""
    busy_cores = psutil.cpu_percent(BUSY_SAMPLE_SECONDS) / 100 * (os.cpu_count() or 1)
    measured = [*link_rates(state), *_round_trip(state), *_cpus(state)]
    return Calibration(measured, busy_cores)


def round_trip_seconds(state: ClusterState) -> float:
    """Median round-trip time of a small message between the first two nodes."""
    first, second = state.nodes[:2]
    pings = round(PING_SECONDS / max(state.spec.latency_seconds, PING_SECONDS / MAX_PINGS))
    count, address = str(max(pings, MIN_PINGS)), state.addresses[1]
    with _listener(second, "echo", address) as (port, _):
        return float(_output(first.command(_probe_argv("ping", address, str(port), count))))


def link_rates(state: ClusterState) -> Iterator[Measured]:
    """Measure each link from and to an unshaped one, so that only its own limit applies."""
    switch = state.switch
    if switch is None:
        return
    limited = [node for node in range(state.spec.nodes) if state.spec.bandwidth(node) is not None]
    limited.sort(key=lambda node: (node not in state.spec.bandwidth_of, node))
    unshaped = (switch, state.addresses[-1])
    for node in sorted(limited[:MAX_LINKS]):
        here = (state.nodes[node], state.addresses[node])
        requested = state.spec.bandwidth(node)
        for what, source, sink in (("out", here, unshaped), ("in", unshaped, here)):
            yield _closest(
                Measured(f"bandwidth {what}", node, requested, _rate(source[0], *sink), "bit/s")
                for _ in range(MAX_TRIES)
            )


def _rate(source: Namespace, sink: Namespace, address: str) -> float:
    with _listener(sink, "sink", address, str(RATE_SECONDS)) as (port, receiver):
        argv = source.command(_probe_argv("source", address, str(port)))
        sender = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return float(_line(receiver))
        finally:
            _stop(sender)


def _round_trip(state: ClusterState) -> Iterator[Measured]:
    if state.spec.nodes > 1:
        requested = state.spec.latency_seconds or None
        yield _closest(
            Measured("round trip", None, requested, round_trip_seconds(state), "s")
            for _ in range(MAX_TRIES)
        )


def _cpus(state: ClusterState) -> Iterator[Measured]:
    rounds: list[list[Measured]] = []
    for _ in range(MAX_TRIES):
        rounds.append(_cpus_at_once(state))
        if not any(item.is_off for item in rounds[-1]):
            break
    for tries in zip(*rounds, strict=True):
        yield _closest(iter(tries))


def _cpus_at_once(state: ClusterState) -> list[Measured]:
    """Measure all nodes at the same time, as a run uses them."""
    cores = len(os.sched_getaffinity(0))
    spinners: dict[int, list[subprocess.Popen[str]]] = {}
    try:
        for node, group in state.groups.items():
            requested = state.spec.cpus_of(node, cores) or cores
            on_cores = cpu_limits.core_prefix(state.cores.get(node), state.name_of(node))
            argv = [
                *cpu_limits.cgroup_prefix(group),
                *on_cores,
                *_probe_argv("spin", str(SPIN_SECONDS)),
            ]
            spinners[node] = [
                subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
                for _ in range(math.ceil(requested))
            ]
        shares = {
            node: sum(float(_line(process)) for process in started)
            for node, started in spinners.items()
        }
        return [
            Measured("cpus", node, state.spec.cpus_of(node, cores), share, "cores")
            for node, share in shares.items()
        ]
    finally:
        for process in [process for started in spinners.values() for process in started]:
            _stop(process)


def _closest(tries: Iterator[Measured]) -> Measured:
    """The measurement closest to the request, stopping at the first within tolerance."""
    measured: list[Measured] = []
    for item in tries:
        measured.append(item)
        if not item.is_off:
            break
    return min(measured, key=lambda item: abs(item.deviation))


@contextlib.contextmanager
def _listener(namespace: Namespace, *arguments: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        namespace.command(_probe_argv(*arguments)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield int(_line(process)), process
    finally:
        _stop(process)


def _probe_argv(*arguments: str) -> list[str]:
    # Python starts three times faster without site packages.
    return [sys.executable, "-I", "-S", str(Path(probe.__file__)), *arguments]


def _output(argv: Sequence[str]) -> str:
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        return _line(process)


def _line(process: subprocess.Popen[str]) -> str:
    """Blocks, but not forever: every probe has its own timeout."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line.strip():
        raise ClusterError("cannot calibrate the cluster: a probe inside it returned no result")
    return line


def _stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
