"""A study file as cells: what multiplies, what is added and taken away, how cells are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError, UsageError
from tests.support.study_files import planned


def ids(folder: Path, text: str, **options: object) -> list[str]:
    return [cell.id for cell in planned(folder, text, **options).study.cells]


def test_axes_multiply_and_the_last_varies_fastest(tmp_path: Path) -> None:
    text = """
        grid:
          nproc_per_node: [1, 2]
          strategy: [allreduce, ddp]
    """
    assert ids(tmp_path, text) == [
        "nproc_per_node-1.strategy-allreduce.r1",
        "nproc_per_node-1.strategy-ddp.r1",
        "nproc_per_node-2.strategy-allreduce.r1",
        "nproc_per_node-2.strategy-ddp.r1",
    ]


def test_a_named_axis_sets_several_settings_at_once(tmp_path: Path) -> None:
    text = """
        base: {cluster: "nodes=4,cpus=0.5"}
        grid:
          way:
            - {label: One node, strategy: single, cluster.nodes: 1}
            - {label: Overlap + bf16, strategy: overlap, options.codec: bf16}
    """
    one, two = planned(tmp_path, text).study.cells
    assert (one.id, one.label, one.axes) == ("way-one-node.r1", "One node", {"way": "One node"})
    assert one.settings == {"strategy": "single", "cluster": "nodes=1,cpus=0.5"}
    assert two.id == "way-overlap-bf16.r1"
    assert two.settings == {
        "strategy": "overlap",
        "options": {"codec": "bf16"},
        "cluster": "nodes=4,cpus=0.5",
    }


def test_a_label_names_the_setting_of_a_plain_axis(tmp_path: Path) -> None:
    text = """
        grid:
          options.mode: [async]
          batch_size: [64]
          reshuffle: [false]
    """
    (cell,) = planned(tmp_path, text).study.cells
    assert cell.label == "mode async, batch size 64, reshuffle off"


def test_model_options_are_an_axis_like_strategy_options(tmp_path: Path) -> None:
    text = """
        base: {model: vgg11, model_options.width: 0.5}
        grid:
          model_options.width: [0.25, 1]
        include:
          - {label: default, model_options: null}
    """
    plan = planned(tmp_path, text)
    assert [cell.label for cell in plan.study.cells] == ["width 0.25", "width 1", "default"]
    assert [config.model_options for config in plan.configs.values()] == [
        {"width": "0.25"},
        {"width": "1"},
        {},
    ]


def test_axes_of_emulated_machines_change_the_cluster_alone(tmp_path: Path) -> None:
    text = """
        base: {strategy: ddp, cluster: {nodes: 2, bandwidth: 1gbit}}
        grid:
          cluster.nodes: [2, 3]
          cluster.slow: ["1:0.5"]
    """
    plan = planned(tmp_path, text)
    assert [config.cluster for config in plan.configs.values()] == [
        "nodes=2,bandwidth=1gbit,slow=1:0.5",
        "nodes=3,bandwidth=1gbit,slow=1:0.5",
    ]
    assert [config.nnodes for config in plan.configs.values()] == [2, 3]


def test_include_adds_a_cell_with_its_own_settings(tmp_path: Path) -> None:
    text = """
        grid: {strategy: [allreduce]}
        include:
          - {label: alone, strategy: single, batch_size: 8}
    """
    cells = planned(tmp_path, text).study.cells
    assert [cell.id for cell in cells] == ["strategy-allreduce.r1", "alone.r1"]
    assert cells[1].settings == {"strategy": "single", "batch_size": 8}
    assert cells[1].axes == {"strategy": "single"}


def test_an_included_cell_has_axis_labels(tmp_path: Path) -> None:
    text = """
        grid: {reshuffle: [true]}
        include:
          - {label: one order, reshuffle: false}
    """
    assert [cell.axes["reshuffle"] for cell in planned(tmp_path, text).study.cells] == ["on", "off"]


def test_merged_settings_give_way_to_those_beside_them(tmp_path: Path) -> None:
    text = """
        base: &common {seed: 1, lr: 0.5}
        parts:
          one:
            base: {<<: *common, seed: 2}
          two:
            base: {seed: 3, <<: *common}
    """
    cells = planned(tmp_path, text).study.cells
    assert [cell.settings for cell in cells] == [{"seed": 2, "lr": 0.5}, {"seed": 3, "lr": 0.5}]


def test_labels_of_any_alphabet_make_names(tmp_path: Path) -> None:
    text = """
        include:
          - {label: 速度, seed: 1}
          - {label: "größte ../Rate", seed: 2}
    """
    assert ids(tmp_path, text) == ["速度.r1", "größte-..-rate.r1"]


def test_exclude_removes_cells_that_match_the_whole_rule(tmp_path: Path) -> None:
    text = """
        grid:
          nproc_per_node: [1, 2, 4]
          strategy: [allreduce, {label: DDP, strategy: ddp}]
        exclude:
          - {nproc_per_node: [1, 4], strategy: DDP}
    """
    assert ids(tmp_path, text) == [
        "nproc_per_node-1.strategy-allreduce.r1",
        "nproc_per_node-2.strategy-allreduce.r1",
        "nproc_per_node-2.strategy-ddp.r1",
        "nproc_per_node-4.strategy-allreduce.r1",
    ]


def test_a_repeat_has_its_own_seed_and_all_cells_the_same_ones(tmp_path: Path) -> None:
    text = """
        base: {seed: 7}
        repeats: 2
        grid: {batch_size: [8, 16]}
    """
    plan = planned(tmp_path, text)
    assert {cell.id: plan.configs[cell.id].seed for cell in plan.study.cells} == {
        "batch_size-8.r1": 7,
        "batch_size-8.r2": 8,
        "batch_size-16.r1": 7,
        "batch_size-16.r2": 8,
    }


def test_more_repeats_keep_the_names_of_the_first_ones(tmp_path: Path) -> None:
    text = "grid: {batch_size: [8, 16]}"
    assert set(ids(tmp_path, text)) < set(ids(tmp_path, text, repeats=3))


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("interleaved", ["a.r1", "b.r1", "a.r2", "b.r2"]),
        ("sequential", ["a.r1", "a.r2", "b.r1", "b.r2"]),
    ],
)
def test_cells_run_in_the_configured_order(order: str, wanted: list[str], tmp_path: Path) -> None:
    text = f"""
        order: {order}
        repeats: 2
        include:
          - {{label: a, batch_size: 8}}
          - {{label: b, batch_size: 16}}
    """
    assert [cell.id for cell in planned(tmp_path, text).in_running_order()] == wanted


def test_cells_of_two_parts_with_the_same_settings_are_one_run(tmp_path: Path) -> None:
    text = """
        base: {batch_size: 64}
        parts:
          baseline: {}
          batch size:
            grid: {batch_size: [32, 64]}
    """
    plan = planned(tmp_path, text)
    assert {cell.id: cell.run for cell in plan.study.cells} == {
        "baseline.r1": "baseline.r1",
        "batch-size.batch_size-32.r1": "batch-size.batch_size-32.r1",
        "batch-size.batch_size-64.r1": "baseline.r1",
    }
    assert [cell.id for cell in plan.in_running_order()] == [
        "baseline.r1",
        "batch-size.batch_size-32.r1",
    ]


SCALED = """
    title: full title
    base: {epochs: 40, batch_size: 64, schedule: steps, lr_steps: ["1e-2:40"]}
    parts:
      one:
        base: {seed: 3}
        grid: {batch_size: [32, 64], nproc_per_node: [1]}
      two: {}
    repeats: 3
    scales:
      quick:
        base: {iterations: 10, schedule: cosine}
        parts:
          one:
            grid: {batch_size: [8], nproc_per_node: null}
          two: null
        repeats: 1
"""


def test_a_scale_replaces_axes_and_removes_parts(tmp_path: Path) -> None:
    (cell,) = planned(tmp_path, SCALED, scale="quick").study.cells
    assert cell.id == "one.batch_size-8.r1"
    # The later way of saying how long, and of moving the rate, is the one that counts.
    assert cell.settings == {"batch_size": 8, "iterations": 10, "schedule": "cosine", "seed": 3}


def test_the_quick_scale_is_the_default_if_it_exists(tmp_path: Path) -> None:
    assert planned(tmp_path, SCALED).study.scale == "quick"
    assert len(planned(tmp_path, SCALED, scale="full").study.cells) == 9


def test_a_scale_that_a_file_does_not_have_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no scales"):
        planned(tmp_path, "base: {seed: 1}", scale="quick")


def test_two_cells_of_one_name_are_rejected(tmp_path: Path) -> None:
    text = """
        include:
          - {label: "a b", seed: 1}
          - {label: a-b, seed: 2}
    """
    with pytest.raises(ConfigError, match=r"2 cells have the name a-b\.r1"):
        planned(tmp_path, text)
