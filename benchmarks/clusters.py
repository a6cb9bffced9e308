"""Accuracy of emulated links and CPU limits; needs root, ip, tc and iperf3.

    python benchmarks/clusters.py [--repeats N] [--only NAME]

Run it on an idle machine. Figures are medians (min-max).

- `rates`: what iperf3 receives over a link, each direction; goal: within 5% of the requested rate.
- `round_trips`: one byte over TCP and back; goal: within 20% of the requested latency.
- `quota`: a training step with half a core and without a quota, interleaved; goal: 1.9 to 2.1 times
  as long, with a spread like that of the machine itself.
- `bytes`: interface counters compared with the payload of a transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from common.stats import min_max
from paceline.config.cluster_spec import bits_per_second, parse, seconds
from paceline.emulation import calibration
from paceline.emulation.cluster import EmulatedCluster
from paceline.measure.machine import hardware

RATES = ("100mbit", "1gbit", "5gbit")
ROUND_TRIPS = ("200us", "1ms", "5ms")
STEPS = """
import statistics, time, torch
from torch.nn import functional as F
from paceline.models.build import build_model
torch.set_num_threads(1)
model = build_model("lenet", (3, 32, 32), 10, 0)
inputs, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
def step():
    F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad()
for _ in range(20):
    step()
spent, used = [], time.process_time()
for _ in range(120):
    begin = time.perf_counter()
    step()
    spent.append(time.perf_counter() - begin)
used = time.process_time() - used
print(statistics.median(spent), sum(spent) / len(spent), used / sum(spent))
"""
TRANSFER_BYTES = 50_000_000
SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    peer, _ = listener.accept()
print(sum(iter(lambda: len(peer.recv(1 << 20)), 0)))
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
    peer.sendall(bytes(int(sys.argv[3])))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=tuple(QUESTIONS))
    options = parser.parse_args()
    machine = hardware()
    load = os.getloadavg()[0]
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']}; load {load:.1f}")
    for name, question in QUESTIONS.items():
        if options.only in (None, name):
            question(options.repeats)


def rates(repeats: int) -> None:
    print(f"\nrates by iperf3, Mbit/s, {repeats} of 2 s each way")
    for asked in RATES:
        with cluster(f"nodes=2,bandwidth={asked}") as made:
            for way in ("out", "in"):
                got = [iperf(made, way == "in") for _ in range(repeats)]
                verdict(
                    f"{asked} {way}",
                    [rate / 1e6 for rate in got],
                    bits_per_second(asked) / 1e6,
                    0.05,
                )


def round_trips(repeats: int) -> None:
    print(f"\nround trips, us, medians of {calibration.MAX_PINGS} or 0.3 s, {repeats} times")
    with cluster("nodes=2") as made:
        base = statistics.median(calibration.round_trip_seconds(made.state) for _ in range(repeats))
        print(f"the machine itself, over a bridge: {base * 1e6:.0f}")
    for asked in ROUND_TRIPS:
        with cluster(f"nodes=2,latency={asked}") as made:
            got = [calibration.round_trip_seconds(made.state) * 1e6 for _ in range(repeats)]
            verdict(f"{asked} by {made.state.delay}", got, seconds(asked) * 1e6, 0.2)


def quota(repeats: int) -> None:
    print(
        f"\na training step of lenet, batch 64, one thread; {repeats} of 120 steps each, in turns"
    )
    free, limited = [], []
    with cluster("nodes=1,cpus=0.5") as made:
        words = [sys.executable, "-c", STEPS]
        for _ in range(repeats):
            free.append(steps(words))
            limited.append(steps(made.command(0, words)))
    for name, measured in (("without a quota", free), ("half a core", limited)):
        medians, means, shares = zip(*measured, strict=True)
        print(f"{name:15} median {spread(medians)} s, mean {spread(means)} s")
        print(f"{'':15} share of a core {spread(shares)}")
    # The machine's speed drifts within seconds; adjacent measurements share it.
    ratios = [half[1] / whole[1] for whole, half in zip(free, limited, strict=True)]
    ratio = statistics.median(ratios)
    print(f"times as long   {spread(ratios)} {'(aim met)' if 1.9 <= ratio <= 2.1 else '(off)'}")


def steps(words: Sequence[str]) -> tuple[float, float, float]:
    """Return the median and mean seconds per step and the fraction of a core it got."""
    median, mean, share = map(float, subprocess.check_output(words).split())
    return median, mean, share


def count_bytes(repeats: int) -> None:
    print(f"\nbytes counted by interfaces for {TRANSFER_BYTES:,} of payload")
    with cluster("nodes=2,bandwidth=1gbit") as made:
        for _ in range(repeats):
            before = counted(made, 0, 8), counted(made, 1, 0)
            transfer(made)
            sent, received = counted(made, 0, 8) - before[0], counted(made, 1, 0) - before[1]
            print(
                f"sent {sent:,} ({sent / TRANSFER_BYTES:.4f} of the payload), "
                f"received {received:,} ({received / TRANSFER_BYTES:.4f})"
            )


def transfer(made: EmulatedCluster) -> None:
    """Send `count` bytes from node 0 to node 1 and wait for all of them."""
    python = [sys.executable, "-I", "-S", "-c"]
    words = made.command(1, [*python, SINK, made.addresses[1]])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        port = sink.stdout.readline().strip()
        words = [*python, SOURCE, made.addresses[1], port, str(TRANSFER_BYTES)]
        subprocess.run(made.command(0, words), check=True)
        assert int(sink.stdout.readline()) == TRANSFER_BYTES


def cluster(text: str) -> EmulatedCluster:
    return EmulatedCluster.up(parse(text), calibrate=False)


def iperf(made: EmulatedCluster, backwards: bool) -> float:
    """Bits per second that node 1 receives from node 0, or the reverse."""
    server = subprocess.Popen(
        made.command(1, ["iperf3", "-s", "-1", "--forceflush"]), stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    while b"listening" not in server.stdout.readline():
        if server.poll() is not None:
            raise SystemExit("iperf3 does not start")
    way = ["-R"] if backwards else []
    words = ["iperf3", "-J", "-c", made.addresses[1], "-t", "2", *way]
    report = json.loads(subprocess.check_output(made.command(0, words), timeout=60))
    server.communicate(timeout=30)
    return float(report["end"]["sum_received"]["bits_per_second"])


def counted(made: EmulatedCluster, node: int, field: int) -> int:
    words = ["grep", "eth0", "/proc/net/dev"]
    line = subprocess.check_output(made.command(node, words), text=True)
    return int(line.partition(":")[2].split()[field])


def verdict(name: str, got: Sequence[float], asked: float, aim: float) -> None:
    off = statistics.median(got) / asked - 1
    met = "aim met" if abs(off) <= aim else "off"
    print(f"{name:<20}{spread(got):<36}{100 * off:+6.1f} % ({met})")


def spread(values: Sequence[float]) -> str:
    middle = min_max(values, ".4g")
    if len(values) < 2:
        return middle
    return f"{middle} sd {statistics.stdev(values) / statistics.mean(values):.1%}"


QUESTIONS = {"rates": rates, "round_trips": round_trips, "quota": quota, "bytes": count_bytes}

if __name__ == "__main__":
    main()
