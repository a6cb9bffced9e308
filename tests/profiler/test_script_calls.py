"""Calls of a script that can block its steps, by line."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.data.dataloader as dataloader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.profiler.collectives.backward_passes import BackwardPasses
from paceline.profiler.overhead import HookCosts, NoteProbe, measure_hook_costs
from paceline.profiler.tracking.script_calls import blocks_program, tensors_of
from tests.support.profiled import Profiled, loader, loss_of, model, profiled, train_step


def facts(measured: Profiled) -> dict[str, Any]:
    events = [event for event in measured.record.events if event["event"] == "facts"]
    return dict(events[-1])


def here() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


def test_calls_are_counted_by_line(tmp_path: Path) -> None:
    net = model()
    # Adam reads its step count back for each parameter: that is not a call of the script.
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    with profiled(tmp_path) as measured:
        for step, batch in enumerate(loader(6)):
            train_step(net, optimizer, *batch)
            loss = loss_of(net, *batch)
            total, number = loss.item(), here()
            if step % 3 == 0:
                total += float(loss.detach())
    assert total > 0
    found = {(one["call"], one["line"]): one for one in facts(measured)["calls"]}
    every, third = found["Tensor.item", number], found["Tensor.__float__", number + 2]
    assert len(found) == 2
    assert (every["count"], every["steps"], third["count"]) == (6, 6, 2)
    assert every["file"] == __file__
    assert every["code"].startswith("total, number = loss.item()")
    assert 0 < every["seconds"] < 1


def test_of_many_read_backs_few_are_timed_and_all_are_counted(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    values = list(torch.ones(100))
    with profiled(tmp_path) as measured:
        for step, batch in enumerate(loader(6)):
            # Once in each of the first three steps, 200 times in each of the others.
            for _ in range(1 if step < 3 else 100):
                assert values[step].item() + values[0].item() == 2, here()
            train_step(net, optimizer, *batch)
    (found,) = facts(measured)["calls"]
    assert (found["count"], found["steps"]) == (3 * (2 + 200), 6)
    assert 0 < found["seconds"] < 1
    tracker = measured.session.tracker
    assert tracker.timed_calls < found["count"] / 2
    # Adam reads four step counts in each step; the first reading finds that it is torch's.
    assert tracker.timed_calls + tracker.skipped_calls == found["count"] + 4 * 6 - 1


def test_the_overhead_contains_read_backs(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
            for _ in range(100):
                batch[0].sum().item()
    tracker = measured.session.tracker
    probe = NoteProbe()
    without = HookCosts(probe=probe).seconds(tracker)
    costs = HookCosts(timed_seconds=1.0, skipped_seconds=1.0, probe=probe)
    with_read_backs = costs.seconds(tracker)
    # Sums of floats: without rounding, the difference may be one bit less than 300.
    assert round(with_read_backs - without, 6) >= 300
    costs = measure_hook_costs(lambda function: function)
    assert costs.timed_seconds > 0
    assert costs.skipped_seconds > 0


class OnGpu(torch.Tensor):
    is_cuda = True


def test_collectives_on_a_gpu_do_not_block_the_program() -> None:
    host, gpu = torch.ones(2), torch.ones(2).as_subclass(OnGpu)
    assert blocks_program(tensors_of((host, dist.ReduceOp.SUM)), None)
    assert not blocks_program(tensors_of((gpu,)), None)
    assert not blocks_program(tensors_of(([gpu, gpu], gpu)), None)
    # An asynchronous one returns at once.
    assert not blocks_program(tensors_of((host,)), object())


def test_evaluation_is_not_counted(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
        net.eval()
        with torch.no_grad():
            for batch in loader(3):
                loss_of(net, *batch).item()
        torch.save(net.state_dict(), io.BytesIO())
        number = here() - 1
    (saved,) = facts(measured)["calls"]
    assert (saved["call"], saved["line"], saved["count"]) == ("torch.save", number, 1)
    (used,) = facts(measured)["loaders"]
    assert used["batches"] == 3


def test_data_loaders_are_described(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        batches = loader(3, num_workers=1)
        for _ in range(2):
            for batch in batches:
                train_step(net, optimizer, *batch)
    (used,) = facts(measured)["loaders"]
    assert (used["workers"], used["batch_size"], used["batches"]) == (1, 4, 6)
    assert "DataLoader" in used["code"]
    assert used["seconds"] > 0


def test_calls_of_a_library_are_recorded_with_its_line_and_that_of_the_script(
    tmp_path: Path,
) -> None:
    file = Path(sysconfig.get_path("purelib"), "framework", "loop.py")
    of_library = eval(compile("lambda function, *values: function(*values)", file, "eval"))
    data = loader(3).dataset
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        batches, number = of_library(dataloader.DataLoader, data, 4), here()
        for batch in batches:
            train_step(net, optimizer, *batch)
            of_library(torch.Tensor.item, loss_of(net, *batch))
    recorded = facts(measured)
    found = [recorded[name][0] for name in ("loaders", "calls")]
    assert [(one["file"], one["line"]) for one in found] == [
        (__file__, number),
        (__file__, number + 3),
    ]
    assert [one["library"] for one in found] == [{"file": "framework/loop.py", "line": 1}] * 2


def test_a_warning_of_a_data_loader_names_the_same_file_as_without_the_profiler(
    tmp_path: Path,
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("torch warns if there is nothing to pin memory for")
    with pytest.warns(UserWarning, match="pin_memory") as warned, profiled(tmp_path):
        iter(loader(1, pin_memory=True))
    assert [one.filename for one in warned] == [dataloader.__file__]


def test_threads_and_memory_are_recorded(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
    recorded = facts(measured)
    assert recorded["threads"] == torch.get_num_threads()
    assert recorded["cores"] >= 1
    assert recorded["cpu_seconds"] > 0
    assert recorded["rss_bytes"] > 10_000_000
    assert recorded["queue_seconds"] is None or recorded["queue_seconds"] >= 0


@pytest.mark.parametrize("search", [False, True])
def test_ddp_models_and_collectives(tmp_path: Path, search: bool) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with profiled(tmp_path) as measured:
            net = DistributedDataParallel(model(), find_unused_parameters=search)
            number = here() - 1
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for batch in loader(4):
                train_step(net, optimizer, *batch)
                dist.all_reduce(torch.ones(5))
                work = dist.all_reduce(torch.ones(5), async_op=True)
                assert work is not None
                work.wait()
            recorded = facts_at_end(measured, net)
    finally:
        dist.destroy_process_group()
    (one,) = recorded["ddp_models"]
    assert (one["line"], one["find_unused_parameters"]) == (number, search)
    assert sum(one["bucket_bytes"]) == sum(each.nbytes for each in net.parameters())
    assert (one["searches"], one["unused_bytes"]) == (4 if search else 0, 0)
    # The asynchronous one does not block.
    (call,) = recorded["calls"]
    assert (call["call"], call["count"], call["bytes"]) == ("dist.all_reduce", 4, 4 * 20)


class OptionalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, uses_both: bool) -> torch.Tensor:
        outputs: torch.Tensor = self.first(inputs)
        return self.second(outputs) if uses_both else outputs


def test_issuing_the_last_bucket_is_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue_seconds, add = 0.02, BackwardPasses.add

    def slow(*args: Any) -> Any:
        time.sleep(issue_seconds)
        return add(*args)

    monkeypatch.setattr(BackwardPasses, "add", slow)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with profiled(tmp_path) as measured:
            net = DistributedDataParallel(model())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for batch in loader(4):
                train_step(net, optimizer, *batch)
    finally:
        dist.destroy_process_group()
    seconds = measured.session.tracker.clock.seconds
    assert seconds["exchange"] >= 4 * issue_seconds


@pytest.mark.parametrize("unused_step", [None, 17])
def test_a_parameter_that_one_step_leaves_unused(tmp_path: Path, unused_step: int | None) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with profiled(tmp_path) as measured:
            net = DistributedDataParallel(OptionalLayer(), find_unused_parameters=True)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(20):
                net(torch.ones(1, 2), step != unused_step).sum().backward()
                optimizer.step()
            recorded = facts_at_end(measured, net)
    finally:
        dist.destroy_process_group()
    (one,) = recorded["ddp_models"]
    assert one["same_parameters_unused"] == (unused_step is None)


def facts_at_end(measured: Profiled, keep: nn.Module) -> dict[str, Any]:
    """While the model is alive."""
    return measured.session._calls.records()


def test_hooks_are_removed(tmp_path: Path) -> None:
    before = torch.Tensor.item, torch.save, dist.all_reduce, DistributedDataParallel.__init__
    with profiled(tmp_path):
        assert torch.save is not before[1]
    after = torch.Tensor.item, torch.save, dist.all_reduce, DistributedDataParallel.__init__
    assert after == before
    assert "item" not in vars(torch.Tensor)


def test_compiled_code_may_read_back(tmp_path: Path) -> None:
    @torch.compile(backend="eager")
    def scaled(value: torch.Tensor) -> torch.Tensor:
        return value * value.sum().item()

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
            assert scaled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert not measured.record.events or all(
        event["event"] != "warning" for event in measured.record.events
    )


COMPILED_COLLECTIVE = """
import torch, torch.distributed as dist
from paceline.profiler.session import start, stop

dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)

@torch.compile(backend="eager", fullgraph=True)
def total(values):
    values = 2 * values
    dist.all_reduce(values)
    return values + 1

measured = start("{folder}")
print(total(torch.ones(2)).tolist())
stop(measured)
torch._dynamo.reset()
print(total(torch.ones(2)).tolist())
dist.destroy_process_group()
"""


def test_collectives_can_be_compiled_during_and_after_a_profile(tmp_path: Path) -> None:
    # In a new process, which has not compiled before.
    script = COMPILED_COLLECTIVE.format(folder=tmp_path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[3.0, 3.0]"] * 2, done.stderr


COMPILED_FRAMES = """
import torch, torch.distributed as dist
from paceline.profiler.session import start, stop

dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)

def compiled_frames():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compiled(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return torch._dynamo.utils.counters["frames"]["total"]

first, before = compiled_frames(), compiled_frames()
measured = start("{folder}")
during = compiled_frames()
stop(measured)
print(before > 0, during - before)
dist.destroy_process_group()
"""


def test_the_profiler_itself_is_not_compiled(tmp_path: Path) -> None:
    script = COMPILED_FRAMES.format(folder=tmp_path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True 0"], done.stderr


def test_a_script_may_set_only_some_variables_of_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profiled(tmp_path) as measured:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
    assert len(measured.record.step_seconds) == 3
