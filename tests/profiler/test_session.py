"""The profiler never disturbs the script."""

from __future__ import annotations

import inspect
import io
import json
import multiprocessing
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import init_process_group
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import RunSettings
from paceline.errors import UsageError
from paceline.profiler import WARNINGS_FILE, session
from paceline.profiler.collection import read_ranks, write_result
from paceline.profiler.collectives.recorder import CollectiveRecorder
from paceline.profiler.session import Session
from paceline.profiler.step_window import StepWindow
from paceline.profiler.tracking.hooks import Hooks
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
    measured = Session(tmp_path)
    measured.start()
    during = [getattr(owner, name) for owner, name in replaced]
    measured.close()
    assert not any(one is other for one, other in zip(before, during, strict=True))
    assert [getattr(owner, name) for owner, name in replaced] == before


@pytest.mark.parametrize("part", [Hooks, CollectiveRecorder])
def test_a_profiler_that_does_not_start_leaves_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Any
) -> None:
    install = part.install

    def fail(*args: Any) -> None:
        install(*args)
        raise ValueError("no such function")

    monkeypatch.setattr(part, "install", fail)
    before = nn.Module.__call__, torch.save, torch.distributed.all_reduce
    new_group = torch.distributed.distributed_c10d._new_process_group_helper
    assert session.start(str(tmp_path)) is None
    assert (nn.Module.__call__, torch.save, torch.distributed.all_reduce) == before
    assert torch.distributed.distributed_c10d._new_process_group_helper is new_group
    (line,) = (tmp_path / WARNINGS_FILE).read_text().splitlines()
    assert json.loads(line)["text"] == "the profiler did not start: ValueError: no such function"


def test_replaced_functions_can_be_sent_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[tuple[Any, str, Any]] = []
    replace = Hooks.replace

    def note(hooks: Hooks, owner: Any, name: str, make: Any, **options: bool) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        replace(hooks, owner, name, make, **options)

    monkeypatch.setattr(Hooks, "replace", note)
    signature = inspect.signature(torch.save)
    store = f"file://{tmp_path / 'store'}"
    with profiled(tmp_path):
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            for owner, name, original in replaced:
                function = getattr(owner, name)
                assert function is not original
                assert pickle.loads(pickle.dumps(function)) is function
            assert inspect.signature(torch.save) == signature
            messages = [pickle.dumps(getattr(owner, name)) for owner, name, _ in replaced]
        finally:
            torch.distributed.destroy_process_group()
    assert {"save", "item", "all_reduce", "synchronize"} <= {name for _, name, _ in replaced}
    # Without the profiler, the same names are the functions of torch.
    for (owner, name, _), message in zip(replaced, messages, strict=True):
        assert pickle.loads(message) == getattr(owner, name)


@pytest.mark.parametrize(
    "method", ["begin_input", "end_input", "call_model", "begin_backward", "end_update"]
)
def test_an_error_in_a_hook_stops_the_profiler_but_not_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such phase")

    expected = saved(run_loop())
    measured = Session(tmp_path)
    monkeypatch.setattr(measured.tracker, method, fail)
    call = nn.Module.__call__
    measured.start()
    try:
        assert saved(run_loop()) == expected
        assert nn.Module.__call__ is call
    finally:
        measured.close()
    (line,) = (tmp_path / WARNINGS_FILE).read_text().splitlines()
    assert json.loads(line)["text"] == "the profiler stopped: ValueError: no such phase"


def test_a_folder_that_cannot_be_written_to_does_not_stop_the_script(tmp_path: Path) -> None:
    with profiled(tmp_path / "missing"):
        run_loop()
    assert not (tmp_path / "missing").exists()


def test_a_process_without_steps_writes_no_events(tmp_path: Path) -> None:
    with profiled(tmp_path), torch.no_grad():
        net = model()
        for inputs, _ in loader(2):
            net(inputs)
    assert not list(tmp_path.glob("events-*"))


def test_without_internals_of_torch_copies_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import callback

    monkeypatch.delattr(callback.CompilationCallbackHandler, "run_start_callbacks")
    torch._dynamo.reset()
    net, original = model(), torch.Tensor.to
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        measured.session.tracker._on_gpu()
        assert torch.Tensor.to is original
        for batch in loader(3):
            train_step(net, optimizer, *batch)
    (line,) = (tmp_path / WARNINGS_FILE).read_text().splitlines()
    assert "copies to the GPU are not counted" in json.loads(line)["text"]
    assert len(measured.log.steps) == 3


def test_ranks_without_collectives_have_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = replace(SINGLE_PROCESS, world_size=2, local_world_size=2)
    for name, value in at.to_environment().items():
        monkeypatch.setenv(name, value)
    with profiled(tmp_path):
        run_loop()
    settings = RunSettings("profile", {"command": ["train"]})
    missing, unseen = write_result(RunFolder(tmp_path), settings, "finished", None)["warnings"]
    assert missing.startswith("no records from rank 1")
    assert unseen.startswith("no collective of torch.distributed was seen")


def test_a_rank_is_known_although_its_process_group_is_destroyed(tmp_path: Path) -> None:
    with profiled(tmp_path) as measured:
        init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        run_loop(1)
        torch.distributed.destroy_process_group()
    assert (measured.record.rank, measured.record.start["workers"]) == (1, 2)


def test_a_second_process_of_the_same_rank_is_not_recorded(tmp_path: Path) -> None:
    with profiled(tmp_path):
        run_loop()
        other = Session(tmp_path)
        other.start()
        run_loop()
        other.close()
    assert len(read_ranks(RunFolder(tmp_path))) == 1
    (line,) = (tmp_path / WARNINGS_FILE).read_text().splitlines()
    text = "the profiler stopped: RunError: another process with rank 0 is measured already"
    assert json.loads(line)["text"] == text


def test_a_call_that_another_library_replaced_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = nn.Module.__call__
    called: list[str] = []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(self).__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    with profiled(tmp_path) as measured:
        run_loop(1)
    assert called == ["Sequential", "Linear", "ReLU", "Linear"]
    assert measured.phases[:3] == ["input", "forward", "backward"]


class Wrapped(nn.Module):
    """A module of a script: those of torch alone are not compiled in place."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.net(inputs)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_compiled_models_are_compiled_once(tmp_path: Path, is_in_place: bool) -> None:
    compilations = 0

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    torch._dynamo.reset()
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    compiled: Any = Wrapped(net)
    if is_in_place:
        compiled.compile(backend=backend)
    else:
        compiled = torch.compile(compiled, backend=backend)
    with profiled(tmp_path) as measured:
        for batch in loader(4):
            train_step(compiled, optimizer, *batch)
    assert compilations == 1
    assert measured.phases == [*["input", "forward", "backward", "update"] * 4, "input"]


def graph_breaks_of_clearing() -> list[str]:
    """Each of them is a warning for the script, or an exception with `fullgraph`."""
    torch._dynamo.reset()
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def loss(inputs: torch.Tensor) -> Any:
        optimizer.zero_grad()
        return net(inputs).sum()

    for _ in range(3):
        loss(torch.ones(4, 2)).backward()
        optimizer.step()
    return sorted(reason.splitlines()[0] for reason in breaks)


def test_compiled_code_may_clear_gradients(tmp_path: Path) -> None:
    without = graph_breaks_of_clearing()
    with profiled(tmp_path):
        assert graph_breaks_of_clearing() == without


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_forked_process_is_measured_unless_its_parent_trains(
    tmp_path: Path, has_trained: bool
) -> None:
    measured = session.start(str(tmp_path))
    assert measured is not None
    try:
        if has_trained:
            run_loop()
        child = multiprocessing.get_context("fork").Process(target=run_loop)
        child.start()
        child.join()
        assert child.exitcode == 0
    finally:
        session.stop(measured)
    (record,) = read_ranks(RunFolder(tmp_path))
    assert record.start["process"] == (os.getpid() if has_trained else child.pid)


def test_hooks_of_other_optimizer_users_survive_a_failing_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Session(tmp_path)

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(measured.tracker, "end_update", fail)
    measured.start()
    calls: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        run_loop(3)
    finally:
        handle.remove()
        measured.close()
    assert len(calls) == 3


def test_only_the_steps_of_the_window_are_measured(tmp_path: Path) -> None:
    measured = Session(tmp_path, StepWindow.parse("2:5"))
    call = nn.Module.__call__
    measured.start()
    try:
        run_loop(8)
        # The end of the last step is noticed within a second.
        measured.tracker.events.flush()
        assert nn.Module.__call__ is call
    finally:
        measured.close()
    (record,) = read_ranks(RunFolder(tmp_path))
    assert len(record.step_seconds) == 3
    assert record.last["samples"] == 12
    assert record.blocks[0]["first"] == 0
    # Times are rounded to microseconds.
    assert sum(record.step_seconds) <= record.wall_seconds + 1e-5
    account = record.account()
    assert account["after_first"]["iterations"] == 2
    assert account["startup_seconds"] == {}


def test_a_window_after_the_last_step_is_named(tmp_path: Path) -> None:
    measured = Session(tmp_path, StepWindow.parse("1000:1010"))
    measured.start()
    try:
        run_loop(4)
    finally:
        measured.close()
    settings = RunSettings("profile", {"command": ["python", "train.py"]})
    values = write_result(RunFolder(tmp_path), settings, "finished", None)
    assert values["warnings"] == ["the script took 4 steps; --steps starts at 1,000"]


@pytest.mark.parametrize("text", ["5", "5:2", "a:b", "-1:3", "3:3"])
def test_an_invalid_window_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--steps: must be A:B"):
        StepWindow.parse(text)


def test_distributed_checkpoints_are_checkpoints(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        for batch in loader(2):
            train_step(net, optimizer, *batch)
            with warnings.catch_warnings(action="ignore"):
                save({"model": net.state_dict()}, checkpoint_id=tmp_path / "weights", no_dist=True)
    assert measured.record.last["checkpoints"] == 2
