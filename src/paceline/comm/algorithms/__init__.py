"""All-reduce algorithms, one per module, each with its cost formulas.

Read them in this order: `base` (the contract), `root`, `tree`, `ring` (also `Library`),
`halving_doubling`. An entry of `ALGORITHMS` is an `Algorithm` class; the registry imports it when
it is used, so this module does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.comm.algorithms.base import Algorithm

ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")

ALGORITHMS.register(
    "root", "paceline.comm.algorithms.root:Root", "all to rank 0, which sums and sends back"
)
ALGORITHMS.register(
    "tree", "paceline.comm.algorithms.tree:Tree", "reduce and broadcast along a binomial tree"
)
ALGORITHMS.register(
    "ring", "paceline.comm.algorithms.ring:Ring", "reduce-scatter and all-gather around a ring"
)
ALGORITHMS.register(
    "halving_doubling",
    "paceline.comm.algorithms.halving_doubling:HalvingDoubling",
    "pairs exchange halves, then quarters, and back",
)
ALGORITHMS.register(
    "library", "paceline.comm.algorithms.ring:Library", "the communicator's own all-reduce"
)
