"""Threads of a worker, and settings of torch that hold while it trains."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.config import from_mapping
from paceline.training import device


@pytest.mark.parametrize(
    ("settings", "node", "threads"),
    [
        ({"nproc_per_node": 2}, 0, 4),
        ({"cluster": "nodes=4"}, 0, 2),
        ({"cluster": "nodes=2", "nproc_per_node": 8}, 0, 1),
        ({"cluster": "nodes=4,cpus=8"}, 0, 8),
        ({"cluster": "nodes=4,slow=3:0.5"}, 3, 8),
        ({"cluster": "nodes=4", "threads": 3}, 0, 3),
    ],
)
def test_default_threads_are_an_equal_share_of_the_usable_cores(
    settings: dict[str, Any], node: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of a cluster with no quota of their own share the machine; `cores_usable` knows one."""
    monkeypatch.setattr(device, "cores_usable", lambda: 8)
    config = from_mapping({"strategy": "allreduce", **settings})
    assert device.threads_of(replace(config, node_rank=node)) == threads


def test_operations_without_deterministic_gradients_are_off_while_a_worker_trains() -> None:
    config = from_mapping({"threads": torch.get_num_threads()})
    torch.backends.cuda.enable_cudnn_sdp(True)
    one, other = ExitStack(), ExitStack()
    one.enter_context(device.computing(config))
    other.enter_context(device.computing(config))
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    # Threads of one process end in any order.
    one.close()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    other.close()
    assert torch.backends.cuda.cudnn_sdp_enabled()
