"""CPU groups in trees of files that stand for control groups of either version."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paceline.cluster import groups


@pytest.fixture(autouse=True)
def _anybody_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_can_join", lambda group: True)


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
    made = groups.make_groups("name", {0: 0.5, 3: 1.5}, [version_2(tmp_path / "v2")])
    assert made is not None
    assert made[0] == tmp_path / "v2" / "name-0"
    assert (made[0] / "cpu.max").read_text() == "5000 10000"
    assert (made[3] / "cpu.max").read_text() == "15000 10000"


def test_version_1_gets_them_in_two(tmp_path: Path) -> None:
    made = groups.make_groups("name", {0: 0.5}, [version_1(tmp_path / "v1")])
    assert made is not None
    assert (made[0] / "cpu.cfs_period_us").read_text() == "10000"
    assert (made[0] / "cpu.cfs_quota_us").read_text() == "5000"


def test_a_small_share_gets_a_period_that_the_kernel_takes(tmp_path: Path) -> None:
    group = version_2(tmp_path / "v2") / "small"
    group.mkdir()
    groups.set_quota(group, 0.02)
    quota, period = map(int, (group / "cpu.max").read_text().split())
    assert quota >= 1000
    assert quota / period == pytest.approx(0.02)


def test_version_2_offers_the_controller_where_it_is_not_yet(tmp_path: Path) -> None:
    parent = version_2(tmp_path / "v2", offered="memory")
    assert groups.make_groups("name", {0: 0.5}, [parent])
    assert (parent / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_group_that_holds_processes_is_passed_over_for_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets no group of version 2 have both processes and controlled children."""
    parent = version_2(tmp_path / "v2")
    own = version_2(parent / "own", offered="")
    write = groups._write

    def refuse(path: Path, text: str) -> None:
        if path == own / "cgroup.subtree_control":
            raise OSError(errno.EBUSY, "busy")
        write(path, text)

    monkeypatch.setattr(groups, "_write", refuse)
    made = groups.make_groups("name", {0: 0.5}, [own, parent])
    assert made == {0: parent / "name-0"}


def test_a_folder_that_is_no_group_is_passed_over(tmp_path: Path) -> None:
    assert groups.make_groups("name", {0: 0.5}, [tmp_path]) is None
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_cannot_be_joined_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_can_join", lambda group: False)
    assert groups.make_groups("name", {0: 0.5}, [version_2(tmp_path / "v2")]) is None
