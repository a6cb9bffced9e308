"""The torch.distributed backend `paceline`, for programs with their own training loop.

    import paceline.backend

    torch.distributed.init_process_group("paceline")

Importing this module registers the backend; docs/backend.md describes it. PyTorch imports the
module at the end of `import torch` (entry point in pyproject.toml), so heavy modules are imported
only when a process group is created.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

NAME = "paceline"

__all__ = ["NAME", "register"]


def register() -> None:
    """Register the backend with torch.distributed; may be called repeatedly."""
    from torch.distributed import Backend

    Backend.register_backend(NAME, _create_process_group, devices=["cpu"])


def _create_process_group(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    from paceline.torch_backend.process_group import PacelineProcessGroup

    return PacelineProcessGroup(store, rank, world_size, timeout)


# Last, because the import of torch inside it may call `register` of this module again.
register()
