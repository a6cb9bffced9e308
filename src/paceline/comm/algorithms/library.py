"""Library: whatever the communicator's own all-reduce does.

Gloo runs a ring; NCCL picks a ring or a tree by size and topology; the in-process communicator runs
ring.py. What a library does inside cannot be counted from outside, so its traffic is counted as a
ring's and its cost is a ring's too: the least that an all-reduce of a large tensor can move.

Order of the sum: the library's own.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.algorithms.ring import Ring
from paceline.comm.communicator import Communicator


class Library(Ring):
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        communicator.all_reduce(tensor, kind).wait()
