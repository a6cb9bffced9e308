"""docs/compression.md covers all codecs, and its example works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.compression import CODECS, option_names
from paceline.compression.testing import exchange_all_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "compression.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CODECS.names())
def test_page_lists_every_codec_and_its_options(name: str) -> None:
    row = re.search(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    assert row
    assert all(f"`{option}=" in row[0] for option in option_names(name))


def test_example_codec_sums_signs_at_mean_magnitude() -> None:
    example = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert example
    names: dict[str, Any] = {}
    exec(example[1], names)
    codecs = [names["Sign"]() for _ in range(2)]
    gradients = [torch.tensor([1.0, -3.0]), torch.tensor([5.0, 1.0])]
    outcome = exchange_all_ranks(codecs, "layer", gradients)
    assert torch.equal(outcome.results[0], torch.tensor([2.0 + 3.0, -2.0 + 3.0]))
    assert outcome.wire_bytes == codecs[0].wire_bytes(2, 4)
