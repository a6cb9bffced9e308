"""Options of models: `--model-options key=value`."""

import sys
from pathlib import Path

import pytest

from paceline.config import from_mapping
from paceline.config.conversion import option_types
from paceline.errors import ConfigError, UserCodeError
from paceline.models import MODELS, TOKEN_MODELS
from paceline.models.build import DATA_PARAMETERS, build_model
from paceline.training.rank_report import weights_sha256

SHAPE, CLASSES = (3, 32, 32), 10
WIDE_MODELS = [
    entry.name for entry in MODELS if "width" in entry.options and entry.name not in TOKEN_MODELS
]

INITIAL_WEIGHTS = {
    "softmax": "127dba96cc56b3b8",
    "mlp": "7f080c2e60d5ae43",
    "lenet": "df81010a3afa00f1",
    "cnn": "481acb1c605a156f",
    "vgg11": "2853739f49f7ff67",
    "vgg13": "fe251f49f429455d",
    "vgg16": "f3ecaf405645fdf1",
    "vgg19": "ad706fcab31b6d3f",
    "resnet18": "4b32d5b4c9b94f03",
    "resnet34": "2ca44dc07c62a96c",
}
"""Beginnings of `weights_sha256` with seed 5, recorded before models had options."""


def weights(name: str, **options: str) -> str:
    model = build_model(name, SHAPE, CLASSES, seed=5, options=options)
    return weights_sha256(model.state_dict())[:16]


def parameters(name: str, **options: str) -> int:
    model = build_model(name, SHAPE, CLASSES, seed=0, options=options)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", INITIAL_WEIGHTS)
def test_default_options_give_the_recorded_initial_weights(name: str) -> None:
    assert weights(name) == INITIAL_WEIGHTS[name]


@pytest.mark.parametrize("name", ["lenet", "vgg11"])
def test_width_one_is_the_default(name: str) -> None:
    assert weights(name, width="1") == weights(name)


@pytest.mark.parametrize("name", MODELS.names())
def test_documented_options_are_those_of_the_model(name: str) -> None:
    (entry,) = (entry for entry in MODELS if entry.name == name)
    assert list(entry.options) == list(option_types(MODELS.load(name), DATA_PARAMETERS))


@pytest.mark.parametrize("name", WIDE_MODELS)
def test_a_narrow_model_has_fewer_parameters(name: str) -> None:
    assert parameters(name, width="0.25") < 0.3 * parameters(name)


@pytest.mark.parametrize("name", WIDE_MODELS)
def test_every_layer_keeps_at_least_one_channel(name: str) -> None:
    assert parameters(name, width="1e-6") > 0


@pytest.mark.parametrize(
    ("model", "option", "line"),
    [
        ("vgg11", {"widht": "2"},
         "--model-options widht: model vgg11 has no such option; it has width"
         " (did you mean width?)"),
        ("vgg11", {"layers": "2"},
         "--model-options layers: model vgg11 has no such option; it has width"),
        ("vgg11", {"width": "wide"}, "--model-options width: must be a number, got 'wide'"),
        ("vgg11", {"width": "0"}, "--model-options width: must be above 0 and at most 64, got '0'"),
        ("softmax", {"width": "2"},
         "--model-options width: model softmax has no such option; it has none"),
        ("lenet", {"classes": "2"},
         "--model-options classes: model lenet has no such option; it has width"),
    ],
)  # fmt: skip
def test_an_invalid_option_is_one_line(model: str, option: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as failure:
        build_model(model, SHAPE, CLASSES, seed=0, options=option)
    assert failure.value.problems == (line,)


OWN_MODELS = """
from torch import nn

def annotated(sample_shape, classes, hidden: int, is_deep: bool = False):
    return nn.Sequential(*[nn.Linear(hidden, hidden)] * (2 if is_deep else 1))

def by_default(shape, count, hidden=5, share=0.5, name="a"):
    assert (type(hidden), type(share), type(name)) == (int, float, str)
    return nn.Linear(shape[0], hidden)

def any_option(**options):
    return nn.Linear(options["hidden"], 1, bias=options["bias"])

def unreadable(hidden: "NoSuchType" = 3):
    return nn.Linear(hidden, 1)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_options.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_options", raising=False)
    return "own_options"


@pytest.mark.parametrize(
    ("function", "options", "shapes"),
    [
        ("annotated", {"hidden": "7"}, [(7, 7), (7,)]),
        ("by_default", {"hidden": "4", "share": "1", "name": "1"}, [(4, 6), (4,)]),
        ("any_option", {"hidden": "3", "bias": "false"}, [(1, 3)]),
    ],
)
def test_an_own_model_receives_typed_keyword_arguments(
    own: str, function: str, options: dict[str, str], shapes: list[tuple[int, ...]]
) -> None:
    model = build_model(f"{own}:{function}", (6,), 8, seed=0, options=options)
    assert [tuple(weight.shape) for weight in model.parameters()] == shapes


def test_an_unknown_option_of_an_own_model_lists_its_options(own: str) -> None:
    with pytest.raises(ConfigError, match="it has hidden, share, name"):
        build_model(f"{own}:by_default", (6,), 8, seed=0, options={"depth": "1"})


def test_an_annotation_that_cannot_be_evaluated_is_one_line(own: str) -> None:
    with pytest.raises(UserCodeError, match=r"cannot read the parameters of model.*NoSuchType"):
        build_model(f"{own}:unreadable", (6,), 8, seed=0, options={"hidden": "1"})
    assert build_model(f"{own}:unreadable", (6,), 8, seed=0) is not None


def test_the_model_is_shown_with_its_options() -> None:
    assert from_mapping({"model": "vgg11"}).model_text == "vgg11"
    config = from_mapping({"model": "vgg11", "model_options": {"width": 0.25}})
    assert config.model_text == "vgg11 width=0.25"
