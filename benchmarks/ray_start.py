"""Start-up time of a run on Ray: connect, then start an actor on each machine.

Run it on a machine of a Ray cluster; elsewhere it starts a local Ray:

    python benchmarks/ray_start.py --machines 1 --slots 2 --repeats 10
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

from paceline.launch.ray.cluster import connected, load
from paceline.launch.ray.machines import ResourceRequest, ray_machines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--slots", type=int, default=2, help="CPUs of each machine")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    wanted = ResourceRequest(arguments.machines, arguments.slots, 0)
    begun = perf_counter()
    with connected(arguments.slots, print) as connection:
        print(f"Ray {load().__version__}: connected after {perf_counter() - begun:.2f} s")
        seconds = []
        for _ in range(arguments.repeats):
            begun = perf_counter()
            with ray_machines(wanted, connection.head, 60.0, print):
                seconds.append(perf_counter() - begun)
    print(
        f"{wanted}: an actor on each after {statistics.median(seconds):.2f} s (median of"
        f" {len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f})"
    )


if __name__ == "__main__":
    main()
