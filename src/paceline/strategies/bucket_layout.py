"""Which gradients are reduced together, by their sizes. Also used to plan, without torch."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 2**20
DEFAULT_MIB = 2.0
"""Smaller buckets cost more to start than to copy; larger ones start later."""
FIRST_MIB = 1.0
ONE_BUCKET_MIB = 1e6


def split(
    sizes_bytes: Sequence[int], order: Sequence[int], first_mib: float, bucket_mib: float
) -> list[list[int]]:
    """Split weights, in the order of their gradients, into buckets in the order of their starts.

    A bucket ends when it is full; the first one is smaller, so that communication starts early. A
    gradient that fills a bucket does not wait for others.
    """
    if bucket_mib >= ONE_BUCKET_MIB:
        return [[*order]]
    first_mib = min(first_mib, bucket_mib)
    buckets: list[list[int]] = []
    collected: list[int] = []
    for index in order:
        full = MIB * (bucket_mib if buckets else first_mib)
        if sizes_bytes[index] >= full:
            buckets.append([index])
            continue
        collected.append(index)
        if sum(sizes_bytes[each] for each in collected) >= full:
            buckets.append(collected)
            collected = []
    return [*buckets, collected] if collected else buckets


def split_in_order(
    sizes_bytes: Sequence[int], order: Sequence[int], first_mib: float, bucket_mib: float
) -> list[list[int]]:
    """Split without reordering, as DistributedDataParallel does.

    So did older versions of `overlap`, whose checkpoints do not contain the buckets.
    """
    buckets: list[list[int]] = [[]]
    for index in order:
        buckets[-1].append(index)
        full = MIB * (bucket_mib if len(buckets) > 1 else first_mib)
        if sum(sizes_bytes[each] for each in buckets[-1]) >= full:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]
