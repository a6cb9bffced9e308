"""RunConfig: what it accepts, what it refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from paceline.config import (
    RunConfig,
    fields,
    from_mapping,
    from_record,
    non_default_values,
    option_of,
    to_argv,
    type_of,
)
from paceline.errors import ConfigError


def problems_of(**values: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        from_mapping(values)
    return caught.value.problems


def test_text_and_yaml_values_give_the_same_config() -> None:
    text = from_mapping(
        {"epochs": "3", "lr": "1e-2", "augment": "crop,flip", "compile": "true", "options": ["a=1"]}
    )
    yaml = from_mapping(
        {"epochs": 3, "lr": 0.01, "augment": ["crop", "flip"], "compile": True, "options": {"a": 1}}
    )
    assert text == yaml


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "on"),
        (False, "off"),
        ("true", "on"),
        ("False", "off"),
        ("on", "on"),
        ("off", "off"),
        ("auto", "auto"),
    ],
)
def test_a_switch_accepts_booleans_of_yaml_and_older_records(value: object, expected: str) -> None:
    assert from_mapping({"channels_last": value}).channels_last == expected
    assert from_record({"channels_last": value}).channels_last == expected


def test_an_invalid_switch_is_rejected_with_its_values() -> None:
    assert problems_of(channels_last="yes") == (
        "--channels-last: must be auto, on or off, got 'yes'",
    )


def test_a_config_survives_json() -> None:
    config = from_mapping({"lr_steps": "1e-2:10,1e-3:5", "schedule": "steps", "options": ["k=v"]})
    assert from_mapping(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_an_empty_list_as_text_is_rejected(text: str) -> None:
    assert problems_of(hosts=text) == (f"--hosts: must not be empty, got {text!r}",)
    assert from_mapping({"hosts": []}).hosts == ()


def test_all_problems_are_reported_together_with_their_flags() -> None:
    message = problems_of(epochs="2.5", lr="fast", batch_size="0", optimizer="sdg", colour="red")
    assert len(message) == 5
    for flag in ("--epochs", "--lr", "--batch-size", "--optimizer", "unknown setting 'colour'"):
        assert any(line.startswith(flag) for line in message), flag


@pytest.mark.parametrize("name", ["epochs", "iterations", "batch_size", "nproc_per_node"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many", "", "1e400", True])
def test_a_count_must_be_a_positive_whole_number(name: str, value: object) -> None:
    (line,) = problems_of(**{name: value})
    assert line.startswith("--" + name.replace("_", "-") + ": must be")


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": HUGE}, "--epochs: must be at least 1 and at most 1000000, got '999"),
        ({"epochs": f"-{HUGE}"}, "--epochs: must be at least 1 and at most 1000000, got '-999"),
        ({"epochs": 1 << 20_000}, "--epochs: must be at least 1 and at most 1000000, got a number"),
        ({"iterations": "9" * 20}, "--iterations: must be at least 1 and at most 1000000000000,"),
        ({"lr": 1 << 20_000}, "--lr: must be a number, got a number of about 6,021 digits"),
        ({"slow": f"{HUGE}=2"}, "--slow: must be rank=factor with a rank below 1"),
        ({"slow": f"0={HUGE}"}, "--slow: must be rank=factor"),
        ({"elastic": f"1:{HUGE}"}, "--elastic: must be min:max such as 2:4, at most 10000"),
        ({"cluster": f"nodes={HUGE}"}, "--cluster: must be given nodes=1 to nodes=250"),
        ({"cluster": f"nodes=2,slow={HUGE}:0.5"}, "--cluster: must be given slow of nodes below 2"),
        ({"cluster": f"nodes=2,bandwidth={HUGE}gbit"}, "--cluster: must be given a rate of 1kbit"),
        ({"lr_steps": f"1:{HUGE}", "schedule": "steps"}, "--lr-steps: must be rate:epochs pairs"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_number_of_thousands_of_digits_is_rejected_in_a_short_line(
    values: dict[str, object], message: str
) -> None:
    (line,) = problems_of(**values)
    assert line.startswith(message)
    assert len(line) < 300


def test_python_callers_get_the_same_line_for_huge_numbers() -> None:
    with pytest.raises(
        ConfigError, match="must be at least 1 and at most 9223372036854775807, got"
    ):
        RunConfig(epochs=1 << 20_000)


def test_every_numeric_setting_has_a_lower_and_an_upper_limit() -> None:
    for item in fields():
        if not {"int", "float"} & set(re.findall(r"\w+", str(type_of(item)))):
            continue
        option = option_of(item)
        limits = option.input_limits
        assert limits.minimum is not None or limits.above is not None, item.name
        assert limits.maximum is not None or limits.below is not None, item.name
        for value in (float("nan"), float("inf"), float("-inf")):
            assert not limits.allow(value), item.name
            assert not option.limits.allow(value), item.name


RECORDED = [
    {"timeout_seconds": 1e6},
    {"rendezvous_seconds": 0.05},
    {"sample_seconds": 0.005},
    {"train_samples": 10**13},
    {"lr": 1e10},
    {"shares": ["1e-9", "1"], "nproc_per_node": 2},
    {"slow": ["0=2000"]},
    {"lr_steps": ["0.1:1e7"], "schedule": "steps"},
    {"elastic": "1:20000"},
    {"cluster": "nodes=2,bandwidth=100bit", "nnodes": 2},
    {"cluster": "nodes=2,cpus=0.0001", "nnodes": 2},
]
"""Settings that could be recorded before each had the range of new input."""


@pytest.mark.parametrize("values", RECORDED, ids=lambda values: next(iter(values)))
def test_a_recorded_setting_outside_the_range_of_new_input_stays_valid(
    values: dict[str, object],
) -> None:
    assert len(problems_of(**values)) == 1
    config = from_record(values)
    assert config == from_record(json.loads(json.dumps(config.to_dict())))
    assert from_mapping({"seed": 3}, recorded=values) == dataclasses.replace(config, seed=3)


def test_a_change_of_a_recorded_setting_must_be_within_the_range() -> None:
    with pytest.raises(ConfigError, match="--timeout-seconds: must be at least"):
        from_mapping({"timeout_seconds": "2e6"}, recorded={"timeout_seconds": 1e6})


@pytest.mark.parametrize(
    "values", [{"epochs": 0}, {"lr": -1}, {"momentum": 2}, {"optimizer": "sdg"}, {"epochs": "x"}]
)
def test_an_impossible_recorded_setting_is_rejected(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        from_record(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rendezvous_seconds": "1e300"}, "must be at least 0.1 and at most 604800, got 1e+300"),
        ({"timeout_seconds": "1e300"}, "must be at least 0.1 and at most 604800, got 1e+300"),
        ({"shares": "1e308,1e308", "nproc_per_node": 2}, "each at least 1e-06 and at most 1e+06"),
        ({"shares": "1e-300,1", "nproc_per_node": 2}, "each at least 1e-06 and at most 1e+06"),
        ({"slow": "0=1e300"}, "a factor of at least 1 and at most 1000"),
        ({"lr_steps": "1e300:1", "schedule": "steps"}, "rates of at most 1e+09"),
        ({"sample_seconds": "1e-9"}, "must be 0 for none, or at least 0.01, got 1e-09"),
        ({"sample_seconds": "1e300"}, "must be at least 0 and at most 86400, got 1e+300"),
        ({"lr": "1e300"}, "must be above 0 and at most 1e+09, got 1e+300"),
        ({"seed": 2**63}, "at most 9223372036854775807, got 9223372036854775808"),
        ({"cluster": "nodes=2,cpus=1e-9"}, "cpus of 0.001 to 10000"),
        ({"cluster": "nodes=2,cpus=inf"}, "cpus of 0.001 to 10000, not 'inf'"),
        ({"cluster": "nodes=2,cpus=nan"}, "cpus of 0.001 to 10000, not 'nan'"),
        ({"cluster": "nodes=2,cpus=0.01,slow=1:0.01"}, "cpus times slow of at least 0.001"),
        ({"cluster": "nodes=2,bandwidth=1bit"}, "a rate of 1kbit to 1000gbit"),
        ({"cluster": "nodes=2,latency=0.001us"}, "a latency of 1us to 1s"),
        ({"data_dir": "a\0b"}, "--data-dir: must not contain a null character"),
    ],
    ids=lambda value: (
        ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_a_number_out_of_range_reports_the_range(values: dict[str, object], message: str) -> None:
    (line,) = problems_of(**values)
    assert message in line


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_learning_rate_must_be_finite_and_positive(value: str) -> None:
    (line,) = problems_of(lr=value)
    assert line.startswith("--lr: must be")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"epochs": 1, "iterations": 1}, "--epochs and --iterations"),
        ({"batch_size": 8, "batch_per_worker": 4}, "--batch-size and --batch-per-worker"),
        ({"batch_size": 3, "nproc_per_node": 4}, "--batch-size"),
        ({"node_rank": 2, "nnodes": 2}, "--node-rank"),
        ({"nesterov": True, "momentum": 0}, "--nesterov"),
        ({"target_accuracy": 0.5, "target_loss": 1.0}, "--target-accuracy and --target-loss: use"),
        ({"schedule": "steps"}, "--lr-steps"),
        ({"schedule": "steps", "lr_steps": "fast:1"}, "--lr-steps"),
        ({"name": "../escape"}, "--name"),
        ({"options": ["k=v", "novalue"]}, "-o: must be key=value, got 'novalue'"),
    ],
)
def test_conflicting_settings_are_rejected(values: dict[str, object], flag: str) -> None:
    (line,) = problems_of(**values)
    assert line.startswith(flag)


def test_the_batch_size_can_be_set_per_worker() -> None:
    assert from_mapping({"batch_per_worker": 16, "nproc_per_node": 3}).global_batch_size == 48


def test_every_field_has_one_line_of_documentation_and_a_known_group() -> None:
    from paceline.config import GROUPS

    for item in fields():
        option = option_of(item)
        assert option.doc
        assert "\n" not in option.doc
        assert option.group in GROUPS


def test_the_flags_of_the_contract_exist() -> None:
    names = {item.name for item in fields()}
    assert names >= {
        "nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port",
        "batch_size", "batch_per_worker", "options", "out", "name",
    }  # fmt: skip


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        RunConfig().lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settled", "typed"),
    [
        (
            {"cluster": "nodes=2,cpus=0.5", "nnodes": 2, "master_addr": "10.77.0.1", "lr": 0.5},
            ["--lr", "0.5", "--cluster", "nodes=2,cpus=0.5"],
        ),
        (
            {"hosts": "me@one:22,two", "nnodes": 2, "master_addr": "one"},
            ["--hosts", "me@one:22,two"],
        ),
        (
            {"hosts": "one,two", "nnodes": 2, "master_addr": "10.0.0.1"},
            ["--master-addr", "10.0.0.1", "--hosts", "one,two"],
        ),
        ({"nnodes": 2, "master_addr": "one"}, ["--nnodes", "2", "--master-addr", "one"]),
        ({"options": {"k": "-1"}, "name": "-x"}, ["-o", "k=-1", "--name=-x"]),
        ({"reshuffle": False, "nesterov": True}, ["--no-reshuffle", "--nesterov"]),
    ],
)
def test_the_argv_of_a_config_has_its_flags(settled: dict[str, object], typed: list[str]) -> None:
    assert to_argv(non_default_values(from_mapping(settled))) == typed
