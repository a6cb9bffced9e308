"""Calls of models without gradients: evaluation, or part of a step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.support.profiled import STEP, loader, loss_of, model, profiled, sgd, train_step


def test_evaluation_is_not_part_of_a_step(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for _ in range(2):
            net.train()
            for batch in loader(2):
                train_step(net, optimizer, *batch)
            net.eval()
            with torch.no_grad():
                for inputs, targets in loader(2):
                    loss_of(net, inputs, targets)
    assert measured.phases == [*STEP * 2, "input", "evaluate"] * 2
    steps = measured.log.steps
    evaluations = [span for span in measured.log.phases if span.name == "evaluate"]
    assert len(measured.record.step_seconds) == 4
    assert not any(
        step.began < evaluation.began < step.ended for step in steps for evaluation in evaluations
    )


def test_evaluation_that_disables_gradients_inside_its_loop(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for _ in range(2):
            net.train()
            for batch in loader(2):
                train_step(net, optimizer, *batch)
            net.eval()
            for inputs, _targets in loader(3):
                with torch.no_grad():
                    net(inputs)
    # Only the first batch is not known to be one of the evaluation.
    assert measured.phases == [*STEP * 2, "input", "evaluate"] * 2
    assert len(measured.record.step_seconds) == 4


@pytest.mark.parametrize("is_in_eval_mode", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_evaluation_with_a_loss_module_is_not_part_of_steps(
    tmp_path: Path, is_in_eval_mode: bool, is_inside: bool
) -> None:
    net, loss = model(), nn.MSELoss()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for _ in range(2):
            net.train()
            for batch in loader(2):
                train_step(net, optimizer, *batch)
            net.train(not is_in_eval_mode)
            with torch.set_grad_enabled(is_inside):
                for inputs, targets in loader(3):
                    with torch.no_grad():
                        loss(net(inputs), targets)
    # If gradients are disabled inside the loop, its first batch is not known to be of evaluation.
    assert measured.phases == [*STEP * 2, "input", "evaluate"] * 2
    assert len(measured.record.step_seconds) == 4


def test_evaluation_without_a_loader_and_with_a_loss_module(tmp_path: Path) -> None:
    net, loss = model(), nn.MSELoss()
    optimizer = sgd(net)
    batch = torch.ones(4, 2), torch.zeros(4, 2)
    with profiled(tmp_path) as measured:
        for _ in range(2):
            for _ in range(2):
                train_step(net, optimizer, *batch)
            net.eval()
            with torch.no_grad():
                for inputs, targets in [batch] * 2:
                    loss(net(inputs), targets)
            net.train()
    assert measured.phases == [*STEP[1:] * 2, "evaluate"] * 2


def test_a_metric_of_each_step_is_not_evaluation(tmp_path: Path) -> None:
    net, metric = model(), nn.L1Loss()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(3):
            outputs = net(inputs)
            nn.functional.mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                metric(outputs, targets)
    assert measured.phases == [*STEP * 3, "input"]


def test_activation_checkpointing_of_the_whole_model_is_forward(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(3):
            outputs = checkpoint(net, inputs.requires_grad_(), use_reentrant=True)
            nn.functional.mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert measured.phases == [*STEP * 3, "input"]
    assert measured.record.last["samples"] == 12


@pytest.mark.parametrize("is_teacher", [False, True])
def test_checkpointed_parts_of_a_batch_are_forward(tmp_path: Path, is_teacher: bool) -> None:
    net, head = model(), nn.Linear(2, 2)
    teacher = copy.deepcopy(net).eval()
    optimizer = SGD([*net.parameters(), *head.parameters()], lr=0.1)
    with profiled(tmp_path) as measured:
        for inputs, targets in loader(3):
            for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
                if is_teacher:
                    with torch.no_grad():
                        teacher(part)
                outputs = head(checkpoint(net, part.requires_grad_(), use_reentrant=True))
                nn.functional.mse_loss(outputs, wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    step = ["input", *["forward", "backward"] * 2, "update"]
    assert measured.phases == [*step * 3, "input"]
    assert measured.record.last["samples"] == 12


def test_a_teacher_and_a_checkpointed_model_are_forward(tmp_path: Path) -> None:
    net = model()
    teacher = copy.deepcopy(net).eval()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, _ in loader(3):
            with torch.no_grad():
                targets = teacher(inputs)
            outputs = checkpoint(net, inputs.requires_grad_(), use_reentrant=True)
            nn.functional.mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert measured.phases == [*STEP * 3, "input"]
    assert measured.record.last["samples"] == 12


def test_training_without_autograd_is_forward(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, _ in loader(3):
            with torch.no_grad():
                net(inputs)
            for weight in net.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert measured.phases == [*["input", "forward", "update"] * 3, "input"]


class ListedWeights(nn.Module):
    def parameters(self, recurse: bool = True) -> Any:
        return [*super().parameters(recurse)]

    def forward(self, value: Tensor) -> Tensor:
        return value


class NamedSettings(ListedWeights):
    def __init__(self) -> None:
        super().__init__()
        self.parameters = {"rate": 0.1}  # type: ignore[assignment]  # scripts do that


@pytest.mark.parametrize("make", [ListedWeights, NamedSettings])
def test_modules_may_replace_what_the_profiler_reads(tmp_path: Path, make: type[nn.Module]) -> None:
    with profiled(tmp_path), torch.no_grad():
        assert make()(torch.ones(1)) == 1


def test_evaluation_with_gradients(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for batch in loader(2):
            train_step(net, optimizer, *batch)
        net.eval()
        for inputs, _ in loader(2):
            net(inputs)
    assert measured.phases == [*STEP * 2, "input", *["evaluate", "input"] * 2]


@pytest.mark.parametrize("has_loader", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_evaluation_without_a_loader_of_training_batches(
    tmp_path: Path, has_loader: bool, is_inside: bool
) -> None:
    net = model()
    optimizer = sgd(net)
    batch = torch.ones(4, 2), torch.zeros(4, 2)
    with profiled(tmp_path) as measured:
        for _ in range(2):
            for _ in range(2):
                train_step(net, optimizer, *batch)
            net.eval()
            with torch.set_grad_enabled(is_inside):
                for inputs, _targets in loader(2) if has_loader else [batch] * 2:
                    with torch.no_grad():
                        net(inputs)
            net.train()
    evaluation = ["input", "evaluate"] if has_loader and is_inside else ["evaluate"]
    assert measured.phases == [*STEP[1:] * 2, *evaluation] * 2
    assert len(measured.record.step_seconds) == 4


def test_a_teacher_without_a_loader_is_part_of_forward(tmp_path: Path) -> None:
    net = model()
    teacher = copy.deepcopy(net).eval()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs in torch.ones(3, 4, 2):
            with torch.no_grad():
                targets = teacher(inputs)
            train_step(net, optimizer, inputs, targets)
    assert measured.phases == STEP[1:] * 3


def test_a_teacher_is_part_of_forward(tmp_path: Path) -> None:
    net = model()
    teacher = copy.deepcopy(net).eval()
    optimizer = sgd(net)
    with profiled(tmp_path) as measured:
        for inputs, _ in loader(3):
            with torch.no_grad():
                targets = teacher(inputs)
            train_step(net, optimizer, inputs, targets)
    assert measured.phases == [*STEP * 3, "input"]
