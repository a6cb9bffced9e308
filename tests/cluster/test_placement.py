"""Which cores nodes run on."""

from __future__ import annotations

from paceline.cluster.placement import core_each


def test_nodes_of_half_a_core_share_the_cores_evenly() -> None:
    placed = core_each(dict.fromkeys(range(4), 0.5), [0, 1], taken={})
    assert sorted(core for [core] in placed.values()) == [0, 0, 1, 1]


def test_a_slow_node_joins_the_core_that_has_room() -> None:
    placed = core_each({0: 0.25, 1: 1.0, 2: 0.75}, [4, 7], taken={})
    assert placed[0] == placed[2] != placed[1]


def test_nodes_that_cores_cannot_take_whole_are_left_to_the_kernel() -> None:
    assert core_each(dict.fromkeys(range(3), 0.6), [0, 1], taken={}) == {}
    assert core_each({0: 1.5}, [0, 1], taken={}) == {}


def test_cores_that_another_cluster_uses_come_last() -> None:
    assert core_each({0: 0.5}, [0, 1], taken={0: 0.5}) == {0: [1]}
    assert core_each({0: 1.0}, [0, 1], taken={0: 1.0, 1: 0.5}) == {}
