"""How large the buckets of gradients may be."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.sync.options import create_strategy


@pytest.mark.parametrize(
    ("strategy", "option"),
    [("overlap", "bucket_mib"), ("overlap", "first_bucket_mib"), ("ddp", "bucket_mib")],
)
def test_a_bucket_of_less_than_nothing_is_refused(strategy: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"-o {option}: must be at least 0, got -1"):
        create_strategy(strategy, {option: "-1"})
