"""Measuring what was built: link rates, the round trip, shares of the CPU."""

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
MOST_PINGS = 400
LEAST_PINGS = 5
BUSY_LOOK_SECONDS = 0.2
MOST_LINKS = 8
"""More would take too long; those with a rate of their own come first."""
TRIES = 3
"""At most, since a machine that is busy for a moment spoils a figure; the nearest one counts."""


def calibrate(state: ClusterState) -> Calibration:
    """A few seconds of measuring; nothing is left running."""
    busy_cores = psutil.cpu_percent(BUSY_LOOK_SECONDS) / 100 * (os.cpu_count() or 1)
    measured = [*link_rates(state), *_round_trip(state), *_cpus(state)]
    return Calibration(measured, busy_cores)


def round_trip_seconds(state: ClusterState) -> float:
    """The median between the first two nodes, of a small message."""
    first, second = state.nodes[:2]
    pings = round(PING_SECONDS / max(state.spec.latency_seconds, PING_SECONDS / MOST_PINGS))
    count, address = str(max(pings, LEAST_PINGS)), state.addresses[1]
    with _listener(second, "echo", address) as (port, _):
        return float(_ask(first.words(_probe("ping", address, str(port), count))))


def link_rates(state: ClusterState) -> Iterator[Measured]:
    """Each link against one that is not shaped, so that nothing else can be what limits it."""
    switch = state.switch
    if switch is None:
        return
    limited = [node for node in range(state.spec.nodes) if state.spec.bandwidth(node) is not None]
    limited.sort(key=lambda node: (node not in state.spec.bandwidth_of, node))
    unshaped = (switch, state.addresses[-1])
    for node in sorted(limited[:MOST_LINKS]):
        here = (state.nodes[node], state.addresses[node])
        asked = state.spec.bandwidth(node)
        for what, source, sink in (("out", here, unshaped), ("in", unshaped, here)):
            yield _nearest(
                Measured(f"bandwidth {what}", node, asked, _rate(source[0], *sink), "bit/s")
                for _ in range(TRIES)
            )


def _rate(source: Namespace, sink: Namespace, address: str) -> float:
    with _listener(sink, "sink", address, str(RATE_SECONDS)) as (port, receiver):
        words = source.words(_probe("source", address, str(port)))
        sender = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return float(_line(receiver))
        finally:
            _stop(sender)


def _round_trip(state: ClusterState) -> Iterator[Measured]:
    if state.spec.nodes > 1:
        asked = state.spec.latency_seconds or None
        yield _nearest(
            Measured("round trip", None, asked, round_trip_seconds(state), "s")
            for _ in range(TRIES)
        )


def _cpus(state: ClusterState) -> Iterator[Measured]:
    rounds: list[list[Measured]] = []
    for _ in range(TRIES):
        rounds.append(_cpus_at_once(state))
        if not any(item.is_off for item in rounds[-1]):
            break
    for of_one_node in zip(*rounds, strict=True):
        yield _nearest(iter(of_one_node))


def _cpus_at_once(state: ClusterState) -> list[Measured]:
    """Of all nodes together, since that is how a run uses them."""
    cores = len(os.sched_getaffinity(0))
    spinners: dict[int, list[subprocess.Popen[str]]] = {}
    try:
        for node, group in state.groups.items():
            asked = state.spec.cpus_of(node, cores) or cores
            on_cores = cpu_limits.words_on(state.cores.get(node), state.name_of(node))
            words = [*cpu_limits.join_words(group), *on_cores, *_probe("spin", str(SPIN_SECONDS))]
            spinners[node] = [
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
                for _ in range(math.ceil(asked))
            ]
        got = {
            node: sum(float(_line(process)) for process in started)
            for node, started in spinners.items()
        }
        return [
            Measured("cpus", node, state.spec.cpus_of(node, cores), share, "cores")
            for node, share in got.items()
        ]
    finally:
        for process in [process for started in spinners.values() for process in started]:
            _stop(process)


def _nearest(tries: Iterator[Measured]) -> Measured:
    """Of several, stopping at the first that is near enough to what was asked for."""
    made: list[Measured] = []
    for item in tries:
        made.append(item)
        if not item.is_off:
            break
    return min(made, key=lambda item: abs(item.deviation))


@contextlib.contextmanager
def _listener(where: Namespace, *what: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        where.words(_probe(*what)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield int(_line(process)), process
    finally:
        _stop(process)


def _probe(*words: str) -> list[str]:
    # Without site packages, Python starts in a third of the time.
    return [sys.executable, "-I", "-S", str(Path(probe.__file__)), *words]


def _ask(words: Sequence[str]) -> str:
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        return _line(process)


def _line(process: subprocess.Popen[str]) -> str:
    """The probes bound their own time, so an answer or the end comes."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line.strip():
        raise ClusterError("cannot measure the cluster: a probe inside it gave no answer")
    return line


def _stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
