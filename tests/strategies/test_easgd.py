"""Elastic averaging: the springs, the center, and what is evaluated and kept."""

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
    """Every worker's weights after steps without any exchange."""
    return toy.trained(workers, lambda: LocalSgd(every=99), steps, toy.sgd(), finish=False)


def center_and_workers(workers: int, alpha: float | None = None) -> list[tuple[Tensor, Tensor]]:
    """After two steps and the first pull: what is evaluated, and each worker's own weights."""

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
def test_a_pull_is_that_of_the_paper(workers: int, given: float | None, alpha: float) -> None:
    (start, *_) = own_steps(workers, 0)
    before = own_steps(workers, 2)
    expected_center = start + alpha * sum((own - start for own in before), torch.zeros(()))
    for own, (center, after) in zip(before, center_and_workers(workers, given), strict=True):
        torch.testing.assert_close(center, expected_center)
        torch.testing.assert_close(after, own - alpha * (own - start))


def test_the_center_is_the_same_bits_on_every_worker() -> None:
    centers = [center for center, _ in center_and_workers(4)]
    assert all(torch.equal(center, centers[0]) for center in centers)


def test_every_replica_ends_with_the_center() -> None:
    """Three steps, one pull after the second: the third does not move the center."""
    ends = toy.trained(2, lambda: Easgd(tau=2), 3, toy.sgd())
    center, _ = center_and_workers(2)[0]
    assert all(torch.equal(end, center) for end in ends)


def test_workers_go_their_own_way_between_pulls() -> None:
    elastic = toy.trained(2, lambda: Easgd(tau=5), 4, toy.sgd(), finish=False)
    for got, expected in zip(elastic, own_steps(2, 4), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("cut", range(1, 7))
def test_what_a_worker_remembers_resumes_exactly(cut: int) -> None:
    assert toy.resumes_exactly(lambda: Easgd(tau=3), cut, 9)


@pytest.mark.parametrize("options", [{"tau": 0}, {"alpha": 0.0}, {"alpha": 1.5}], ids=str)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"-o {next(iter(options))}: must be"):
        Easgd(**options)  # type: ignore[arg-type]  # as they come from the command line
