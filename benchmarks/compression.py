"""Encoding and decoding cost of each codec, and the bandwidth below which it pays off.

    python benchmarks/compression.py [--quick]

CPU time of one worker on one thread for a 10 MB gradient (a float32 matrix). The payloads of the
other ranks are in memory, so no communication is included. The codecs are interleaved, so that
background load affects all of them equally.
"""

from __future__ import annotations

import argparse
import statistics
from time import thread_time

import torch

from common.stats import quartiles
from paceline.compression import CODECS, create
from paceline.compression.codec import WireBytes
from paceline.compression.timing import exchange_seconds
from paceline.measure.machine import hardware, software

SHAPES = ((1250, 2000),)
ELEMENTS = 2_500_000
ELEMENT_BYTES = 4
WORLDS = (1, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 5 if parser.parse_args().quick else 25
    torch.set_num_threads(1)
    print(f"{hardware()['cpu']}, 1 thread, torch {software()['torch']}")
    print(f"{ELEMENTS:,} x float32, n = {repeats}; CPU ns per element, median (quartiles)")
    print("pays below: Mbit/s of a worker's link under which the bytes saved against an")
    print("uncompressed ring all-reduce take longer than encoding and decoding")
    print(f"{'':10}{'wire,':>9}{'1 worker,':>20}{'4 workers,':>20}{'pays below, with':>20}")
    print(f"{'codec':10}{'B/element':>9}{'ns/element':>20}{'ns/element':>20}{'4':>12}{'8':>8}")
    times = measure(repeats)
    for name in CODECS.names():
        wire = create(name, {}).wire_bytes(ELEMENTS, ELEMENT_BYTES, SHAPES)
        handed_over = sum(wire.sums + wire.gathers) / ELEMENTS
        medians = {world: statistics.median(times[name, world]) for world in WORLDS}
        limits = [pays_below(wire, world, medians[world]) for world in (4, 8)]
        print(
            f"{name:10}{handed_over:>9.3f}"
            f"{quartiles(times[name, 1]):>20}{quartiles(times[name, 4]):>20}"
            f"{limits[0]:>12}{limits[1]:>8}"
        )


def measure(repeats: int) -> dict[tuple[str, int], list[float]]:
    """CPU nanoseconds per element, by codec and world size."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(ELEMENTS, generator=generator)
    cases = {(name, world): create(name, {}) for name in CODECS.names() for world in WORLDS}
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    scratch = torch.empty_like(gradient)
    for _ in range(repeats):
        for case, codec in cases.items():
            # In training a codec runs repeatedly with warm memory, so only the last call counts.
            for _ in range(3):
                seconds = exchange_seconds(
                    codec, scratch.copy_(gradient), case[1], SHAPES, thread_time
                )
            times[case].append(1e9 * seconds / ELEMENTS)
    return times


def pays_below(wire: WireBytes, world: int, nanoseconds: float) -> str:
    """From the bytes a worker sends: 2 (w - 1) / w in a ring, w - 1 copies in a gather."""
    ring = 2 * (world - 1) / world
    saved = ring * (ELEMENTS * ELEMENT_BYTES - sum(wire.sums)) - (world - 1) * sum(wire.gathers)
    if saved == 0:
        return "-"
    return f"{saved / ELEMENTS / nanoseconds * 8e3:.0f}" if saved > 0 else "never"


if __name__ == "__main__":
    main()
