"""What `--cluster` understands, and what it says of the rest."""

from __future__ import annotations

import pytest

from paceline.config import from_mapping
from paceline.config.cluster_spec import ClusterSpec, parse
from paceline.errors import ConfigError


def test_a_text_describes_a_cluster() -> None:
    spec = parse("nodes=4,cpus=0.5,bandwidth=1gbit/3:100mbit,latency=200us,slow=2:0.5/3:0.25")
    assert spec == ClusterSpec(
        nodes=4,
        cpus=0.5,
        bandwidth_bits_per_second=1e9,
        bandwidth_of={3: 1e8},
        latency_seconds=2e-4,
        slow={2: 0.5, 3: 0.25},
    )


def test_a_slow_node_has_a_fraction_of_the_cpus() -> None:
    assert parse("nodes=2,cpus=0.5,slow=1:0.5").cpus_of(1, cores=8) == 0.25
    assert parse("nodes=2,slow=1:0.5").cpus_of(1, cores=8) == 4
    assert parse("nodes=2,slow=1:0.5").cpus_of(0, cores=8) is None


@pytest.mark.parametrize(
    "text",
    [
        "cpus=1",
        "nodes=0",
        "nodes=999",
        "nodes=2,speed=3",
        "nodes=2,bandwidth=fast",
        "nodes=2,bandwidth=1gbit/2:1mbit",
        "nodes=2,latency=5",
        "nodes=2,latency=1001ms",
        "nodes=2,slow=0.5",
        "nodes=2,slow=1:2",
        "nodes=2,cpus=0",
        "nodes",
    ],
)
def test_an_invalid_cluster_is_rejected_with_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--cluster: must be"):
        from_mapping({"cluster": text})


def test_machines_that_are_named_are_counted() -> None:
    assert from_mapping({"cluster": "nodes=3", "nproc_per_node": 2}).workers == 6
    assert from_mapping({"hosts": "a,b"}).nnodes == 2
    with pytest.raises(ConfigError, match="--hosts has 2 machines"):
        from_mapping({"hosts": "a,b", "nnodes": 3})
