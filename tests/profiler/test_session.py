"""The profiler never disturbs the script."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paceline.profiler import WARNINGS_FILE
from paceline.profiler.collection import read_ranks
from paceline.profiler.session import Session
from paceline.records import RunFolder
from tests.support.profiled import loader, model, profiled, train_step


def run_loop(batches: int = 3) -> nn.Module:
    torch.manual_seed(0)
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    for batch in loader(batches):
        train_step(net, optimizer, *batch)
    return net


def saved(net: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(net, file)
    return file.getvalue()


def test_weights_and_saved_models_are_the_same_with_and_without(tmp_path: Path) -> None:
    expected = saved(run_loop())
    with profiled(tmp_path):
        assert saved(run_loop()) == expected


def test_closing_restores_torch(tmp_path: Path) -> None:
    replaced = (
        (nn.Module, "__call__"),
        (torch.autograd, "_engine_run_backward"),
        (torch.utils.data.DataLoader, "__iter__"),
        (torch.amp.GradScaler, "step"),
        (torch, "save"),
    )
    before = [getattr(owner, name) for owner, name in replaced]
    session = Session(tmp_path)
    session.start()
    during = [getattr(owner, name) for owner, name in replaced]
    session.close()
    assert not any(one is other for one, other in zip(before, during, strict=True))
    assert [getattr(owner, name) for owner, name in replaced] == before


@pytest.mark.parametrize(
    "method", ["begin_input", "end_input", "call_model", "begin_backward", "end_update"]
)
def test_an_error_in_a_hook_stops_the_profiler_but_not_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such phase")

    expected = saved(run_loop())
    session = Session(tmp_path)
    monkeypatch.setattr(session.tracker, method, fail)
    call = nn.Module.__call__
    session.start()
    try:
        assert saved(run_loop()) == expected
        assert nn.Module.__call__ is call
    finally:
        session.close()
    (line,) = (tmp_path / WARNINGS_FILE).read_text().splitlines()
    assert json.loads(line)["text"] == "the profiler stopped: ValueError: no such phase"


def test_a_folder_that_cannot_be_written_to_does_not_stop_the_script(tmp_path: Path) -> None:
    with profiled(tmp_path / "missing"):
        run_loop()


def test_a_process_without_steps_writes_nothing(tmp_path: Path) -> None:
    with profiled(tmp_path), torch.no_grad():
        net = model()
        for inputs, _ in loader(2):
            net(inputs)
    assert not list(tmp_path.iterdir())


def test_a_second_process_of_the_same_rank_is_not_recorded(tmp_path: Path) -> None:
    with profiled(tmp_path):
        run_loop()
        other = Session(tmp_path)
        other.start()
        run_loop()
        other.close()
    assert len(read_ranks(RunFolder(tmp_path))) == 1


def test_compiled_models_are_compiled_once(tmp_path: Path) -> None:
    compilations = 0

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    torch._dynamo.reset()
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    compiled: Any = torch.compile(net, backend=backend)
    with profiled(tmp_path) as measured:
        for batch in loader(4):
            train_step(compiled, optimizer, *batch)
    assert compilations == 1
    assert measured.phases == [*["input", "forward", "backward", "update"] * 4, "input"]


def test_a_forked_process_measures_itself(tmp_path: Path) -> None:
    from paceline.profiler.session import start

    session = start(str(tmp_path))
    assert session is not None
    try:
        child = os.fork()
        if not child:
            code = 1
            try:
                run_loop()
                code = 0
            finally:
                import atexit

                atexit._run_exitfuncs()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (record,) = read_ranks(RunFolder(tmp_path))
        assert record.start["process"] == child
    finally:
        session.close()
