"""Simulation of single messages over links that they share: exact, for small worlds.

`messages_of` lists the messages of an algorithm, round by round. A worker starts its next round
when it has sent and received those of the current one. A message takes half a round trip plus its
transfer; messages that share a link, at their sender, their receiver or between racks, share its
bandwidth fairly. `rounds_of` (plan/collective_cost.py) is the closed form of the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EPSILON = 1e-12

Message = tuple[int, int, float]
"""Sender, receiver and bytes."""
Flow = tuple[int, Message]
"""A message and its round."""


@dataclass(frozen=True, slots=True)
class Network:
    """Links of hosts with equally many workers each, in racks of equal size."""

    latency_seconds: float
    """From the start of an empty message until it is received."""
    bytes_per_second: float
    rack_size: int | None = None
    """Hosts per rack; None: all links meet in one switch."""
    oversubscription: float = 1.0
    """Bandwidth of the hosts of a rack, relative to that of the rack's uplink."""
    slow_links: Mapping[int, float] = field(default_factory=dict)
    """Bandwidth of hosts that differ."""
    workers_per_host: int = 1
    local_latency_seconds: float = 0.0
    local_bytes_per_second: float = math.inf
    """Of a worker, in each direction, to others of its host."""

    def latency(self, message: Message) -> float:
        return self.local_latency_seconds if self._is_local(message) else self.latency_seconds

    def _is_local(self, message: Message) -> bool:
        sender, receiver, _ = message
        return sender // self.workers_per_host == receiver // self.workers_per_host

    def capacities(self, workers: int) -> dict[tuple[str, int], float]:
        hosts = -(-workers // self.workers_per_host)
        found = {
            (direction, host): self.slow_links.get(host, self.bytes_per_second)
            for host in range(hosts)
            for direction in ("out", "in")
        }
        for rank in range(workers):
            found["local out", rank] = found["local in", rank] = self.local_bytes_per_second
        if self.rack_size is not None:
            uplink = self.rack_size * self.bytes_per_second / self.oversubscription
            for rack in range(-(-hosts // self.rack_size)):
                found["up", rack] = found["down", rack] = uplink
        return found

    def links(self, message: Message) -> list[tuple[str, int]]:
        """The links that a message uses."""
        if self._is_local(message):
            return [("local out", message[0]), ("local in", message[1])]
        sender, receiver = (rank // self.workers_per_host for rank in message[:2])
        used = [("out", sender), ("in", receiver)]
        if self.rack_size is not None:
            racks = sender // self.rack_size, receiver // self.rack_size
            if racks[0] != racks[1]:
                used += [("up", racks[0]), ("down", racks[1])]
        return used


def messages_of(
    operation: str, algorithm: str, workers: int, size_bytes: float
) -> list[list[Message]]:
    """The messages of each round, as comm/algorithms sends them."""
    chunk, ranks = size_bytes / workers, range(workers)
    shift = [(rank, (rank + 1) % workers, chunk) for rank in ranks]
    if operation in ("reduce_scatter", "all_gather"):
        return [shift] * (workers - 1)
    if operation == "all_reduce" and algorithm in ("ring", "library"):
        return [shift] * (2 * (workers - 1))
    if operation == "all_reduce" and algorithm == "root":
        up = [(rank, 0, size_bytes) for rank in ranks[1:]]
        return [up, _reverse(up)]
    if operation == "all_reduce" and algorithm == "tree":
        up_rounds = [
            [
                (rank + step, rank, size_bytes)
                for rank in ranks[:: 2 * step]
                if rank + step < workers
            ]
            for step in _powers(workers)
        ]
        return [*up_rounds, *(_reverse(each) for each in reversed(up_rounds))]
    if operation == "all_reduce" and algorithm == "halving_doubling":
        return _halving_doubling(workers, size_bytes)
    if operation == "gather":
        return [[(rank, 0, chunk) for rank in ranks[1:]]]
    raise ValueError(f"no messages are known for {operation} by {algorithm}")


def _reverse(messages: Sequence[Message]) -> list[Message]:
    return [(receiver, sender, size) for sender, receiver, size in messages]


def _powers(workers: int) -> list[int]:
    """1, 2, 4, ... below the number of workers."""
    return [1 << bit for bit in range((workers - 1).bit_length())]


def _halving_doubling(workers: int, size_bytes: float) -> list[list[Message]]:
    active = 1 << (workers.bit_length() - 1)
    extra = workers - active
    ranks = [2 * index if index < extra else index + extra for index in range(active)]
    halving = [
        [
            (ranks[index], ranks[index ^ width], size_bytes * width / active)
            for index in range(active)
        ]
        for width in reversed(_powers(active))
    ]
    pairing = [[(2 * index + 1, 2 * index, size_bytes) for index in range(extra)]] if extra else []
    return [*pairing, *halving, *reversed(halving), *(_reverse(each) for each in pairing)]


def simulate(
    rounds: Sequence[Sequence[Message]], network: Network, starts: Sequence[float]
) -> list[float]:
    """Return when each worker has completed its last round, given when it starts the first."""
    progress = _Progress(rounds, starts)
    capacities = network.capacities(len(starts))
    flows: dict[Flow, float] = {}
    arriving: dict[Flow, float] = {}
    now = min(starts)
    while progress.ready or flows or arriving:
        for flow in [flow for flow, begin in progress.ready.items() if begin <= now + EPSILON]:
            del progress.ready[flow]
            flows[flow] = flow[1][2]
        rates = _fair_rates(list(flows), network, capacities)
        ends = [size / rates[flow] for flow, size in flows.items()]
        ends += [moment - now for moment in (*arriving.values(), *progress.ready.values())]
        step = max(0.0, min(ends))
        now += step
        for flow in [*flows]:
            flows[flow] -= step * rates[flow]
            if flows[flow] <= EPSILON * max(1.0, flow[1][2]):
                del flows[flow]
                arriving[flow] = now + network.latency(flow[1])
        for flow in [flow for flow, moment in arriving.items() if moment <= now + EPSILON]:
            del arriving[flow]
            progress.complete(flow, now)
    return progress.free_at


class _Progress:
    """Which round each worker is in, and which messages can start."""

    def __init__(self, rounds: Sequence[Sequence[Message]], starts: Sequence[float]) -> None:
        self.free_at = [*starts]
        """When each worker completed its last round."""
        self.ready: dict[Flow, float] = {}
        """Messages whose sender and receiver are in their round, and when they can start."""
        self._messages: list[dict[int, list[Message]]] = [{} for _ in starts]
        for index, messages in enumerate(rounds):
            for message in messages:
                for rank in message[:2]:
                    self._messages[rank].setdefault(index, []).append(message)
        self._rounds = [iter([*each]) for each in self._messages]
        self._current = [next(each, None) for each in self._rounds]
        self._left = [
            {index: len(messages) for index, messages in each.items()} for each in self._messages
        ]
        for rank in range(len(starts)):
            self._add_ready(rank)

    def _add_ready(self, rank: int) -> None:
        index = self._current[rank]
        if index is None:
            return
        for message in self._messages[rank][index]:
            sender, receiver, _ = message
            if self._current[sender] == self._current[receiver] == index:
                begin = max(self.free_at[sender], self.free_at[receiver])
                self.ready[index, message] = begin

    def complete(self, flow: Flow, now: float) -> None:
        """Count a message that has arrived; a worker without others starts its next round."""
        index, message = flow
        for rank in message[:2]:
            self._left[rank][index] -= 1
            if not self._left[rank][index]:
                self.free_at[rank] = now
                self._current[rank] = next(self._rounds[rank], None)
                self._add_ready(rank)


def _fair_rates(
    flows: Sequence[Flow],
    network: Network,
    capacities: Mapping[tuple[str, int], float],
) -> dict[Flow, float]:
    """Max-min fair rates: repeatedly fix the flows of the link with the least share for each."""
    used = {key: network.links(key[1]) for key in flows}
    free = dict(capacities)
    users: dict[tuple[str, int], set[Flow]] = {}
    for key, links in used.items():
        for link in links:
            users.setdefault(link, set()).add(key)
    rates: dict[Flow, float] = {}
    while len(rates) < len(flows):
        link = min(users, key=lambda each: free[each] / len(users[each]))
        share = free[link] / len(users[link])
        for key in [*users[link]]:
            rates[key] = share
            for other in used[key]:
                free[other] -= share
                users[other].discard(key)
                if not users[other]:
                    del users[other]
    return rates


def simulated_seconds(
    operation: str, algorithm: str, workers: int, size_bytes: float, network: Network
) -> float:
    """Time of a collective that all workers start together."""
    rounds = messages_of(operation, algorithm, workers, size_bytes)
    return max(simulate(rounds, network, [0.0] * workers), default=math.nan)
