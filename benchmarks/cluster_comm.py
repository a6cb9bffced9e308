"""Bandwidth that `paceline comm` reaches on the links of an emulated cluster; needs root.

    python benchmarks/cluster_comm.py [--nodes 2] [--rates 100mbit,1gbit,5gbit] [--repeats 10]

Run it on an idle machine. For each rate it creates and calibrates a cluster and runs `paceline
comm`: a message from one node to another, and all-reduces (gloo's and the ring), which use both
directions of the link at once. The tensor takes one to two seconds on the link. Figures are bus
bandwidths relative to the requested and to the calibrated rate: median (min-max). The goal is
within 5% of the requested rate. All nodes share the cores of one machine, so sums and copies slow
down the links.
"""

from __future__ import annotations

import argparse
import os

from paceline.commbench.launch import measure
from paceline.commbench.spec import BUS_FACTORS, LAST_BYTES, make_spec, size_text
from paceline.config.cluster_spec import bits_per_second
from paceline.measure.machine import hardware, software

ALGORITHMS = ("library", "ring")
AIM = 0.05


def size_for(rate: str, nodes: int) -> int:
    """Size of a tensor that takes one to two seconds, as a power of two, up to a limit."""
    wanted = bits_per_second(rate) / 8 / BUS_FACTORS["all_reduce"](nodes)
    return min(1 << int(wanted).bit_length(), LAST_BYTES)


def measure_rate(rate: str, nodes: int, repeats: int) -> None:
    size = size_for(rate, nodes)
    spec = make_spec(
        {"cluster": f"nodes={nodes},bandwidth={rate}", "threads": 1},
        sizes=str(size),
        operations="send_recv,all_reduce",
        algorithms=",".join(ALGORITHMS),
        repeats=repeats,
        most_seconds=60,
    )
    record = measure(spec, quiet=True)
    assert record is not None
    asked = bits_per_second(rate) / 8
    calibrated = record["limits"]["link"]["bytes_per_second"]
    for entry in record["measurements"]:
        factor = BUS_FACTORS[entry["operation"]](nodes) * entry["bytes"]
        shares = sorted(factor / seconds / asked for seconds in entry["samples_seconds"])
        share = entry["bus_bytes_per_second"] / asked
        verdict = "within the aim" if abs(share - 1) <= AIM else "misses the aim"
        print(
            f"{rate:>8} {size_text(size):>8}  {entry['operation']:11}{entry['algorithm']:8}"
            f"{share:8.1%} of requested ({shares[0]:.1%} to {shares[-1]:.1%})"
            f"{entry['bus_bytes_per_second'] / calibrated:8.1%} of calibrated  {verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rates", default="100mbit,1gbit,5gbit")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    machine = hardware()
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']}, torch"
        f" {software()['torch']}, load before {os.getloadavg()[0]:.1f}, n = {options.repeats}"
    )
    for rate in options.rates.split(","):
        measure_rate(rate, options.nodes, options.repeats)


if __name__ == "__main__":
    main()
