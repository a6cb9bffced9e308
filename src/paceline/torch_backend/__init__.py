"""The backend `paceline` of torch.distributed, for programs with training code of their own.

    import paceline.backend

    torch.distributed.init_process_group("paceline")

Importing this registers it; docs/backend.md says what it does. PyTorch itself imports it at the end
of `import torch` (the entry point in pyproject.toml), so what is heavy is imported only when a
group is made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

NAME = "paceline"

__all__ = ["NAME", "register"]


def register() -> None:
    """Make the name known to torch.distributed; may be repeated."""
    from torch.distributed import Backend

    Backend.register_backend(NAME, _make_group, devices=["cpu"])


def _make_group(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    from paceline.torch_backend.process_group import PacelineProcessGroup

    return PacelineProcessGroup(store, rank, world_size, timeout)


# Last, since the import of torch inside it may come back to this module for `register`.
register()
