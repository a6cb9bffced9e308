"""A step with parameter servers: their links and their sums are the bottleneck."""

from __future__ import annotations

from paceline.plan.collective_cost import NO_TIME, CollectiveTime
from paceline.plan.job import Job, StepTime

SUM_SHARE_OF_UPDATE = 0.5
"""Memory traffic of adding a gradient, relative to that of an update with momentum."""

FIRST_ARRIVAL = 0.7
"""Share of the time of sending all weights after which the first worker has them. They share the
link of the server, but not equally (docs/results.md#accuracy-of-plans)."""


def parameter_server_step(job: Job) -> StepTime:
    """Each server receives a shard of all gradients, sums, updates and sends the weights back."""
    servers = int(job.option("servers", 1))
    up = _server_link_bytes(job, servers)
    transfer = job.collective("send_recv", "library", up) if up else NO_TIME
    additions = SUM_SHARE_OF_UPDATE * (job.workers - 1)
    update = job.compute.update / servers
    if job.options.get("mode", "sync") != "sync":
        return _asynchronous(job, transfer, update)
    compute = job.compute.seconds - job.compute.update
    # Gradients follow once the first worker has its weights, while others still receive. No worker
    # has them before one share of the weights was sent.
    remote = job.workers - job.workers // job.hosts
    share = job.collective("send_recv", "library", up / remote) if up else NO_TIME
    first_arrival = max(FIRST_ARRIVAL * transfer.seconds, share.seconds)
    exchange = first_arrival + transfer.seconds + update * (1 + additions)
    return StepTime(compute + exchange, compute, exchange, 0.0, up)


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
    link = job.workers * remote * job.gradient_bytes
    return StepTime(seconds, compute, max(0.0, seconds - compute), 0.0, link)
