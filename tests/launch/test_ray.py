"""Runs on a Ray cluster: what they give, what they survive, and what they leave behind.

Three emulated machines with a raylet on each; what is cut off stays away, so the tests that do so
come after the others by way of their fixtures.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from paceline.records import read_json
from paceline.training.checkpoint import iterations
from tests.support.commands import Ended, flags, is_training, names_in
from tests.support.node_commands import interrupt_link
from tests.support.ray_machines import RayMachines, end_of, ray_machines, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.root,
    pytest.mark.iproute,
    pytest.mark.timeout(600),
]

RECORDS = {
    "config.json",
    "result.json",
    *(f"{kind}-{number}.jsonl" for kind in ("events", "resources") for number in (0, 1)),
}


class Run(NamedTuple):
    ended: Ended
    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        return read_json(self.folder / "result.json")


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    with ray_machines() as started:
        yield started


@pytest.fixture(scope="module")
def quiet_run(machines: RayMachines) -> Run:
    """On two of the machines, and nothing happens."""
    with machines.train("quiet", nnodes=2) as process:
        return Run(end_of(process), machines.records / "quiet")


SLOW: dict[str, Any] = {"model": "user_code:Slow", "nnodes": 2, "checkpoint_every": 1}
BLOWS: dict[str, Callable[[RayMachines, psutil.Process], None]] = {
    "cut": lambda machines, victim: interrupt_link(machines.cluster, machines.machine_of(victim)),
    "worker": lambda _, victim: victim.kill(),
    "actor": lambda _, victim: victim.parents()[1].kill(),
    "machine": lambda machines, victim: machines.power_off(machines.machine_of(victim)),
}
"""What befalls the second worker, or the machine that it is on."""


@pytest.fixture(scope="module")
def struck_run(machines: RayMachines, quiet_run: Run) -> Run:
    """On two machines; all these things befall the second one, one after the other."""
    with machines.train("struck", **SLOW) as process:
        seen, before = 0, None
        for what, blow in BLOWS.items():
            victim = next_worker(machines, "struck", seen, before)
            seen = machines.newest_checkpoint("struck") + 1
            blow(machines, victim)
            before = None if what == "cut" else victim
        return Run(end_of(process), machines.records / "struck")


@pytest.fixture(scope="module")
def cut_off_run(machines: RayMachines, struck_run: Run) -> Run:
    """On two machines, of which one is cut off from the others for good."""
    machines.bring_back()
    with machines.train("cut-off", **SLOW, timeout_seconds=6) as process:
        victim = next_worker(machines, "cut-off", 0, None)
        machines.cut_off(machines.machine_of(victim))
        return Run(end_of(process), machines.records / "cut-off")


def next_worker(
    machines: RayMachines, name: str, seen: int, before: psutil.Process | None
) -> psutil.Process:
    """The second worker, once it has restarted and written a new checkpoint."""

    def goes_on() -> bool:
        is_new = machines.worker(1) not in (None, before)
        return is_new and machines.newest_checkpoint(name) > seen

    wait_until(goes_on, "it goes on")
    worker = machines.worker(1)
    assert worker is not None
    return worker


def test_a_run_on_ray_gives_the_weights_of_a_local_one(
    quiet_run: Run, talkative_run: tuple[Path, Ended]
) -> None:
    assert quiet_run.ended.code == 0, quiet_run.ended.err
    local = read_json(talkative_run[0] / "result.json")
    assert quiet_run.result["weights_sha256"] == local["weights_sha256"]


def test_ray_prints_nothing(quiet_run: Run) -> None:
    lines = quiet_run.ended.err.splitlines()
    assert [line for line in lines if not line.startswith("paceline: waiting for ")] == []


def test_all_records_are_downloaded(quiet_run: Run) -> None:
    assert names_in(quiet_run.folder) == RECORDS
    assert [worker["node"] for worker in quiet_run.result["workers"]] == [0, 1]
    assert all(node["rss_bytes_peak"] for node in quiet_run.result["nodes"])


def test_the_progress_of_the_first_worker_is_shown(quiet_run: Run) -> None:
    rows = [line.split() for line in quiet_run.ended.out.splitlines()]
    assert ["1.50", "0"] in [row[:2] for row in rows], "the evaluation at the end"


def test_a_run_restarted_after_losses_has_the_weights_of_an_uninterrupted_one(
    struck_run: Run, quiet_run: Run
) -> None:
    assert struck_run.ended.code == 0, struck_run.ended.err
    assert struck_run.result["weights_sha256"] == quiet_run.result["weights_sha256"]


def test_each_loss_is_reported_in_one_line_and_in_the_result(struck_run: Run) -> None:
    lines = struck_run.ended.err.splitlines()
    restarts = struck_run.result["restarts"]
    causes = [restart["cause"] for restart in restarts]
    assert len(causes) == 3, "a link that comes back costs none"
    assert causes[0] == "rank 1 was killed by SIGKILL"
    assert causes[1].startswith("lost node 1 (")
    assert causes[1].endswith("): its Ray actor was killed")
    assert "node 1" in causes[2]
    assert [line for line in lines if "restart" in line] == [
        f"paceline: {each['cause']}: restart {number} of 3 after iteration {each['iteration']}"
        for number, each in enumerate(restarts, 1)
    ]
    assert all(line.startswith("paceline: ") for line in lines), "Ray is to say nothing"


def test_a_disconnected_machine_is_replaced(cut_off_run: Run, quiet_run: Run) -> None:
    assert cut_off_run.ended.code == 0, cut_off_run.ended.err
    assert cut_off_run.result["weights_sha256"] == quiet_run.result["weights_sha256"]
    assert "node 1" in cut_off_run.result["restarts"][0]["cause"]
    lines = cut_off_run.ended.err.splitlines()
    assert all(line.startswith("paceline: ") for line in lines), lines


def test_ctrl_c_stops_with_a_checkpoint_and_leaves_no_actor(
    machines: RayMachines, quiet_run: Run
) -> None:
    settings = {**SLOW, "nnodes": 1, "iterations": 100_000, "checkpoint_every": 100_000}
    with machines.train("stopped", nproc_per_node=1, **settings) as process:
        wait_until(lambda: is_training(machines.disk(0) / "stopped", [0]), "it trains")
        process.send_signal(signal.SIGINT)
        run = Run(end_of(process), machines.records / "stopped")
    assert (run.ended.code, run.result["status"]) == (130, "stopped")
    error, advice = run.ended.err.splitlines()
    assert error == f"paceline: stopped by SIGINT after iteration {run.result['iterations']}"
    assert advice.startswith("paceline: resume with `paceline train --resume ")
    assert iterations(run.folder / "checkpoints") == [run.result["iterations"]]
    wait_until(lambda: not machines.posts(), "the actors are gone")


def test_the_network_between_rays_machines_can_be_measured(
    machines: RayMachines, quiet_run: Run
) -> None:
    file = machines.out / "comm.json"
    asked = {"nnodes": 2, "sizes": "4k", "algorithms": "ring", "repeats": 2, "json": file}
    with machines.paceline("comm", "--quiet", *flags(asked)) as process:
        ended = end_of(process)
    assert ended.code == 0, ended.err
    record = read_json(machines.records / "comm.json")
    assert (record["workers"], record["nodes"]) == (2, 2)
    assert [each["algorithm"] for each in record["measurements"]] == ["ring"]


def test_too_few_slots_are_rejected(machines: RayMachines) -> None:
    with machines.train("refused", nproc_per_node=2, rendezvous_seconds=1) as process:
        ended = end_of(process)
    assert ended.code == 2
    assert ended.err.count("\n") == 1, ended.err
    assert "--launcher ray: needs 1 machine with 2 free CPUs; the Ray cluster at" in ended.err
    assert not (machines.records / "refused").exists()


def test_too_few_remaining_machines_are_reported_with_the_root_cause(
    machines: RayMachines, cut_off_run: Run
) -> None:
    """Of three machines one is gone already."""
    with machines.train("left", **SLOW, rendezvous_seconds=15) as process:
        BLOWS["machine"](machines, next_worker(machines, "left", 0, None))
        run = Run(end_of(process), machines.records / "left")
    assert run.ended.code == 1
    last = run.ended.err.splitlines()[-1]
    assert last == f"paceline: error: {run.result['cause']}"
    assert "node 1" in last
    assert "a restart needs 2 machines with 1 free CPU each; the Ray cluster at" in last
    assert "has 1 machine (1 CPUs, 1 free)" in last


@pytest.fixture(scope="module")
def all_machines(machines: RayMachines, cut_off_run: Run) -> RayMachines:
    """Those that were lost are back."""
    machines.bring_back()
    return machines


def test_the_loss_of_rays_head_ends_runs_within_bounds(all_machines: RayMachines) -> None:
    """The machine with the head is lost, and with it the first machine and command of one run.

    Another run's command is not where its worker is, from where the records have to come.
    """
    machines = all_machines
    settings = {**SLOW, "iterations": 100_000}
    with machines.train("first", **settings) as process:
        near = machines.machine_of(next_worker(machines, "first", 0, None))
        [far] = {1, 2} - {near}
        with machines.train("headless", machine=near, **settings | {"nnodes": 1}) as other:
            folder = machines.disk(far) / "headless"
            wait_until(
                lambda: other.poll() is not None or is_training(folder, [0]), "the other trains"
            )
            assert other.poll() is None, end_of(other).err
            machines.power_off(0)
            run = Run(end_of(other), machines.records / "headless")
        assert end_of(process).code != 0
    try:
        done = run.result["iterations"]
        cause = f"lost Ray's head at {machines.head}: stopped after iteration {done}"
        assert (run.ended.code, run.result["status"]) == (1, "failed")
        assert run.result["cause"] == cause
        assert run.ended.err.splitlines()[-1] == f"paceline: error: {cause}"
        assert done in iterations(run.folder / "checkpoints")
        wait_until(lambda: not any(map(machines.workers_on, (1, 2))), "all workers are gone")
    finally:
        # What is left of Ray itself there ends a minute later.
        for machine in (1, 2):
            machines.power_off(machine)
