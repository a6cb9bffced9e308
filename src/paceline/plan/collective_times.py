"""Selects the measurements that the time of a collective is derived from.

The preferred measurement has the same backend, operation, algorithm and link. Rounds of other
algorithms have the same form, so they stand in where one was not measured.

Between hosts, a measurement of two workers shows the rounds of any number of them. Workers of one
host share its cores and its memory, so their rounds become slower the more of them there are: the
times are those of measurements with about as many workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.errors import MissingMeasurementError
from paceline.plan.calibration import Calibration, CollectiveTiming
from paceline.plan.collective_cost import (
    RoundTimes,
    measured_round_trips,
    nominal_round_times,
)
from paceline.plan.links import Link
from paceline.plan.message_rounds import round_count

STAND_INS = (
    ("all_reduce", "ring"),
    ("all_reduce", "library"),
    ("reduce_scatter", "library"),
    ("all_gather", "library"),
    ("send_recv", "library"),
    ("all_reduce", "halving_doubling"),
    ("all_reduce", "tree"),
    ("all_reduce", "root"),
)
"""Whose rounds stand in for those that were not measured, the most similar first."""

RINGS = ("library", "ring")
"""Algorithms whose workers send to one neighbor and receive from the other."""
WITH_CALL = ("library", "root")
"""Algorithms with a cost of the call besides that of rounds; those of the others are calls."""
ONE_WAY = ("send_recv", "library")
RING_OF_CALLS = {"gloo": {("reduce_scatter", "library"): ("all_reduce", "ring")}}
"""By backend: collectives whose rounds are those of another algorithm. Gloo's reduce-scatter is a
whole all-reduce, so the communicator has its own (comm/torch_distributed.py)."""
FEWEST = 2
"""Hosts of a collective, or workers of one host."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the workers of a collective are connected by."""

    backend: str
    is_across_hosts: bool
    link: Link | None
    """Between the hosts."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A measurement, and what others say about it."""

    timing: CollectiveTiming
    round_trips: float
    message_seconds: float | None
    """Of a small message of its rounds on the same link, without the link; None if it was not
    measured."""
    message_seconds_per_byte: float
    """Of a large one-way message on the same link; 0 if it was not measured."""
    software_seconds_per_byte: float
    """Of the same collective within a host, which no link limits; 0 if it was not measured."""


class CollectiveMeasurements:
    """The collectives of a calibration; selections are kept, because all samples need them."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._timings = [each for each in calibration.collectives if len(each.points) > 1]
        self._known: dict[tuple[str, str, Place], tuple[Selected, ...]] = {}

    def select(self, operation: str, algorithm: str, place: Place) -> tuple[Selected, ...]:
        """The most similar measurements, by ascending number of workers; empty if there are none.

        Between hosts, the one with the fewest workers.
        """
        key = operation, algorithm, place
        if key not in self._known:
            self._known[key] = self._select(operation, algorithm, place)
        return self._known[key]

    def links(self, backend: str) -> set[Link]:
        """Between hosts, that collectives were measured on."""
        across = "gloo" if backend == "hierarchical" else backend
        return {
            each.link
            for each in self._timings
            if each.hosts > 1 and each.backend == across and each.link is not None
        }

    def _select(self, operation: str, algorithm: str, place: Place) -> tuple[Selected, ...]:
        candidates = [
            each
            for each in self._timings
            if (each.backend, each.hosts > 1) == (place.backend, place.is_across_hosts)
        ]
        for wanted in ((operation, algorithm), *STAND_INS):
            same = [each for each in candidates if (each.operation, each.algorithm) == wanted]
            if same:
                nearest = min(_distance(each.link, place.link) for each in same)
                by_workers: dict[int, CollectiveTiming] = {}
                for each in sorted(same, key=lambda each: each.workers):
                    if _distance(each.link, place.link) == nearest:
                        by_workers.setdefault(each.workers, each)
                found = tuple(
                    Selected(
                        timing,
                        measured_round_trips(same),
                        self._message_seconds(timing),
                        self._message_seconds_per_byte(timing),
                        self._software_seconds_per_byte(timing),
                    )
                    for timing in by_workers.values()
                )
                return found[:1] if place.is_across_hosts else found
        return ()

    def _message_seconds(self, timing: CollectiveTiming) -> float | None:
        collective = timing.operation, timing.algorithm
        wanted = RING_OF_CALLS.get(timing.backend, {}).get(collective, ONE_WAY)
        message = self._on_same_link(timing, wanted)
        if message is None:
            return None
        # The receiver first tells the sender that it is ready.
        round_trip = message.link.round_trip_seconds if message.link else 0.0
        return max(0.0, RoundTimes.of(message).latency_seconds - round_trip)

    def _message_seconds_per_byte(self, timing: CollectiveTiming) -> float:
        message = self._on_same_link(timing, ONE_WAY)
        return 0.0 if message is None else RoundTimes.of(message).seconds_per_byte

    def _on_same_link(
        self, timing: CollectiveTiming, wanted: tuple[str, str]
    ) -> CollectiveTiming | None:
        """Of this operation and algorithm, preferably with as many workers."""
        by_workers = sorted(self._timings, key=lambda each: each.workers != timing.workers)
        for each in by_workers:
            is_same = (each.backend, each.hosts > 1, each.link) == (
                timing.backend,
                timing.hosts > 1,
                timing.link,
            )
            if (each.operation, each.algorithm) == wanted and is_same:
                return each
        return None

    def _software_seconds_per_byte(self, timing: CollectiveTiming) -> float:
        for each in sorted(self._timings, key=lambda each: each.workers):
            is_same = (each.backend, each.operation, each.algorithm) == (
                timing.backend,
                timing.operation,
                timing.algorithm,
            )
            if is_same and each.hosts == 1:
                return RoundTimes.of(each).seconds_per_byte
        return 0.0


class CollectiveTimes:
    """Times of collectives, by operation, algorithm, size, workers and link."""

    def __init__(
        self, measurements: CollectiveMeasurements, random: np.random.Generator | None = None
    ) -> None:
        """With `random`, times of a bootstrap sample of the measurements."""
        self._measurements, self._calibration = measurements, measurements.calibration
        self._seed = None if random is None else int(random.integers(2**63))
        self._known: dict[tuple[str, str, Place, int], RoundTimes] = {}

    def most_members(self, operation: str, algorithm: str, place: Place) -> int:
        """The most workers that this collective, or what stands in, was measured with."""
        selected = self._measurements.select(operation, algorithm, place)
        return selected[-1].timing.workers if selected else FEWEST

    def most_workers(self, place: Place) -> int:
        """The largest measured number of workers on one host, or on several."""
        collectives, runs = self._calibration.collectives, self._calibration.runs
        measured = [(one.workers, one.hosts) for one in collectives]
        measured += [(one.workers, one.hosts) for one in runs]
        is_across = place.is_across_hosts
        return max([2, *(workers for workers, hosts in measured if (hosts > 1) == is_across)])

    def rounds(
        self, operation: str, algorithm: str, place: Place, members: int = FEWEST
    ) -> RoundTimes:
        """Time of one round; MissingMeasurementError if neither this nor a similar one is known.

        `members` are hosts, or within one host workers.

        In a ring of two hosts, both directions share a connection, and slow each other. In larger
        rings they do not: a byte takes as long as in one-way messages, and gloo's all-reduce takes
        as long as its rounds. Other collectives keep the cost of their calls. All-reduce by root
        has calls of one peer while the root sends to others.
        """
        is_larger = place.is_across_hosts and members > FEWEST and algorithm in (*RINGS, "root")
        key = operation, algorithm, place, FEWEST + is_larger if place.is_across_hosts else members
        if key not in self._known:
            times = self._round_times(operation, algorithm, place, members)
            if is_larger and (one_way := self._one_way(operation, algorithm, place)):
                fastest = one_way if algorithm in RINGS else times
                is_of_gloo = place.backend == "gloo" and operation == "all_reduce"
                times = times.in_larger_cluster(fastest, has_call=not is_of_gloo)
            self._known[key] = times
        return self._known[key]

    def _one_way(self, operation: str, algorithm: str, place: Place) -> RoundTimes | None:
        """Of single messages on the same link; None if the rounds are not those of two workers."""
        found = self._measurements.select(operation, algorithm, place)
        message = self._measurements.select(*ONE_WAY, place)
        if not found or not message:
            return None
        timing, other = message[0].timing, found[0].timing
        is_comparable = other.workers == FEWEST and timing.link == other.link
        if not is_comparable or (timing.operation, timing.algorithm) != ONE_WAY:
            return None
        return self.rounds(*ONE_WAY, place)

    def _round_times(
        self, operation: str, algorithm: str, place: Place, members: int
    ) -> RoundTimes:
        if selected := self._measurements.select(operation, algorithm, place):
            # The measured numbers of workers next to this one.
            below = [each for each in selected if each.timing.workers <= members] or selected[:1]
            above = [each for each in selected if each.timing.workers >= members] or selected[-1:]
            fewer, more = below[-1].timing.workers, above[0].timing.workers
            times = self._of_selected(below[-1], place)
            if fewer < members < more:
                # What workers of a host wait for a core is in each round, so calls take as long
                # as the number of their rounds says.
                share = (members - fewer) / (more - fewer)
                other = self._of_selected(above[0], place)
                measured = below[-1].timing.operation, below[-1].timing.algorithm
                rounds = [round_count(*measured, each) for each in (fewer, members, more)]
                found = times.with_call(1 / rounds[0]).towards(
                    other.with_call(1 / rounds[2]), share
                )
                return found.with_call(rounds[1])
            return times
        if place.is_across_hosts and place.link is not None:
            return nominal_round_times(place.link)
        if place.is_across_hosts:
            raise MissingMeasurementError(
                f"the time of collectives on two hosts ({place.backend})",
                "`paceline comm --json FILE` of two workers on two hosts, with at least two sizes,"
                " or give --link",
            )
        is_in_memory = place.backend == "shm"
        communicators = " --communicators torch,hierarchical" if is_in_memory else ""
        raise MissingMeasurementError(
            f"the time of collectives on one host ({place.backend})",
            f"`paceline comm{communicators} --json FILE` of two workers, with at least two sizes",
        )

    def _of_selected(self, selected: Selected, place: Place) -> RoundTimes:
        random = None if self._seed is None else np.random.default_rng(self._seed)
        timing, link = selected.timing, place.link
        times = RoundTimes.of(
            timing,
            selected.round_trips,
            random,
            selected.message_seconds,
            has_call=timing.algorithm in WITH_CALL,
            least_seconds_per_byte=selected.message_seconds_per_byte,
        )
        if link is None:
            return times
        if timing.link is None:
            return nominal_round_times(link)
        return times.on_link(timing.link, link, selected.software_seconds_per_byte)

    def extrapolations(self, place: Place) -> list[str]:
        """Why times are not those of a measured link."""
        measured = self._measurements.links(place.backend)
        if place.is_across_hosts and place.link is not None and place.link not in measured:
            links = ", ".join(sorted(map(str, measured))) or "none"
            return [f"collectives on link {place.link}, measured {links}"]
        return []


def _distance(measured: Link | None, link: Link | None) -> float:
    """How different two links are; 0 if they are equal."""
    if measured == link:
        return 0.0
    if measured is None or link is None:
        return math.inf
    rates = abs(math.log(measured.bits_per_second / link.bits_per_second))
    return 1e-9 + rates + 100 * abs(measured.round_trip_seconds - link.round_trip_seconds)
