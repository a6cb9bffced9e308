"""Importing `paceline.backend` registers the backend `paceline` of torch.distributed."""

__all__ = ["register"]


def register() -> None:
    """Register the backend `paceline` with torch.distributed. Calling it again is harmless."""
    from paceline import torch_backend

    torch_backend.register()


# Last, because importing torch calls `register` again through the package's entry point.
register()
