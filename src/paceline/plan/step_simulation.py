"""The duration of one training step for each strategy, from compute and collective times.

Every strategy waits for its slowest worker, so `Compute` is that worker's. Each function below
follows the strategy of the same name in strategies/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import MissingMeasurementError, NoPredictionError
from paceline.plan.calibration import Gradient
from paceline.plan.collective_cost import CollectiveTime, in_sequence
from paceline.plan.job import Job, StepTime
from paceline.plan.overlap_simulation import (
    GLOO_THREADS,
    OverlapTimes,
    Transfer,
    simulate_overlap,
)
from paceline.plan.server_step import parameter_server_step
from paceline.strategies.bucket_layout import DEFAULT_MIB, FIRST_MIB, split, split_in_order

DDP_MIB = 25.0
"""Default bucket size of DistributedDataParallel."""
SHARD_ALIGN_BYTES = 64
SMALL_TENSOR_SHARE = 0.1
"""Of the layer that a tensor belongs to."""


def simulate_step(job: Job) -> StepTime:
    """Return the duration of a step; NoPredictionError if the strategy has none."""
    if job.workers == 1:
        return StepTime(job.compute.seconds, job.compute.seconds, 0.0)
    if job.strategy not in STRATEGIES:
        raise NoPredictionError(
            f"--strategy {job.strategy}: no plan for several workers: choose from"
            f" {', '.join(STRATEGIES)}"
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


def _preset(strategy: str, options: Mapping[str, str]) -> tuple[str, bool]:
    text = options.get("flat", str(PRESETS[strategy][1]))
    return algorithm_of(strategy, options), text.lower() == "true"


def has_concurrent_collectives(strategy: str, options: Mapping[str, str]) -> bool:
    """Whether the strategy starts the collectives of all tensors before it waits for the first."""
    if strategy not in PRESETS or options.get("codec", "none") != "none":
        return False
    return _preset(strategy, options) == ("library", False)


def _averaging(job: Job) -> StepTime:
    chosen, is_flat = _preset(job.strategy, job.options)
    at_once = [job.gradients] if is_flat else [[each] for each in job.gradients]
    times = in_sequence([job.reduction(chosen, each) for each in at_once])
    if has_concurrent_collectives(job.strategy, job.options):
        transfers = [Transfer(0.0, time) for time in times]
        slowdown = job.concurrent_slowdown
        exchange = simulate_overlap(0.0, transfers, concurrent_slowdown=slowdown).end
    else:
        exchange = math.fsum(time.seconds for time in times)
    return _exposed(job, exchange, _reduced_bytes(job, chosen, at_once))


def _exposed(job: Job, exchange: float, link_bytes: float) -> StepTime:
    """A step that computes, then communicates."""
    compute = job.compute.seconds
    return StepTime(compute + exchange, compute, exchange, 0.0, link_bytes)


def _reduced_bytes(job: Job, algorithm: str, at_once: Sequence[Sequence[Gradient]]) -> float:
    return math.fsum(job.reduction_bytes(algorithm, each) for each in at_once)


BUCKET_STRATEGIES = ("overlap", "ddp")


def algorithm_of(strategy: str, options: Mapping[str, str]) -> str:
    """That averages gradients or weights."""
    default, _ = PRESETS.get(strategy, ("library", False))
    return options.get("algorithm", default)


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


def _in_buckets(job: Job) -> StepTime:
    algorithm = algorithm_of(job.strategy, job.options)
    # A codec or an algorithm of comm/algorithms runs in one background thread.
    threads = GLOO_THREADS if algorithm == "library" and job.codec is None else 1
    layout = bucket_layout(job) or []
    buckets = [[job.gradients[index] for index in bucket] for bucket in layout]
    ready = [max(each.ready for each in bucket) for bucket in buckets]
    backward = job.compute.backward + job.launch_seconds
    starts = [when * backward for when in ready]
    reductions = in_sequence([job.reduction(algorithm, each) for each in buckets], starts)
    transfers = [*map(Transfer, ready, reductions)]
    times = simulate_overlap(backward, transfers, threads, contention=job.contention)
    return _overlapped(job, times, _reduced_bytes(job, algorithm, buckets))


def _overlapped(job: Job, times: OverlapTimes, link_bytes: float) -> StepTime:
    compute = job.compute
    seconds = compute.input + compute.forward + times.end + compute.update
    return StepTime(seconds, compute.seconds, times.end - times.backward, times.hidden, link_bytes)


def _sharded(job: Job) -> StepTime:
    padded = _padded_bytes(job)
    exchange = math.fsum(
        time.seconds
        for time in in_sequence([_reduce_scatter(job, padded), _all_gather(job, padded)])
    )
    update = job.compute.update / job.workers
    compute = job.compute.seconds - job.compute.update + update
    link = job.link_bytes("all_reduce", "library", padded)
    return StepTime(compute + exchange, compute, exchange, 0.0, link)


def _fsdp(job: Job) -> StepTime:
    """Weights are gathered for both passes, block by block, and gradients are reduce-scattered."""
    blocks = fsdp_blocks([each.size_bytes for each in job.gradients])
    exchange = math.fsum(
        _reduce_scatter(job, size).seconds + 2 * _all_gather(job, size).seconds for size in blocks
    )
    compute = job.compute.seconds - job.compute.update * (1 - 1 / job.workers)
    compute += job.launch_seconds
    link = 1.5 * job.link_bytes("all_reduce", "library", sum(blocks))
    return StepTime(compute + exchange, compute, exchange, 0.0, link)


def fsdp_blocks(sizes_bytes: Sequence[int]) -> list[int]:
    """Sizes of layers: a bias or a norm belongs to the weight before it.

    The modules that the blocks really are cannot be told from the sizes of tensors.
    """
    blocks: list[int] = []
    for size in sizes_bytes:
        if blocks and size < SMALL_TENSOR_SHARE * blocks[-1]:
            blocks[-1] += size
        else:
            blocks.append(size)
    return blocks


def _shared(job: Job) -> StepTime:
    """Workers of a host sum and update a shard each, in shared memory: half of an all-reduce."""
    if job.hosts > 1:
        raise MissingMeasurementError("the time of strategy shared on several hosts", "--hosts 1")
    exchange = job.collective("all_reduce", "library", job.gradient_bytes).seconds / 2
    compute = job.compute.seconds - job.compute.update * (1 - 1 / job.workers)
    return StepTime(compute + exchange, compute, exchange)


def _padded_bytes(job: Job) -> float:
    align = SHARD_ALIGN_BYTES
    total = sum(-(-each.size_bytes // align) * align for each in job.gradients)
    return float(-(-total // (job.workers * align)) * job.workers * align)


def _reduce_scatter(job: Job, size_bytes: float) -> CollectiveTime:
    return job.collective("reduce_scatter", "library", size_bytes)


def _all_gather(job: Job, size_bytes: float) -> CollectiveTime:
    return job.collective("all_gather", "library", size_bytes)


def _periodic(
    every_option: str, every_default: int, averages_state: bool
) -> Callable[[Job], StepTime]:
    def step(job: Job) -> StepTime:
        every = job.option(every_option, every_default)
        size = job.gradient_bytes + (job.optimizer_state_bytes if averages_state else 0)
        algorithm = algorithm_of(job.strategy, job.options)
        outer = job.collective("all_reduce", algorithm, size).seconds / every
        compute = job.compute.seconds * job.local_factor
        link = job.link_bytes("all_reduce", algorithm, size) / every
        return StepTime(compute + outer, compute, outer, 0.0, link)

    return step


STRATEGIES: dict[str, Callable[[Job], StepTime]] = {
    **dict.fromkeys(PRESETS, _averaging),
    **dict.fromkeys(BUCKET_STRATEGIES, _in_buckets),
    "sharded": _sharded,
    "fsdp": _fsdp,
    "shared": _shared,
    "parameter_server": parameter_server_step,
    "local_sgd": _periodic("every", 8, averages_state=True),
    "easgd": _periodic("tau", 6, averages_state=False),
}


def exchanges_of(job: Job) -> list[tuple[str, str, float]]:
    """Operation, algorithm and bytes of the collectives after the backward pass, in order.

    Of strategies without buckets and servers; those of periodic strategies follow the last of
    their local steps.
    """
    if job.strategy in PRESETS:
        algorithm, is_flat = _preset(job.strategy, job.options)
        sizes = [job.gradient_bytes] if is_flat else [each.size_bytes for each in job.gradients]
        return [("all_reduce", algorithm, size) for size in sizes]
    if job.strategy == "sharded":
        padded = _padded_bytes(job)
        return [("reduce_scatter", "library", padded), ("all_gather", "library", padded)]
    names = ", ".join([*PRESETS, *BUCKET_STRATEGIES, "sharded"])
    raise NoPredictionError(
        f"--racks: no plan for strategy {job.strategy}: choose from {names}, or omit --racks"
    )


def local_steps(strategy: str, options: Mapping[str, str]) -> int:
    """Steps between two synchronizations."""
    option = {"local_sgd": ("every", "8"), "easgd": ("tau", "6")}.get(strategy)
    return int(options.get(*option)) if option else 1
