"""All-reduce algorithms, one per module, each with its cost formulas.

Read them in this order: `base` (the contract), `root`, `tree`, `ring` (also `Library`),
`halving_doubling`. An entry of `ALGORITHMS` is an `Algorithm` class. The registry imports it on
first use, so this module does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.comm.algorithms.base import Algorithm

ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")

ALGORITHMS.register(
    "root",
    "paceline.comm.algorithms.root:Root",
    "all ranks send to rank 0, which sums and sends the result back",
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
    "reduce-scatter by recursive halving, all-gather by recursive doubling",
)
ALGORITHMS.register(
    "library", "paceline.comm.algorithms.ring:Library", "the communicator's own all-reduce"
)
