"""The contract of an all-reduce algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.comm.cost import Cost, Network

if TYPE_CHECKING:
    from paceline.comm.communicator import Communicator


class Algorithm(ABC):
    """Sums a tensor over all ranks and distributes the sum to all of them.

    Every algorithm except `Library` uses only point-to-point operations of a communicator (`send`,
    `recv`, `sendrecv`). It supports any number of ranks and elements, and makes two guarantees:

    - All ranks get bitwise identical results. Floating-point sums depend on the order of additions,
      so each element is summed on one rank and the sum is distributed. If each rank summed in its
      own order, replicas would diverge.
    - The order of summation depends only on the world size, the number of elements and the index of
      the element, never on the order of arrival. The same input gives bitwise identical results in
      every run. Different algorithms may differ in the last bits; each module documents its order.

    Partial sums have the dtype of the tensor, so a bf16 sum is rounded to bf16 after each addition.
    """

    @abstractmethod
    def all_reduce(self, communicator: Communicator, tensor: Tensor, kind: str) -> None:
        """Replace a contiguous tensor with the sum over all ranks; block until complete."""

    @abstractmethod
    def bytes_sent(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return the exact number of bytes that a rank sends; elements are never split."""

    @abstractmethod
    def bytes_received(self, rank: int, world_size: int, elements: int, element_bytes: int) -> int:
        """Return the exact number of bytes that a rank receives."""

    @abstractmethod
    def cost(self, world_size: int, size_bytes: float, network: Network) -> Cost:
        """Return the predicted cost if all ranks start at the same time."""
