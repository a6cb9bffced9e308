"""Bus factors, held against what the busiest worker of a ring or a tree has to move."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import communicator
from paceline.commbench.spec import BUS_FACTORS


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_factor_is_what_a_ring_sends(operation: str, workers: int) -> None:
    tensor = torch.empty(workers * 10)
    sent = getattr(communicator, f"{operation}_counts")(tensor, 0, workers)["bytes_sent"]
    assert BUS_FACTORS[operation](workers) * tensor.nbytes == pytest.approx(sent)


@pytest.mark.parametrize("workers", [2, 5])
def test_the_root_keeps_its_own_part_of_a_gather_or_scatter(workers: int) -> None:
    others = (workers - 1) * 10
    for operation in ("gather", "scatter"):
        assert BUS_FACTORS[operation](workers) * workers * 10 == pytest.approx(others)
