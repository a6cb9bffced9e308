"""All-reduce by size: gloo, paceline's shared memory, MPI, and the limit of the memory.

An in-place sum reads and writes every byte at least once on every worker. Its lower bound is the
time of a plain copy of as many bytes while all workers copy at once.

paceline is measured with tensors in its shared memory, as its strategies use them, and with
ordinary tensors, which have to be copied in and out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from peer_comparison.group import Fleet, Group
from peer_comparison.messages import AllReduce, Copy
from peer_comparison.rounds import (
    Blocks,
    Length,
    Spread,
    milliseconds,
    progress,
    quartiles,
    ratio_text,
    speed_ups,
    take_turns,
    verdict,
)

SIZES_BYTES = [*(4096 * 4**step for step in range(7)), 37 * 2**20, 64 * 2**20, 256 * 2**20]
GOALS = {2: 2.5, 4: 3.0}
"""Required speedup of shared memory over gloo at every size, by world size."""
LIMIT_GOAL, LIMIT_GOAL_BYTES = 0.5, 37 * 2**20
"""Required fraction of the copy's speed at the size of vgg11's gradients."""

GLOO, SHARED, PLAIN, MPI, COPY = "ddp", "shared", "plain", "mpi4py", "copy"
GROUPS = {PLAIN: SHARED, COPY: GLOO}
"""The group that also runs the copy, which does not depend on a contender."""


@dataclass(frozen=True)
class Row:
    size_bytes: int
    gloo: Spread | None
    shared: Spread | None
    plain: Spread | None
    """Shared memory with ordinary tensors."""
    mpi: Spread | None
    copy: Spread | None
    speed_up: Spread | None
    """Speedup of shared memory over gloo."""
    of_limit: Spread | None
    """Time of a copy as a fraction of the shared-memory sum."""


def compare_collectives(fleet: Fleet, sizes_bytes: list[int], length: Length) -> dict[str, Any]:
    """Measure all sizes, print the table line by line and return it."""
    names = fleet.starting([GLOO, SHARED, MPI])
    rows = []
    show_head(fleet.world_size)
    for size_bytes in sizes_bytes:
        with progress(f"all-reduce of {size_text(size_bytes)}, {fleet.world_size} workers"):
            blocks = measure(fleet, names, size_bytes, length)
        rows.append(row(size_bytes, blocks))
        show(rows[-1], GOALS.get(fleet.world_size))
    show_goals(rows, GOALS.get(fleet.world_size))
    return {"workers": fleet.world_size, "rows": [asdict(each) for each in rows]}


def measure(fleet: Fleet, names: list[str], size_bytes: int, length: Length) -> Blocks:
    def run(name: str, times: int) -> float | None:
        request = (
            Copy(size_bytes, times)
            if name == COPY
            else AllReduce(size_bytes, times, is_plain=name == PLAIN)
        )

        def action(group: Group) -> float:
            return group.seconds(request)

        return fleet.attempt(GROUPS.get(name, name), action)

    present = fleet.starting(names)
    present += [name for name, group in GROUPS.items() if group in present]
    # The first call is slow; it determines the number of calls for the next estimate.
    first = {name: seconds for name in present if (seconds := run(name, 1)) is not None}
    first = {
        name: seconds
        for name, each in first.items()
        if (seconds := run(name, min(20, length.count(each)))) is not None
    }
    times = {name: length.count(seconds) for name, seconds in first.items()}
    repeats = length.repeats(sum((times[name] + 1) * each for name, each in first.items()))
    return take_turns(list(first), repeats, lambda name: run(name, times[name]))


def row(size_bytes: int, blocks: Blocks) -> Row:
    def spread(name: str) -> Spread | None:
        return Spread.of_blocks(blocks[name]) if name in blocks else None

    def ratio(own: str, reference: str) -> Spread | None:
        if own not in blocks or reference not in blocks:
            return None
        return Spread.of(speed_ups(blocks[own], blocks[reference]))

    return Row(
        size_bytes=size_bytes,
        gloo=spread(GLOO),
        shared=spread(SHARED),
        plain=spread(PLAIN),
        mpi=spread(MPI),
        copy=spread(COPY),
        speed_up=ratio(SHARED, GLOO),
        of_limit=ratio(SHARED, COPY),
    )


def show_head(world_size: int) -> None:
    print(f"\nall-reduce of float32, {world_size} workers; ms, medians")
    print(f"{'':29}{'paceline':>14}{'in place to gloo':>19}{'':10}{'of':>6}")
    print(
        f"{'size':>8}{'copy':>7}{'gloo':>7}{'mpi4py':>7}{'plain':>7}{'in place':>9}{'median':>7}"
        f"{'quartiles':>12}{'goal':>9}{'limit':>6}"
    )


def show(each: Row, goal: float | None) -> None:
    def cell(spread: Spread | None) -> str:
        return "-" if spread is None else milliseconds(spread.median)

    print(
        f"{size_text(each.size_bytes):>8}{cell(each.copy):>7}{cell(each.gloo):>7}"
        f"{cell(each.mpi):>7}{cell(each.plain):>7}{cell(each.shared):>9}"
        + ("" if each.speed_up is None else compared(each.speed_up, goal))
        + ("" if each.of_limit is None else f"{each.of_limit.median:>5.0%}")
    )


def compared(speed_up: Spread, goal: float | None) -> str:
    return (
        f"{ratio_text(speed_up.median):>7}{quartiles(speed_up, ratio_text):>12}"
        f"{verdict(speed_up.median, goal):>10}"
    )


def show_goals(rows: list[Row], goal: float | None) -> None:
    measured = [each for each in rows if each.speed_up is not None]
    if goal is not None and measured:
        met = [each for each in measured if each.speed_up and each.speed_up.median >= goal]
        print(f"{goal:g} times as fast as gloo: at {len(met)} of {len(measured)} sizes")
    for each in measured:
        if each.size_bytes == LIMIT_GOAL_BYTES and each.of_limit is not None:
            reached = each.of_limit.median
            print(
                f"of the memory's limit at {size_text(each.size_bytes)}: {reached:.0%}, "
                f"goal {LIMIT_GOAL:.0%} {'met' if reached >= LIMIT_GOAL else 'missed'}"
            )


def size_text(size_bytes: int) -> str:
    if size_bytes < 2**20:
        return f"{size_bytes // 2**10} kiB"
    return f"{size_bytes // 2**20} MiB"
