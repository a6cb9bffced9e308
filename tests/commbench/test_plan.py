"""What `paceline comm` is asked to measure."""

from __future__ import annotations

import pytest

from paceline.comm.algorithms import ALGORITHMS
from paceline.commbench.spec import OPERATIONS, BenchmarkSpec, Case, make_spec
from paceline.errors import ConfigError


def test_by_default_every_algorithm_sums_from_a_kilobyte_to_256_megabytes() -> None:
    spec = make_spec({"nproc_per_node": 2})
    assert (spec.sizes[0], spec.sizes[-1], len(spec.sizes)) == (2**10, 2**28, 19)
    assert {case.algorithm for case in spec.cases()} == {entry.name for entry in ALGORITHMS}
    assert {case.operation for case in spec.cases()} == {"all_reduce"}


def test_workers_that_share_no_machine_are_measured_through_the_network_alone() -> None:
    assert make_spec({"nnodes": 2}).communicators == ("torch",)
    assert make_spec({"nproc_per_node": 2}).communicators == ("torch", "hierarchical")


def test_only_all_reduce_has_algorithms_to_choose_from() -> None:
    spec = make_spec(
        {"nnodes": 2}, operations="broadcast,all_reduce", algorithms="ring,tree", sizes="1k"
    )
    assert spec.cases() == [
        Case("broadcast", "torch", "library"),
        Case("all_reduce", "torch", "ring"),
        Case("all_reduce", "torch", "tree"),
    ]


def test_a_spec_goes_through_json() -> None:
    spec = make_spec(
        {"cluster": "nodes=3", "nproc_per_node": 2},
        operations=",".join(OPERATIONS),
        link="1gbit",
        codecs="bf16",
    )
    assert BenchmarkSpec.from_dict(spec.to_dict()) == spec


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        make_spec(
            {"nnodes": "0"},
            sizes="1x",
            max_size="1m",
            operations="sum",
            algorithms=",",
            communicators="mpi",
            codecs="zip",
            repeats=0,
            seconds=0,
            link="fast",
            pause=-1,
        )
    flags = [problem.partition(":")[0] for problem in raised.value.problems]
    assert flags == [
        "--nnodes",
        "--sizes and --max-size",
        "--sizes",
        "--link",
        "--repeats",
        "--seconds",
        "--pause",
        "--operations",
        "--algorithms",
        "--communicators",
        "--codecs",
    ]
