"""Optimizers do not import torch._dynamo, which takes a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from paceline.config import from_mapping
from paceline.training.optimizer import build_optimizer

weight = torch.nn.Parameter(torch.ones(3))
optimizer = build_optimizer(from_mapping({"optimizer": sys.argv[1]}), [weight])
weight.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert not torch.equal(weight, torch.ones(3))
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_step_does_not_import_dynamo(name: str) -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM, name]).returncode == 0
