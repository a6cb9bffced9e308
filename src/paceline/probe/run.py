"""Measuring, as one of the workers."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm import hierarchical
from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json
from paceline.comm.rank_info import Place
from paceline.errors import UsageError
from paceline.launch.agreement import succeed_together
from paceline.launch.cluster_account import cluster_account
from paceline.launch.member import connection, has_own_gpu
from paceline.probe.limits import Limit, link_limit
from paceline.probe.operations import ELEMENT_BYTES
from paceline.probe.plan import Plan, Way, check_workers
from paceline.probe.progress import Show
from paceline.probe.results import Record, make_record
from paceline.probe.sizes import size_text
from paceline.probe.timing import Timed, copy_bytes_per_second, time_size
from paceline.training.device import choose_device, computing

LEAST_COPIED_BYTES = 2**26
"""More than caches hold, so that it is the memory that is measured."""


def run(place: Place, plan: Plan, show: Show = lambda text, done, total: None) -> Record | None:
    """Measure together with the other workers; the first one gets the record. Collective.

    The first worker's plan counts.
    """
    check_workers(place.world_size)
    config = replace(
        plan.machines, nnodes=place.nnodes, nproc_per_node=place.local_world_size, hosts=()
    )
    with (
        computing(config, place.local_rank),
        connection(config, place, "comm", is_agreed=False) as network,
        contextlib.ExitStack() as stack,
    ):
        plan = Plan.from_dict(broadcast_json(network, plan.to_dict()))
        communicators: dict[str, Communicator] = {"torch": network}
        if "hierarchical" in plan.communicators:
            communicators["hierarchical"] = stack.enter_context(
                hierarchical.over(network, place.node)
            )
        device = choose_device(config, place.local_rank)
        buffer = succeed_together(network, lambda: _allocate(plan, place.world_size, device))
        timed, left_out = _time_all(plan, communicators, buffer, show)
        memory: Limit | None = None
        # Between GPUs the memory of neither is what limits.
        if place.nnodes == 1 and device.type == "cpu":
            rate = copy_bytes_per_second(buffer, network)
            memory = Limit("memory", rate, "a plain copy by all workers at once")
        network.barrier().wait()
    if place.rank:
        return None
    cluster = cluster_account()
    limits = {"link": link_limit(plan, cluster), "memory": memory}
    return make_record(plan, place, timed, left_out, limits, cluster, _tensors(device, place))


def _time_all(
    plan: Plan, communicators: dict[str, Communicator], buffer: Tensor, show: Show
) -> tuple[list[Timed], list[tuple[Way, int]]]:
    """And what was left out because a smaller size had taken too long."""
    ways = plan.ways()
    timed: list[Timed] = []
    left_out: list[tuple[Way, int]] = []
    for number, size in enumerate(plan.sizes):
        show(f"{size_text(size)}, {len(ways)} ways", number, len(plan.sizes))
        left_out += [(way, size) for way in plan.ways() if way not in ways]
        if not ways:
            continue
        these = time_size(size, ways, communicators, buffer, plan)
        timed += these
        ways = [each.way for each in these if min(each.samples) <= plan.most_seconds]
    return timed, left_out


def _tensors(device: torch.device, place: Place) -> str:
    """Where the tensors are; as record and tables say it."""
    if device.type == "cpu":
        return "main memory"
    return "own GPUs" if has_own_gpu(place) else "shared GPUs"


def _allocate(plan: Plan, workers: int, device: torch.device) -> Tensor:
    size_bytes = max(plan.sizes[-1], LEAST_COPIED_BYTES)
    try:
        # Written to, so that the memory is there before anything is timed.
        return torch.ones(size_bytes // ELEMENT_BYTES + workers, device=device)
    except RuntimeError:
        raise UsageError(
            f"--max-size: a worker has no memory for {size_text(size_bytes)}: give less"
        ) from None
