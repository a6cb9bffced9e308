"""The workers of this machine, from their start to their end."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from paceline.comm.rank_info import Place
from paceline.errors import PacelineError, RunError, StoppedError
from paceline.launch.ending import earliest, read_failure
from paceline.launch.interruptions import Interruptions, signal_name
from paceline.launch.spawn import spawn
from paceline.probe import progress
from paceline.probe.plan import Plan
from paceline.records import SCHEMA, RunFolder, read_json, write_json

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""What the others get, after a first failure, to say what they know of it."""

Processes = dict[int, subprocess.Popen[bytes]]


def run_here(plan: Plan, quiet: bool) -> dict[str, Any] | None:
    """Start this machine's workers and wait for them; on the first machine, their record."""
    processes: Processes = {}
    with (
        Interruptions("measuring") as interruptions,
        tempfile.TemporaryDirectory(prefix="paceline-comm-") as name,
    ):
        folder = RunFolder(Path(name))
        # Kept until all have ended: what it serves ends with it.
        store, port = _serve(plan)
        try:
            _start(plan, folder, quiet, port, processes)
            interruptions.raises = False
            _watch(processes, interruptions)
            return _outcome(folder, processes, interruptions)
        finally:
            _end(processes)
            if not quiet and 0 in processes and processes[0].returncode:
                progress.clear()
            del store


def _serve(plan: Plan) -> tuple[Any, int]:
    """The store at which all workers meet, on the first machine; and its port everywhere."""
    machines = plan.machines
    if machines.node_rank:
        return None, machines.master_port
    # Loads torch, which the other machines' launchers need not.
    from paceline.comm.rendezvous import Meeting, port_of

    # No other machine has to know the port on one machine.
    port = 0 if machines.nnodes == 1 else machines.master_port
    store = Meeting(
        0, 1, machines.master_addr, port, machines.rendezvous_seconds, name="comm/launcher"
    ).join()
    return store, port_of(store)


def _start(plan: Plan, folder: RunFolder, quiet: bool, port: int, processes: Processes) -> None:
    machines = plan.machines
    plan_file = folder.path / "plan.json"
    write_json(plan_file, {"schema": SCHEMA, "plan": plan.to_dict()})
    for local_rank in range(machines.nproc_per_node):
        rank = machines.node_rank * machines.nproc_per_node + local_rank
        place = Place(
            rank=rank,
            world_size=machines.workers,
            local_rank=local_rank,
            local_world_size=machines.nproc_per_node,
            node=machines.node_rank,
            nnodes=machines.nnodes,
            master_addr=machines.master_addr,
            master_port=port,
            store_is_served=True,
        )
        processes[rank] = spawn(
            "paceline.probe.worker",
            place,
            [str(plan_file), str(folder.path), "quiet" if quiet else "shown"],
            _output_file(folder, rank),
            shown=rank == 0,
        )


def _watch(processes: Processes, interruptions: Interruptions) -> None:
    """Until all have ended, one has failed and the others had time to notice, or Ctrl-C."""
    deadline: float | None = None
    while any(process.poll() is None for process in processes.values()):
        if interruptions.received:
            return
        if deadline is None and any(process.poll() for process in processes.values()):
            deadline = monotonic() + GRACE_SECONDS
        if deadline is not None and monotonic() > deadline:
            return
        sleep(POLL_SECONDS)


def _outcome(
    folder: RunFolder, processes: Processes, interruptions: Interruptions
) -> dict[str, Any] | None:
    from paceline.probe.worker import RECORD

    if interruptions.received:
        raise StoppedError(f"stopped by {interruptions.received[0].name}")
    failed = {rank: process.poll() for rank, process in processes.items() if process.poll() != 0}
    if failed:
        raise _explain(folder, failed)
    return read_json(folder.path / RECORD) if 0 in processes else None


def _explain(folder: RunFolder, failed: dict[int, int | None]) -> PacelineError:
    known = earliest(filter(None, (read_failure(folder, rank) for rank in failed)))
    if known and not known.is_echo:
        return known.error()
    for rank, code in failed.items():
        if code is not None and code < 0:
            return RunError(f"rank {rank} was killed by {signal_name(code)}")
    if known:
        return known.error()
    rank, code = next(iter(failed.items()))
    text = _output_file(folder, rank).read_text(errors="replace").strip()
    said = text.splitlines()[-1] if text else "it said nothing"
    return RunError(f"rank {rank} ended with exit code {code}: {said}")


def _output_file(folder: RunFolder, rank: int) -> Path:
    return folder.path / f"output-{rank}.txt"


def _end(processes: Processes) -> None:
    running: Sequence[subprocess.Popen[bytes]] = list(processes.values())
    for process in running:
        if process.poll() is None:
            process.kill()
    for process in running:
        process.wait()
