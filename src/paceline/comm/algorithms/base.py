"""The contract of an all-reduce algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.comm.cost import Cost, Network

if TYPE_CHECKING:
    from paceline.comm.communicator import Communicator


class Algorithm(ABC):
    """One way to sum a tensor over all workers and give every worker the sum.

    An algorithm uses nothing of a communicator but its rank, its world size, `send`, `recv` and
    `exchange`. It is for any number of workers and elements, and keeps two promises:

    - Every rank ends with the same bits. Floating-point sums depend on their order, so each element
      is summed on one rank and the sum is handed out; ranks that each summed for themselves, in
      their own order, would drift apart, step by step.
    - The order of that sum depends on the world size, the number of elements and the element's
      place alone, never on who came first. Hence the same input gives the same bits in every run.
      Two algorithms may differ in the last bits from one another; each file says what its order is.

    Partial sums have the tensor's dtype, so a bf16 sum is rounded to bf16 at each addition.
    """

    @abstractmethod
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        """Replace a contiguous tensor by the sum over all ranks; returns when it is there."""

    @abstractmethod
    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """What one rank sends, to the byte. In elements, since no element is ever split."""

    @abstractmethod
    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """What one rank receives, to the byte."""

    @abstractmethod
    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        """What it should take when every worker starts at the same moment."""
