"""The collectives that fully_shard calls, counted and timed like all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms.chunks import chunk
from paceline.sync.replica import Replica


class _Collective:
    """`beside`: let NCCL run it beside the computation, counted as one lap of a ring.

    Otherwise tensors on a GPU travel as copies in main memory, made here: fully_shard calls from
    streams of its own, with which the communicator's thread does not keep in step.
    """

    def __init__(self, replica: Replica, beside: bool) -> None:
        self._replica = replica
        self._communicator = replica.communicator
        self._beside = beside

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _count(self, whole: Tensor, kind: str) -> None:
        workers = self._communicator.world_size
        moved_bytes = whole.nbytes // workers * (workers - 1)
        traffic = self._communicator.traffic
        transfer = traffic.begin(
            kind, bytes_sent=moved_bytes, bytes_received=moved_bytes, messages=workers - 1
        )
        traffic.end(transfer)


class AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """The input is this worker's chunk of the output already."""
        if self._beside:
            self._count(output_tensor, "parameters")
            group._allgather_base(output_tensor, input_tensor).wait()
            return
        with self._replica.exchanging():
            host = output_tensor.cpu()
            self._communicator.all_gather(host, "parameters").wait()
            if host is not output_tensor:
                output_tensor.copy_(host)


class ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`op` is a sum, as fully_shard was told."""
        if self._beside:
            self._count(input_tensor, "gradients")
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            group._reduce_scatter_base(output_tensor, input_tensor, options).wait()
            return
        with self._replica.exchanging():
            host = input_tensor.cpu()
            self._communicator.reduce_scatter(host, "gradients").wait()
            own = chunk(host, self._communicator.world_size, self._communicator.rank)
            output_tensor.copy_(own)
