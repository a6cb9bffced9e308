"""How the readers of file formats say that a file is not what it should be."""

from __future__ import annotations

from pathlib import Path


class DamageError(Exception):
    """A file that does not hold what it should; `FileSet` turns it into the line that users see."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason


def refuse_larger(path: Path, limit_bytes: int) -> None:
    """Refuse a file that cannot be the one meant, before any of it is read."""
    size_bytes = path.stat().st_size
    if size_bytes > limit_bytes:
        raise DamageError(path, f"is too large: {size_bytes} bytes, not {limit_bytes} at most")
