"""The duration of one training step for each strategy, from compute and collective times.

Every strategy waits for its slowest worker, so `Compute` is that worker's. Each function below
follows the strategy of the same name in strategies/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import UsageError, suggest
from paceline.plan.calibration import Contention, Gradient
from paceline.plan.collective_cost import NO_TIME, CollectiveTime, rounds_of
from paceline.plan.overlap_simulation import (
    GLOO_THREADS,
    OverlapTimes,
    Transfer,
    simulate_overlap,
)
from paceline.strategies.bucket_layout import DEFAULT_MIB, FIRST_MIB, split, split_in_order

DDP_MIB = 25.0
"""Default bucket size of DistributedDataParallel."""
SHARD_ALIGN_BYTES = 64
SUM_SHARE_OF_UPDATE = 0.5
"""Memory traffic of adding a gradient, relative to that of an update with momentum."""

Collective = Callable[[str, str, float], CollectiveTime]
"""Time of a collective, by operation, algorithm and bytes."""
CodecCost = Callable[[str, int], tuple[float, bool, float]]
"""Of a codec and a gradient of some bytes: wire bytes, whether they are gathered, seconds."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one step of the slowest worker."""

    input: float
    forward: float
    backward: float
    update: float

    @property
    def seconds(self) -> float:
        return self.input + self.forward + self.backward + self.update

    def scaled(self, factor: float) -> Compute:
        return Compute(
            *(factor * each for each in (self.input, self.forward, self.backward, self.update))
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What one step computes and exchanges."""

    strategy: str
    options: Mapping[str, str]
    workers: int
    hosts: int
    gradients: Sequence[Gradient]
    optimizer_state_bytes: int
    compute: Compute
    collective: Collective
    codec_cost: CodecCost
    contention: Contention = field(default_factory=Contention)
    local_factor: float = 1.0
    """Compute time of the slowest worker over several local steps, relative to `compute`."""

    @property
    def gradient_bytes(self) -> int:
        return sum(each.size_bytes for each in self.gradients)

    def option(self, name: str, default: float) -> float:
        text = self.options.get(name)
        try:
            return default if text in (None, "auto", "measured") else float(text or "")
        except ValueError:
            raise UsageError(f"-o {name}: must be a number, got {text}") from None


@dataclass(frozen=True, slots=True)
class StepTime:
    seconds: float
    compute_seconds: float
    """Of the slowest worker, without contention by communication."""
    exchange_seconds: float
    """Exposed communication."""
    hidden_seconds: float = 0.0
    """Overlapped communication."""
    link_bytes: float = 0.0
    """That the busiest link carries in one direction."""


def simulate_step(job: Job) -> StepTime:
    """Return the duration of a step; UsageError if the strategy is not known."""
    if job.workers == 1:
        return StepTime(job.compute.seconds, job.compute.seconds, 0.0)
    if job.strategy not in STRATEGIES:
        raise UsageError(
            f"--strategy: no plan for {job.strategy!r}: {suggest(job.strategy, STRATEGIES)}"
        )
    return STRATEGIES[job.strategy](job)


PRESETS = {
    "gather_scatter": ("root", False),
    "allreduce": ("library", False),
    "ring": ("ring", True),
    "tree": ("tree", True),
    "halving_doubling": ("halving_doubling", True),
}
"""Algorithm of gradient averaging, and whether it reduces all gradients at once."""


def _preset(job: Job) -> tuple[str, bool]:
    algorithm, is_flat = PRESETS[job.strategy]
    text = job.options.get("flat", str(is_flat))
    return job.options.get("algorithm", algorithm), text.lower() == "true"


def _averaging(job: Job) -> StepTime:
    chosen, is_flat = _preset(job)
    sizes = [each.size_bytes for each in job.gradients]
    sizes = [sum(sizes)] if is_flat else sizes
    times = [_reduction(job, chosen, size) for size in sizes]
    if chosen == "library" and _codec(job) == "none":
        # All are started before the first is waited for.
        transfers = [Transfer(0.0, time) for time in times]
        exchange = simulate_overlap(0.0, transfers).end
    else:
        exchange = math.fsum(time.seconds for time in times)
    return _exposed(job, exchange, _reduced_bytes(job, chosen, sizes))


def _exposed(job: Job, exchange: float, link_bytes: float) -> StepTime:
    """A step that computes, then communicates."""
    compute = job.compute.seconds
    return StepTime(compute + exchange, compute, exchange, 0.0, link_bytes)


def _codec(job: Job) -> str:
    return job.options.get("codec", "none")


def _reduction(job: Job, algorithm: str, size_bytes: int) -> CollectiveTime:
    """Sum a gradient over all workers, with the codec of the job."""
    codec = _codec(job)
    if codec == "none":
        return job.collective("all_reduce", algorithm, size_bytes)
    wire_bytes, gathers, seconds = job.codec_cost(codec, size_bytes)
    if gathers:
        time = job.collective("all_gather", "library", wire_bytes * job.workers)
    else:
        time = job.collective("all_reduce", algorithm, wire_bytes)
    return time + CollectiveTime(0.0, seconds)


def _reduced_bytes(job: Job, algorithm: str, sizes: Sequence[int]) -> float:
    total = 0.0
    for size in sizes:
        wire, gathers = float(size), False
        if _codec(job) != "none":
            wire, gathers, _ = job.codec_cost(_codec(job), size)
        if gathers:
            total += link_bytes_of("all_gather", "library", job.workers, wire * job.workers)
        else:
            total += link_bytes_of("all_reduce", algorithm, job.workers, wire)
    return total


def link_bytes_of(operation: str, algorithm: str, workers: int, size_bytes: float) -> float:
    rounds = rounds_of(operation, algorithm, workers, size_bytes)
    return math.fsum(each.count * each.link_bytes for each in rounds)


def _overlap(job: Job) -> StepTime:
    algorithm = job.options.get("algorithm", "library")
    threads = GLOO_THREADS if algorithm == "library" and _codec(job) == "none" else 1
    return _in_buckets(job, algorithm, threads)


def _ddp(job: Job) -> StepTime:
    return _in_buckets(job, "library", GLOO_THREADS if _codec(job) == "none" else 1)


def bucket_layout(job: Job) -> list[list[int]] | None:
    """Gradients that are reduced together, in order; None if the strategy has no buckets."""
    order = ready_order(job.gradients)
    sizes = [each.size_bytes for each in job.gradients]
    if job.strategy == "overlap":
        first = job.option("first_bucket_mib", FIRST_MIB)
        return split(sizes, order, first, job.option("bucket_mib", DEFAULT_MIB))
    if job.strategy == "ddp":
        full = job.option("bucket_mib", DDP_MIB)
        first = FIRST_MIB if "bucket_mib" not in job.options else full
        return split_in_order(sizes, order, first, full)
    return None


def ready_order(gradients: Sequence[Gradient]) -> list[int]:
    """Indices in the order in which the gradients are ready; the last of equals first."""
    return sorted(range(len(gradients)), key=lambda index: (gradients[index].ready, -index))


def _in_buckets(job: Job, algorithm: str, threads: int) -> StepTime:
    layout = bucket_layout(job) or []
    sizes = [sum(job.gradients[index].size_bytes for index in bucket) for bucket in layout]
    ready = [max(job.gradients[index].ready for index in bucket) for bucket in layout]
    transfers = [
        Transfer(when, _reduction(job, algorithm, size))
        for when, size in zip(ready, sizes, strict=True)
    ]
    times = simulate_overlap(job.compute.backward, transfers, threads, job.contention)
    return _overlapped(job, times, _reduced_bytes(job, algorithm, sizes))


def _overlapped(job: Job, times: OverlapTimes, link_bytes: float) -> StepTime:
    compute = job.compute
    seconds = compute.input + compute.forward + times.end + compute.update
    return StepTime(seconds, compute.seconds, times.end - times.backward, times.hidden, link_bytes)


def _sharded(job: Job) -> StepTime:
    padded = _padded_bytes(job)
    exchange = _reduce_scatter(job, padded) + _all_gather(job, padded)
    update = job.compute.update / job.workers
    compute = job.compute.seconds - job.compute.update + update
    seconds = compute + exchange.seconds
    link = link_bytes_of("all_reduce", "ring", job.workers, padded)
    return StepTime(seconds, compute, exchange.seconds, 0.0, link)


def _padded_bytes(job: Job) -> float:
    align = SHARD_ALIGN_BYTES
    total = sum(-(-each.size_bytes // align) * align for each in job.gradients)
    return float(-(-total // (job.workers * align)) * job.workers * align)


def _reduce_scatter(job: Job, size_bytes: float) -> CollectiveTime:
    return job.collective("reduce_scatter", "library", size_bytes)


def _all_gather(job: Job, size_bytes: float) -> CollectiveTime:
    return job.collective("all_gather", "library", size_bytes)


def _parameter_server(job: Job) -> StepTime:
    """Each server receives a shard of all gradients, sums, updates and sends the weights back."""
    servers = int(job.option("servers", 1))
    up = _server_link_bytes(job, servers)
    transfer = job.collective("send_recv", "library", up) if up else NO_TIME
    additions = SUM_SHARE_OF_UPDATE * (job.workers - 1)
    update = job.compute.update / servers
    if job.options.get("mode", "sync") != "sync":
        return _asynchronous(job, transfer, update)
    compute = job.compute.seconds - job.compute.update
    exchange = 2 * transfer.seconds + update * (1 + additions)
    return StepTime(compute + exchange, compute, exchange, 0.0, 2 * up)


def _server_link_bytes(job: Job, servers: int) -> float:
    """Bytes of gradients through the busiest link, which is that of a server or of a worker.

    Workers on the host of a server share its memory.
    """
    shard = job.gradient_bytes / servers
    per_host = job.workers / job.hosts
    is_spread = job.options.get("place", "node0") == "spread"
    count = -(-servers // job.hosts) if is_spread else servers
    if job.options.get("mode", "sync") != "sync":
        # One worker at a time; the queue at the server is modeled apart.
        return shard * servers if job.hosts > 1 else 0.0
    at_server = count * shard * (job.workers - per_host)
    elsewhere = servers - (servers // job.hosts if is_spread else 0)
    at_worker = per_host * shard * elsewhere if job.hosts > 1 else 0.0
    return max(at_server, at_worker)


def _asynchronous(job: Job, transfer: CollectiveTime, update: float) -> StepTime:
    """A closed queue: workers compute, then queue for the server (mean value analysis).

    The step time is that of as many updates as there are workers.
    """
    thinking = job.compute.seconds - job.compute.update + 2 * transfer.delay_seconds
    remote = 1 - 1 / job.hosts
    service = remote * transfer.busy_seconds + update
    alone = thinking + remote * transfer.busy_seconds
    queue = throughput = 0.0
    for workers in range(1, job.workers + 1):
        response = service * (1 + queue)
        throughput = workers / (alone + response)
        queue = throughput * response
    seconds = job.workers / throughput
    compute = job.compute.seconds - job.compute.update
    return StepTime(
        seconds, compute, max(0.0, seconds - compute), 0.0, 2 * remote * job.gradient_bytes
    )


def _periodic(
    every_option: str, every_default: int, averages_state: bool
) -> Callable[[Job], StepTime]:
    def step(job: Job) -> StepTime:
        every = job.option(every_option, every_default)
        size = job.gradient_bytes + (job.optimizer_state_bytes if averages_state else 0)
        algorithm = job.options.get("algorithm", "library")
        outer = job.collective("all_reduce", algorithm, size).seconds / every
        compute = job.compute.seconds * job.local_factor
        link = link_bytes_of("all_reduce", algorithm, job.workers, size) / every
        return StepTime(compute + outer, compute, outer, 0.0, link)

    return step


STRATEGIES: dict[str, Callable[[Job], StepTime]] = {
    **dict.fromkeys(PRESETS, _averaging),
    "overlap": _overlap,
    "ddp": _ddp,
    "sharded": _sharded,
    "parameter_server": _parameter_server,
    "local_sgd": _periodic("every", 8, averages_state=True),
    "easgd": _periodic("tau", 6, averages_state=False),
}


def exchanges_of(job: Job) -> list[tuple[str, str, float]]:
    """Operation, algorithm and bytes of the collectives after the backward pass, in order.

    Of strategies without buckets and servers; those of periodic strategies follow the last of
    their local steps.
    """
    if job.strategy in PRESETS:
        algorithm, is_flat = _preset(job)
        sizes = [job.gradient_bytes] if is_flat else [each.size_bytes for each in job.gradients]
        return [("all_reduce", algorithm, size) for size in sizes]
    if job.strategy == "sharded":
        padded = _padded_bytes(job)
        return [("reduce_scatter", "library", padded), ("all_gather", "library", padded)]
    raise UsageError(f"--strategy {job.strategy}: cannot be simulated worker by worker")


def local_steps(strategy: str, options: Mapping[str, str]) -> int:
    """Steps between two synchronizations."""
    option = {"local_sgd": ("every", "8"), "easgd": ("tau", "6")}.get(strategy)
    return int(options.get(*option)) if option else 1
