"""Elastic averaging: update rule, center weights, evaluation and resume."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.strategies.easgd import Easgd
from paceline.strategies.local_sgd import LocalSgd
from tests.support import toy_replicas as toy


def own_steps(workers: int, steps: int) -> list[Tensor]:
    """Return the weights of every worker after steps without communication."""
    return toy.trained(workers, lambda: LocalSgd(every=99), steps, toy.sgd(), finish=False)


def center_and_workers(workers: int, alpha: float | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return center and local weights after two steps and the first elastic update."""

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        strategy = Easgd(tau=2, alpha=alpha)
        strategy.setup(toy.replica(communicator, toy.sgd()))
        toy.train(strategy, range(2))
        with strategy.eval_weights():
            center = toy.weights_of(strategy.replica)
        return center, toy.weights_of(strategy.replica)

    return in_process.run(workers, work)


@pytest.mark.parametrize(
    ("workers", "given", "alpha"), [(2, None, 0.45), (3, None, 0.3), (3, 0.2, 0.2)]
)
def test_elastic_update_matches_the_paper(workers: int, given: float | None, alpha: float) -> None:
    (start, *_) = own_steps(workers, 0)
    before = own_steps(workers, 2)
    expected_center = start + alpha * sum((own - start for own in before), torch.zeros(()))
    for own, (center, after) in zip(before, center_and_workers(workers, given), strict=True):
        torch.testing.assert_close(center, expected_center)
        torch.testing.assert_close(after, own - alpha * (own - start))


def test_center_is_bit_identical_on_every_worker() -> None:
    centers = [center for center, _ in center_and_workers(4)]
    assert all(torch.equal(center, centers[0]) for center in centers)


def test_every_replica_ends_with_the_center() -> None:
    """Of three steps, only the second updates the center."""
    ends = toy.trained(2, lambda: Easgd(tau=2), 3, toy.sgd())
    center, _ = center_and_workers(2)[0]
    assert all(torch.equal(end, center) for end in ends)


def test_workers_train_independently_between_updates() -> None:
    elastic = toy.trained(2, lambda: Easgd(tau=5), 4, toy.sgd(), finish=False)
    for got, expected in zip(elastic, own_steps(2, 4), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("cut", range(1, 7))
def test_resumed_training_is_bit_identical(cut: int) -> None:
    assert toy.resumes_exactly(lambda: Easgd(tau=3), cut, 9)


@pytest.mark.parametrize("options", [{"tau": 0}, {"alpha": 0.0}, {"alpha": 1.5}], ids=str)
def test_invalid_options_are_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"-o {next(iter(options))}: must be"):
        Easgd(**options)  # type: ignore[arg-type]  # as given on the command line
