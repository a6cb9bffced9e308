"""The claimed machines of a Ray cluster, as a fleet that commands can be started on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from paceline.errors import PacelineError, RunError
from paceline.launch.fleet import describe_end
from paceline.launch.node_process import NodeEnd
from paceline.launch.ray.claim import Machine, Wanted, claimed
from paceline.launch.ray.cluster import Say, ask_all, load
from paceline.launch.ray.head import Head
from paceline.launch.ray.post import PYTHON
from paceline.launch.ray.process import LOST, RayProcess
from paceline.sources import search_path

ANSWER_SECONDS = 30.0
"""How long an actor may take for something small; the machine may have much else to do."""
PASSED_ON = ("PACELINE_", "OMP_", "MKL_")
"""Beginnings of the variables that processes get from here."""


class RayFleet:
    """`lost` has the nodes whose actor is gone."""

    python = PYTHON
    cluster_file = None

    def __init__(self, machines: Sequence[Machine], head: Head) -> None:
        self.addresses = [machine.address for machine in machines]
        self.first_node_id = machines[0].node_id
        self._machines = machines
        self._head = head
        self._processes: list[tuple[int, RayProcess]] = []

    def free_port(self) -> int:
        """On the first machine."""
        first = self._machines[0]
        return int(self._ask([first.post.free_port.remote(first.address)])[0])

    def set_aside(self, path: Path, name: str) -> None:
        """On all machines, give a folder another name beside it, where it exists."""
        asked = [
            machine.post.set_aside.remote(str(path), name, str(Path.cwd()))
            for machine in self._machines
        ]
        self._ask(asked)

    def start(self, node: int, words: Sequence[str], given: bytes) -> subprocess.Popen[bytes]:
        machine, folder = self._machines[node], str(Path.cwd())
        process = RayProcess(machine.post, self._head, words, given, _variables(), folder)
        self._processes.append((node, process))
        # It has all that is asked of a process that a fleet starts.
        return cast("subprocess.Popen[bytes]", process)

    def explain(self, end: NodeEnd) -> PacelineError:
        address = self.addresses[end.node]
        if end.code != LOST:
            return RunError(describe_end(end, address))
        return RunError(f"lost node {end.node} ({address}): {self._how_it_was_lost(end.node)}")

    @property
    def lost(self) -> list[int]:
        return sorted({node for node, process in self._processes if process.is_lost})

    def _ask(self, answers: list[Any]) -> list[Any]:
        return ask_all(answers, self._head, ANSWER_SECONDS)

    def _how_it_was_lost(self, node: int) -> str:
        if not self._head.answers():
            return "no answer"
        living = {each["NodeID"] for each in load().nodes() if each["Alive"]}
        if self._machines[node].node_id not in living:
            return "the machine left the Ray cluster"
        return "its Ray actor was killed"


def _variables() -> dict[str, str]:
    """What the processes' surroundings share with this one, whatever Ray was started with."""
    passed = {name: text for name, text in os.environ.items() if name.startswith(PASSED_ON)}
    return {**passed, "PYTHONPATH": search_path()}


@contextlib.contextmanager
def ray_fleet(
    wanted: Wanted, head: Head, seconds: float, say: Say, first: str | None = None
) -> Iterator[RayFleet]:
    """Machines of the connected cluster, for as long as the block lasts."""
    with claimed(wanted, head, seconds, say, first) as machines:
        yield RayFleet(machines, head)
