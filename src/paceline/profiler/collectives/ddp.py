"""What DistributedDataParallel models of the program are configured with."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.profiler.collectives.log import BUFFERS, CollectiveLog

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import CollectiveRecorder


class DdpModels:
    """Describes each model in the log of collectives when it has its final buckets."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        self._recorder = recorder
        self._models: list[weakref.ref[DistributedDataParallel]] = []
        self.flags = 0
        """Of the collectives that are issued now."""
        self._passes_due: set[int] = set()
        """Backward passes from now on after which the models are described."""

    def install(self) -> None:
        hooks = self._recorder.hooks
        # Warnings of the constructor name the line that called it, which must not be ours.
        hooks.replace(DistributedDataParallel, "_ddp_init_helper", self._make_creation)
        hooks.replace(DistributedDataParallel, "_sync_buffers", self._make_buffers)
        hooks.replace(dist.Reducer, "_rebuild_buckets", self._make_rebuild)  # type: ignore[attr-defined]

    def _make_buffers(self, original: Any) -> Any:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            self.flags = BUFFERS
            try:
                return original(*args, **kwargs)
            finally:
                self.flags = 0

        return synchronize

    def end_backward(self, log: CollectiveLog) -> None:
        """Called after a backward pass."""
        if self._passes_due:
            if 1 in self._passes_due:
                for number, reference in enumerate(self._models):
                    model = reference()
                    if model is not None:
                        log.describe("ddp", model=number, **describe(model))
            self._passes_due = {due - 1 for due in self._passes_due if due > 1}

    def _make_creation(self, original: Any) -> Any:
        def create(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(model, *args, **kwargs)
            if all(each() is not model for each in self._models):
                self._models.append(weakref.ref(model))
            self._passes_due.add(1)
            return result

        return create

    def _make_rebuild(self, original: Any) -> Any:
        def rebuild(reducer: Any) -> Any:
            is_rebuilt = original(reducer)
            if is_rebuilt:
                # DDP's own log has the new buckets after the next pass.
                self._passes_due.add(2)
            return is_rebuilt

        return rebuild


def describe(model: DistributedDataParallel) -> dict[str, Any]:
    """The settings that matter for communication, and the buckets in the order of their exchange.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients are
    ready; the first bucket is smaller than the others, so that the exchange starts early.
    """
    known = model._get_ddp_logging_data()
    sizes = known.get("rebuilt_bucket_sizes") or known.get("bucket_sizes") or ""
    return {
        "bucket_bytes": [int(size) for size in str(sizes).split(",") if size.strip()],
        "has_rebuilt_buckets": bool(known.get("has_rebuilt_buckets")),
        "bucket_cap_bytes": int(model.bucket_bytes_cap),
        "parameter_bytes": int(known.get("total_parameter_size_bytes", 0)),
        "find_unused_parameters": bool(model.find_unused_parameters),
        "gradient_as_bucket_view": bool(model.gradient_as_bucket_view),
        "static_graph": bool(model.static_graph),
        "broadcast_buffers": bool(model.broadcast_buffers),
        "has_communication_hook": "comm_hook" in known,
    }
