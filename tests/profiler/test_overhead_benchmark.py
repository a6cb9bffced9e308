"""What `benchmarks/profiler.py` relies on: hooks that can be switched, and its estimate."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import dataloader

from tests.support.profiled import loader, model, profiled, train_step

FILE = Path(__file__).parents[2] / "benchmarks" / "profiler.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("profiler_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replaced() -> list[object]:
    iterator = dataloader._BaseDataLoaderIter
    return [
        nn.Module.__call__,
        vars(torch.autograd)["_engine_run_backward"],
        iterator.__next__,
        torch.Tensor.item,
    ]


def test_steps_without_hooks_are_not_noted_and_take_no_time(
    tmp_path: Path, benchmark: ModuleType
) -> None:
    without = replaced()
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        session, hooked = measured.session, replaced()
        batches = iter(loader(8))
        for _ in range(3):
            train_step(net, optimizer, *next(batches))
        switch, due = benchmark.Switch(session), session.tracker.events.due
        switch.turn(on=False)
        assert replaced() == without
        train_step(net, optimizer, *next(batches))
        switch.turn(on=True)
        assert replaced() == hooked
        assert session.tracker.events.due > due
        train_step(net, optimizer, *next(batches))
        session.tracker.events.flush()
        assert session.tracker.steps == 4
    assert replaced() == without


def test_the_increase_is_that_of_each_kind_of_step_weighted_by_its_share(
    benchmark: ModuleType,
) -> None:
    random = np.random.default_rng(0)
    steps = []
    for pair in range(50):
        # The machine is at times slower, and interrupts some steps.
        usual = 1e-3 * (1 + pair % 3)
        for is_profiled in (False, True):
            for step in range(10):
                kind = int(is_profiled and step == 0)
                seconds = usual + 20e-6 * is_profiled + 500e-6 * kind + 5e-3 * (step == 5)
                steps.append((pair, is_profiled, kind, seconds + random.normal(0, 1e-6), 0.0))
    pairs = benchmark._pairs(np.array(steps, benchmark.STEP), "wall")
    by_kind = benchmark._increase_by_kind(pairs)
    assert by_kind["interpreted"] == (pytest.approx(0.1), pytest.approx(520e-6, abs=1e-6))
    assert by_kind["others"] == (pytest.approx(0.9), pytest.approx(20e-6, abs=1e-6))
    increase = benchmark._increase(pairs)
    assert increase == pytest.approx(70e-6, abs=1e-6)
    low, high = benchmark._interval(pairs)
    assert low < increase < high < 75e-6
