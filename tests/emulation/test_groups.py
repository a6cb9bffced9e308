"""CPU groups in trees of files that stand for control groups of either version."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paceline.config.cluster_spec import parse
from paceline.emulation import cluster, cpu_limits, processes, removal
from paceline.emulation import state as states
from paceline.emulation.state import ClusterState, load
from paceline.errors import ClusterError


@pytest.fixture(autouse=True)
def _anybody_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_limits, "_can_join", lambda group: True)


def version_1(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("")
    return folder


def version_2(folder: Path, offered: str = "cpu memory") -> Path:
    version_1(folder)
    (folder / "cgroup.controllers").write_text("cpu memory\n")
    (folder / "cgroup.subtree_control").write_text(f"{offered}\n")
    return folder


def test_version_2_gets_quota_and_period_in_one_file(tmp_path: Path) -> None:
    made = cpu_limits.create_cgroups("name", {0: 0.5, 3: 1.5}, folders=[version_2(tmp_path / "v2")])
    assert made is not None
    assert made[0] == tmp_path / "v2" / "name-0"
    assert (made[0] / "cpu.max").read_text() == "5000 10000"
    assert (made[3] / "cpu.max").read_text() == "15000 10000"


def test_version_1_gets_them_in_two(tmp_path: Path) -> None:
    made = cpu_limits.create_cgroups("name", {0: 0.5}, folders=[version_1(tmp_path / "v1")])
    assert made is not None
    assert (made[0] / "cpu.cfs_period_us").read_text() == "10000"
    assert (made[0] / "cpu.cfs_quota_us").read_text() == "5000"


def test_a_small_quota_has_a_period_that_the_kernel_accepts(tmp_path: Path) -> None:
    group = version_2(tmp_path / "v2") / "small"
    group.mkdir()
    cpu_limits.set_quota(group, 0.02)
    quota, period = map(int, (group / "cpu.max").read_text().split())
    assert quota >= 1000
    assert quota / period == pytest.approx(0.02)


def test_version_2_enables_the_cpu_controller_if_necessary(tmp_path: Path) -> None:
    parent = version_2(tmp_path / "v2", offered="memory")
    assert cpu_limits.create_cgroups("name", {0: 0.5}, folders=[parent])
    assert (parent / "cgroup.subtree_control").read_text() == "+cpu"


@pytest.mark.parametrize(
    ("of_the_other", "left"),
    [("max 100000\n", "-cpu"), ("5000 10000\n", "cpu memory\n")],
    ids=["needs it not", "is limited"],
)
def test_the_cpu_controller_is_disabled_unless_another_group_uses_it(
    of_the_other: str, left: str, tmp_path: Path
) -> None:
    parent = version_2(tmp_path / "v2")
    other = version_2(parent / "other")
    (other / "cpu.max").write_text(of_the_other)
    (other / "cpu.weight").write_text("100\n")
    cpu_limits.disable_cpu_controller(parent)
    assert (parent / "cgroup.subtree_control").read_text() == left


def test_the_plan_is_recorded_before_anything_is_created(tmp_path: Path) -> None:
    parent = version_2(tmp_path / "v2", offered="memory")
    recorded = []

    def record_plan(planned: dict[int, Path], offering: Path | None) -> None:
        assert not any(group.exists() for group in planned.values())
        assert (parent / "cgroup.subtree_control").read_text() == "memory\n"
        recorded.append((planned, offering))

    made = cpu_limits.create_cgroups("name", {0: 0.5, 1: 0.5}, record_plan, [parent])
    assert recorded == [(made, parent)]


def test_a_quota_above_that_of_the_parent_does_not_escape_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = version_1(tmp_path / "v1")
    own = version_1(parent / "own")

    def refuse(group: Path, cpus: float) -> None:
        if group.parent == own:
            raise OSError(errno.EINVAL, "invalid")

    monkeypatch.setattr(cpu_limits, "set_quota", refuse)
    assert cpu_limits.create_cgroups("name", {0: 4.0}, folders=[own, parent]) is None
    assert not (parent / "name-0").exists()


def test_the_state_file_stays_if_a_group_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "all_pids", lambda: iter(()))
    monkeypatch.setattr(cpu_limits, "remove_groups", list)
    state = ClusterState(tmp_path / "name.json", parse("nodes=1,cpus=0.5"))
    state.groups = {0: tmp_path / "group-0"}
    state.create()
    with pytest.raises(ClusterError, match=r"cannot remove CPU group .*group-0; .*down name"):
        removal.remove(state)
    assert load(state.path).groups == state.groups


def test_a_removed_cluster_disables_the_cpu_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "all_pids", lambda: iter(()))
    parent = version_2(tmp_path / "v2")
    state = ClusterState(tmp_path / "name.json", parse("nodes=1,cpus=0.5"), offering=parent)
    state.create()
    removal.remove(load(state.path))
    assert (parent / "cgroup.subtree_control").read_text() == "-cpu"


def test_the_last_cluster_disables_the_cpu_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one to go finds the second one's groups there, and must leave it."""
    monkeypatch.setattr(states, "_folders", lambda: iter([tmp_path / "clusters"]))
    parent = tmp_path / "v2"
    ClusterState(states.path_of("first"), parse("nodes=1,cpus=0.5"), offering=parent).create()
    assert cluster._offering_already({0: parent / "second-0"}) == parent
    assert cluster._offering_already({0: tmp_path / "elsewhere" / "second-0"}) is None


def test_groups_outside_the_callers_own_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "outer" / "own"
    monkeypatch.setattr(cpu_limits, "cgroup_dirs", lambda controller: iter([own, own.parent]))
    assert not cpu_limits.is_outside_own_group(own / "name-0")
    assert cpu_limits.is_outside_own_group(own.parent / "name-0")


def test_a_group_that_holds_processes_is_passed_over_for_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets no group of version 2 have both processes and controlled children."""
    parent = version_2(tmp_path / "v2")
    own = version_2(parent / "own", offered="")
    write = cpu_limits._write

    def refuse(path: Path, text: str) -> None:
        if path == own / "cgroup.subtree_control":
            raise OSError(errno.EBUSY, "busy")
        write(path, text)

    monkeypatch.setattr(cpu_limits, "_write", refuse)
    made = cpu_limits.create_cgroups("name", {0: 0.5}, folders=[own, parent])
    assert made == {0: parent / "name-0"}


def test_a_folder_that_is_not_a_group_is_skipped(tmp_path: Path) -> None:
    assert cpu_limits.create_cgroups("name", {0: 0.5}, folders=[tmp_path]) is None
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_cannot_be_joined_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_limits, "_can_join", lambda group: False)
    assert cpu_limits.create_cgroups("name", {0: 0.5}, folders=[version_2(tmp_path / "v2")]) is None
