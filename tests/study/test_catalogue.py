"""Every study that comes with paceline can be planned at both scales."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.config import from_mapping, key
from paceline.report.sections import unknown
from paceline.study import catalogue
from paceline.study.cells import Plan, check_parts, load

REFERENCES = (
    "cifar-race",
    "first-look",
    "four-ways",
    "gpu-scaling",
    "parameter-server",
    "street-numbers",
    "street-race",
    "transformer-ways",
)


def plan_of(name: str, scale: str) -> Plan:
    return load(catalogue.find(name), scale)


def test_there_is_a_study_for_each_reference_experiment() -> None:
    assert tuple(catalogue.names()) == REFERENCES


@pytest.mark.parametrize("scale", ["quick", "full"])
@pytest.mark.parametrize("name", REFERENCES)
def test_every_cell_is_one_that_a_run_would_accept(name: str, scale: str) -> None:
    check_parts(plan_of(name, scale))


@pytest.mark.parametrize("name", REFERENCES)
def test_the_recorded_settings_are_those_of_the_run(name: str) -> None:
    plan = plan_of(name, "full")
    for cell in plan.study.cells:
        assert from_mapping(cell.settings) == plan.configs[cell.id]


@pytest.mark.parametrize("name", REFERENCES)
def test_the_quick_scale_needs_no_files(name: str) -> None:
    used = {config.data for config in plan_of(name, "quick").configs.values()}
    assert used <= {"digits", "plain_digits", "stories"}


@pytest.mark.parametrize("name", REFERENCES)
def test_each_part_asks_a_question_and_wants_sections_that_there_are(name: str) -> None:
    study = plan_of(name, "full").study
    assert study.about
    assert not unknown(study.report)
    for part in study.parts:
        assert part.report
        assert not unknown(part.report)
        assert part.about or len(study.parts) == 1


def test_the_first_look_has_six_strategies_on_two_workers() -> None:
    configs = plan_of("first-look", "quick").configs.values()
    assert len({config.strategy for config in configs}) == 6
    assert {config.workers for config in configs} == {2}


@pytest.mark.parametrize(
    "name",
    [
        "first-look",
        "four-ways",
        "parameter-server",
        "street-numbers",
        "gpu-scaling",
        "transformer-ways",
    ],
)
def test_the_quick_scale_repeats_every_configuration(name: str) -> None:
    study = plan_of(name, "quick").study
    counts = Counter(cell.group for cell in study.cells)
    assert min(counts.values()) >= 3


@pytest.mark.parametrize("name", REFERENCES)
def test_a_narrower_model_is_said_to_stand_in(name: str) -> None:
    plan = plan_of(name, "quick")
    is_narrow = any(config.model_options for config in plan.configs.values())
    assert plan.study.stands_in or not is_narrow


def test_four_ways_has_enough_iterations_for_an_interval() -> None:
    configs = plan_of("four-ways", "quick").configs.values()
    assert all((config.iterations or 0) >= 20 for config in configs)


def test_street_numbers_has_the_reference_sizes() -> None:
    plan = plan_of("street-numbers", "full")
    baseline = plan.configs["baseline.r1"]
    assert (baseline.model, baseline.data, baseline.epochs) == ("mlp", "svhn_extra", 40)
    assert baseline.lr_by_epochs() == [(1e-2, 10), (1e-3, 10), (1e-4, 20)]
    batches = [plan.configs[cell.id].batch_size for cell in plan.study.cells_of("batch-size")]
    assert batches == [32, 64, 256]
    nodes = [plan.configs[cell.id].nnodes for cell in plan.study.cells_of("nodes")]
    assert nodes == [1, 2, 3]


def test_four_ways_has_the_reference_sizes() -> None:
    plan = plan_of("four-ways", "full")
    configs = [plan.configs[cell.id] for cell in plan.study.cells_of("ways")]
    assert {config.nnodes for config in configs if config.strategy != "single"} == {4}
    assert {(config.global_batch_size, config.iterations) for config in configs} == {(256, 40)}


def test_parameter_server_has_the_reference_batches() -> None:
    plan = plan_of("parameter-server", "full")
    for part in ("softmax-batch", "cnn-batch"):
        sizes = {plan.configs[cell.id].batch_size for cell in plan.study.cells_of(part)}
        assert sizes == {128, 256, 512, 1024, 4096}


def test_street_race_has_the_reference_recipe() -> None:
    cell = "reference-model.entrant-reference-recipe-peer-to-peer.r1"
    config = plan_of("street-race", "full").configs[cell]
    assert (config.workers, config.global_batch_size, config.iterations) == (3, 3 * 16, 14_500)
    assert (config.lr, config.schedule, config.momentum) == (1e-2, "cosine", 0.9)
    assert config.target_accuracy == 0.9
    real = plan_of("street-race", "real").configs[cell]
    assert key(real, ("data", "target_accuracy")) == key(config, ("data", "target_accuracy"))
    assert (real.data, real.target_accuracy) == ("svhn", 0.89)


def test_street_race_compares_our_model_with_the_same_runs_of_the_reference() -> None:
    plan = plan_of("street-race", "real")
    models = {
        part: {plan.configs[cell.id].model for cell in plan.study.cells_of(part)}
        for part in ("reference-model", "own-model")
    }
    assert models == {"reference-model": {"lenet"}, "own-model": {"lenet", "strided_cnn"}}
    runs = {key(plan.configs[cell.id]) for cell in plan.in_running_order()}
    assert len(runs) == 5 * 4, "five seeds of each entrant, each run once"


@pytest.mark.parametrize(("scale", "target"), [("full", 0.94), ("real", 0.908)])
def test_cifar_race_has_twenty_seeds_of_a_recipe_of_fixed_length(scale: str, target: float) -> None:
    plan = plan_of("cifar-race", scale)
    ours = [config for config in plan.configs.values() if config.model == "whitened_cnn"]
    assert sorted(config.seed for config in ours) == list(range(20))
    assert {(config.eval_every, config.eval_views) for config in ours} == {("never", 6)}
    assert {config.target_accuracy for config in plan.configs.values()} == {target}


def test_gpu_scaling_has_the_reference_devices_and_batches() -> None:
    plan = plan_of("gpu-scaling", "full")
    cells = [plan.configs[cell.id] for cell in plan.study.cells_of("weak")]
    assert {(config.batch_per_worker, config.workers) for config in cells} == {
        (batch, workers) for batch in (32, 128, 512) for workers in (1, 2, 4)
    }
    shuffled = {plan.configs[cell.id].reshuffle for cell in plan.study.cells_of("order")}
    assert shuffled == {True, False}


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_transformer_ways_has_seven_ways_for_two_models_on_a_host_and_on_four_nodes(
    scale: str,
) -> None:
    plan = plan_of("transformer-ways", scale)
    for place, workers, nodes in (("host", 2, 1), ("nodes", 4, 4)):
        models = set()
        for size in ("small", "large"):
            configs = [plan.configs[cell.id] for cell in plan.study.cells_of(f"{size}-{place}")]
            several = [config for config in configs if config.strategy != "single"]
            assert {(config.workers, config.nnodes) for config in several} == {(workers, nodes)}
            assert len({(config.strategy, str(config.options)) for config in several}) == 7
            # The same work in each, so that losses agree.
            assert len({(config.global_batch_size, config.iterations) for config in configs}) == 1
            (model,) = {config.model_text for config in configs}
            models.add(model)
        assert len(models) == 2
