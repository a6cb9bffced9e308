"""Which cores nodes run on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import pytest

from paceline.config.cluster_spec import parse
from paceline.emulation import cluster as emulated
from paceline.emulation import cpu_limits, state
from paceline.emulation.cpu_limits import assign_cores, core_prefix


def test_nodes_of_half_a_core_share_the_cores_evenly() -> None:
    placed = assign_cores(dict.fromkeys(range(4), 0.5), [0, 1], taken={})
    assert sorted(core for [core] in placed.values()) == [0, 0, 1, 1]


def test_a_slow_node_joins_the_core_that_has_room() -> None:
    placed = assign_cores({0: 0.25, 1: 1.0, 2: 0.75}, [4, 7], taken={})
    assert placed[0] == placed[2] != placed[1]


def test_nodes_that_cores_cannot_take_whole_are_left_to_the_kernel() -> None:
    assert assign_cores(dict.fromkeys(range(3), 0.6), [0, 1], taken={}) == {}
    assert assign_cores({0: 1.5}, [0, 1], taken={}) == {}


def test_nodes_of_several_cores_get_cores_of_their_own() -> None:
    assert assign_cores({0: 2.0, 1: 1.0}, [0, 1, 2], taken={}) == {0: [0, 1], 1: [2]}
    assert assign_cores({0: 2.0, 1: 2.0}, [0, 1, 2], taken={}) == {}


def test_cores_that_another_cluster_uses_come_last() -> None:
    assert assign_cores({0: 0.5}, [0, 1], taken={0: 0.5}) == {0: [1]}
    assert assign_cores({0: 1.0}, [0, 1], taken={0: 1.0, 1: 0.5}) == {}


def test_clusters_that_are_made_at_the_same_moment_get_different_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_choose = Barrier(2)

    def choose_slowly(*arguments: Any) -> Mapping[int, list[int]]:
        with contextlib.suppress(BrokenBarrierError):
            both_choose.wait(0.5)  # in vain, where the other one is kept waiting
        return assign_cores(*arguments)

    monkeypatch.setattr(state, "_folders", lambda: [tmp_path / "clusters"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(cpu_limits, "assign_cores", choose_slowly)
    monkeypatch.setattr(cpu_limits, "create_cgroups", lambda *_: {0: tmp_path / "group"})
    clusters = [state.ClusterState(state.path_of(name), parse("nodes=1,cpus=1")) for name in "ab"]
    for cluster in clusters:
        cluster.create()
    threads = [Thread(target=emulated._limit_cpus, args=(cluster, ())) for cluster in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(cluster.cores[0] for cluster in clusters) == [[0], [1]]


def test_a_core_that_a_command_may_not_use_is_a_one_line_error() -> None:
    absent = os.cpu_count() or 1
    argv = [*core_prefix([absent], "node 1 of cluster c"), "echo", "it runs"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"paceline: error: node 1 of cluster c runs on core {absent}, ")
    assert done.stderr.count("\n") == 1


def test_a_command_runs_on_its_core() -> None:
    core = max(os.sched_getaffinity(0))
    program = "taskset -cp $$ | sed 's/.*: //'"
    done = subprocess.run(
        [*core_prefix([core], "node 0"), "sh", "-c", program], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(core)
