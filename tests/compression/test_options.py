"""Codecs are created from names and text options; errors are one line."""

from __future__ import annotations

import pytest
import torch

from paceline.compression import CODECS, create, option_names
from paceline.compression.int8 import Int8
from paceline.compression.powersgd import PowerSGD
from paceline.compression.testing import exchange_all_ranks
from paceline.compression.topk import TopK
from paceline.errors import ConfigError, UnknownNameError, UsageError, UserCodeError


def test_text_options_are_converted_to_typed_arguments() -> None:
    topk = create("topk", {"ratio": "0.25"})
    powersgd = create("powersgd", {"rank": "3"})
    int8 = create("int8", {"chunk": "64"})
    assert isinstance(topk, TopK)
    assert isinstance(powersgd, PowerSGD)
    assert isinstance(int8, Int8)
    assert (topk.ratio, powersgd.rank, int8.chunk) == (0.25, 3, 64)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("topk", {"ratio": "0"}, "-o ratio: must be above 0 and at most 1, got 0.0"),
        ("topk", {"ratio": "1.5"}, "-o ratio: must be above 0 and at most 1, got 1.5"),
        ("topk", {"ratio": "much"}, "-o ratio: must be a number, got 'much'"),
        (
            "int8",
            {"chunk": "0"},
            "-o chunk: must be at least 1 and at most 10000000000000000, got 0",
        ),
        ("int8", {"chunk": "1.5"}, "-o chunk: must be a whole number, got '1.5'"),
        ("powersgd", {"rank": "0"}, "-o rank: must be at least 1 and at most 1000000, got 0"),
        ("topk", {"rank": "2"}, "-o rank: codec topk has no such option; it has ratio"),
        ("bf16", {"rank": "2"}, "-o rank: codec bf16 has no such option; it has none"),
    ],
)
def test_invalid_option_is_a_one_line_error(
    name: str, options: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name, options)
    assert caught.value.problems == (expected,)


def test_chunk_larger_than_the_gradient_is_one_chunk() -> None:
    codec, whole = create("int8", {"chunk": str(2**50)}), create("int8", {"chunk": "10"})
    gradient = torch.linspace(-1, 1, 10)
    results = [
        exchange_all_ranks([each], "b", [gradient.clone()]).results[0] for each in (codec, whole)
    ]
    assert torch.equal(results[0], results[1])


def test_all_invalid_options_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        create("topk", {"ratio": "much", "rank": "2"})
    assert len(caught.value.problems) == 2


def test_misspelled_codec_suggests_a_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        create("top_k", {})


def test_custom_class_must_be_a_codec() -> None:
    with pytest.raises(UserCodeError, match="must be a subclass"):
        create("collections:OrderedDict", {})


@pytest.mark.parametrize("name", CODECS.names())
def test_option_names_lists_all_options(name: str) -> None:
    expected = {"topk": ("ratio",), "int8": ("chunk",), "powersgd": ("rank",)}
    assert option_names(name) == expected.get(name, ())


@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_state_of_different_buckets_is_rejected(name: str) -> None:
    codec = create(name, {})
    exchange_all_ranks([codec], "bucket", [torch.ones(400)], ((20, 20),))
    with pytest.raises(UsageError, match="resume with the original bucket size"):
        exchange_all_ranks([codec], "bucket", [torch.ones(900)], ((30, 30),))
