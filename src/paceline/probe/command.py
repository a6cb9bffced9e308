"""Measure, wherever the workers come from."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.errors import PacelineError, RunError
from paceline.launch import environment
from paceline.probe.plan import Plan, check_workers

if TYPE_CHECKING:
    from paceline.launch.fleet import Fleet
    from paceline.launch.interruptions import Interruptions


def measure(plan: Plan, quiet: bool = False) -> dict[str, Any] | None:
    """The record (probe/results.py); None where another process has it.

    In this process where it is one of several workers (torchrun, srun), or else in workers that are
    started here, over ssh, in an emulated cluster or by Ray.
    """
    place = environment.detect()
    if place is not None:
        from paceline.probe.progress import showing
        from paceline.probe.run import run

        try:
            with showing(quiet or place.rank > 0) as show:
                return run(place, plan, show)
        except PacelineError as error:
            error.is_told = place.rank > 0
            raise
    check_workers(plan.machines.workers)
    if plan.machines.launcher == "ray":
        return _measure_on_ray(plan, quiet)
    if plan.machines.hosts or plan.machines.cluster:
        from paceline.launch.away import fleet_of
        from paceline.launch.interruptions import Interruptions

        machines = fleet_of(plan.machines, quiet)
        with Interruptions("measuring") as interruptions, machines as fleet:
            return measure_on(fleet, plan, quiet, interruptions)
    from paceline.probe.here import run_here

    return run_here(plan, quiet)


def _measure_on_ray(plan: Plan, quiet: bool) -> dict[str, Any]:
    from paceline.launch.ray.run import machines_for

    with machines_for(plan.machines, quiet) as (fleet, interruptions):
        machines = replace(plan.machines, master_port=fleet.free_port())
        return measure_on(fleet, replace(plan, machines=machines), quiet, interruptions)


def measure_on(
    fleet: Fleet, plan: Plan, quiet: bool, interruptions: Interruptions
) -> dict[str, Any]:
    """With workers on every machine of a fleet."""
    from paceline.launch.away import LOOPBACK
    from paceline.launch.fleet import Watch, error_of, first_failure
    from paceline.launch.node import Task

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    machines = plan.machines
    if not (machines.hosts and machines.master_addr != LOOPBACK):
        machines = replace(machines, master_addr=fleet.addresses[0])

    def task(node: int) -> bytes:
        # A node is told its place, and need not know how the others are reached.
        own = replace(plan, machines=replace(machines, node_rank=node, hosts=(), cluster=None))
        return Task(__version__, own.to_dict(), False, quiet, columns).to_bytes()

    words = [fleet.python, "-m", "paceline.probe.node"]
    with Watch(fleet, interruptions) as watch:
        ends = watch.run(lambda _: words, task)
    if failure := first_failure(ends):
        raise error_of(fleet, failure, ends)
    record = ends[0].news.get("record")
    if not isinstance(record, dict):
        raise RunError("the first machine ended without a record")
    return {**record, "plan": plan.to_dict()}
