"""PyTorch's own tests of torch.distributed pass on the backend `paceline` wherever they do on gloo.

To see that none fails now and then, run them repeatedly:

    for i in 1 2 3; do python -m pytest tests/torch_backend/test_torch_distributed.py || break; done
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.warm import PrewarmedStarter

pytest.importorskip("expecttest", reason="PyTorch's own tests need the package expecttest")
if find_spec("torch.testing._internal.distributed.distributed_test") is None:
    pytest.skip("this build of PyTorch lacks its own tests", allow_module_level=True)

ASKS_FOR_GLOO_BY_NAME = {"test_get_backend": "'paceline' != 'gloo'"}
"""Tests that no other backend can pass, and what they say of ours."""

FEWEST_PASSED = 80
"""Of torch 2.13's 285 tests, gloo passes 91 to 94 without a GPU, depending on the world size."""

WORLD_SIZES = (3, 4)
"""An odd one, and the smallest that runs every test. None of the tests requires exactly two ranks;
test_backend.py compares two ranks with gloo."""

LIMIT_SECONDS = 500

Outcomes = Mapping[str, tuple[str, str]]
"""By test, how it ended, and why."""


def run(
    starter: PrewarmedStarter,
    folder: Path,
    world_size: int,
    backend: str,
    names: Sequence[str] = (),
) -> Outcomes:
    """The tests named, by default all of them."""
    results, printed = folder / f"{backend}.json", folder / f"{backend}.txt"
    with printed.open("w") as file:
        process = starter.start(
            ["-m", "torch_distributed_tests", backend, str(results), *names],
            env={**os.environ, "WORLD_SIZE": str(world_size)},
            cwd=Path(__file__).parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        try:
            code = process.wait(LIMIT_SECONDS)
        finally:
            process.kill()
    assert code == 0, printed.read_text()
    outcomes: Outcomes = json.loads(results.read_text())
    return outcomes


@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_gloo_passes_the_backend_passes(
    starter: PrewarmedStarter, tmp_path: Path, world_size: int
) -> None:
    ours = run(starter, tmp_path, world_size, "paceline")
    for name, message in ASKS_FOR_GLOO_BY_NAME.items():
        assert message in ours[name][1]
    doubtful = [
        name
        for name, (outcome, _) in ours.items()
        if outcome in ("failed", "left") and name not in ASKS_FOR_GLOO_BY_NAME
    ]
    theirs = run(starter, tmp_path, world_size, "gloo", doubtful) if doubtful else {}
    worse = {name: ours[name][1] for name in doubtful if theirs[name][0] == "passed"}
    assert not worse
    assert sum(outcome == "passed" for outcome, _ in ours.values()) >= FEWEST_PASSED
