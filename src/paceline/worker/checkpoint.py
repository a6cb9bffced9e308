"""The checkpoints of a run: the newest few, each whole and verified before it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

from paceline.errors import RunError
from paceline.records import make_folder
from paceline.worker.checkpoint_file import (
    Checkpoint,
    iterations,
    newest_checkpoint,
    remove_checkpoint,
    remove_stale_temporaries,
    state_file,
    write_checkpoint,
)
from paceline.worker.snapshot import HostBuffers, without_copy

__all__ = ["Checkpoint", "CheckpointStore", "iterations", "newest_checkpoint"]


class CheckpointStore:
    """Writes a folder's checkpoints; made by one process alone, rank 0's.

    Other processes read with `newest_checkpoint`. A failure to write is a `RunError`; in background
    mode it is raised by the next `save`, by `newest` or by `close`, whichever comes first.
    """

    def __init__(self, folder: Path, keep: int, mode: str) -> None:
        if keep < 1 or mode not in ("sync", "background"):
            raise ValueError(f"keep={keep} must be 1 or more, mode={mode!r} sync or background")
        self.folder = folder
        self.count = 0
        self.bytes = 0
        """Written so far, removed checkpoints included."""
        self.blocked_seconds = 0.0
        """Time in `save` and `close`, while training waits."""
        self.background_seconds = 0.0
        """Time of writing beside the training."""
        self._keep = keep
        self._buffers = HostBuffers() if mode == "background" else None
        self._writer: Thread | None = None
        self._failure: BaseException | None = None
        self._reached: int | None = None
        """The iteration last saved, or last given out to resume from."""
        self._unwritten: tuple[int, Mapping[str, Any]] | None = None
        """What the background thread failed to write last."""
        try:
            make_folder(folder)
            remove_stale_temporaries(folder)
        except OSError as error:
            raise RunError(f"cannot write checkpoints to {folder}: {error.strerror}") from error

    @property
    def extra_memory_bytes(self) -> int:
        """What the copies for writing in the background take; nothing in sync mode."""
        return self._buffers.size_bytes if self._buffers else 0

    def take_up(self, totals: Mapping[str, Any], iteration: int, blocked_seconds: float) -> None:
        """Count on from the `totals` before the checkpoint that a run is resumed from, and it."""
        self.count += totals.get("count", 0) + 1
        with contextlib.suppress(OSError):
            self.bytes += state_file(self.folder, iteration).stat().st_size
        self.bytes += totals.get("bytes", 0)
        self.blocked_seconds += totals.get("blocked_seconds", 0.0) + blocked_seconds
        self.background_seconds += totals.get("background_seconds", 0.0)

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Write the state after `iteration`; when it is on disk, remove what is no longer wanted.

        Returns when it is on disk, or in background mode when the state may change again, which is
        after the previous write has ended and the tensors are copied.
        """
        began = perf_counter()
        try:
            if self._buffers is None:
                self._write(iteration, without_copy(state))
                return
            self._wait()
            copy = self._buffers.copy(state)
            self._writer = Thread(
                target=self._write_beside, args=(iteration, copy), name="checkpoint writer"
            )
            self._writer.start()
        finally:
            self.blocked_seconds += perf_counter() - began

    def newest(self) -> Checkpoint | None:
        """The newest that verifies, with a warning for each one passed over; None if there is none.

        A CheckpointError where there are some and none verifies.
        """
        self._wait()
        checkpoint = newest_checkpoint(self.folder)
        if checkpoint is not None:
            self._reached = checkpoint.iteration
        return checkpoint

    def close(self) -> None:
        """Wait until everything is on disk; the store may be used again afterwards."""
        began = perf_counter()
        try:
            self._wait()
        finally:
            self.blocked_seconds += perf_counter() - began

    def write_again(self) -> int | None:
        """Write in this thread what could not be written in the background; its iteration.

        For after `close` has raised the failure. None where there is nothing to write.
        """
        if self._unwritten is None:
            return None
        iteration, state = self._unwritten
        self._write(iteration, state)
        self._unwritten = None
        return iteration

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_beside(self, iteration: int, state: Mapping[str, Any]) -> None:
        began = perf_counter()
        try:
            self._write(iteration, state)
            self._unwritten = None
        except BaseException as error:  # noqa: BLE001 - raised in the training thread by _wait
            self._failure = error
            self._unwritten = (iteration, state)
        self.background_seconds += perf_counter() - began

    def _write(self, iteration: int, state: Mapping[str, Any]) -> None:
        self.bytes += write_checkpoint(self.folder, iteration, state)
        self.count += 1
        kept = self._course(iteration)[: self._keep]
        known = {*iterations(self.folder), *iterations(self.folder, suffix="json")}
        for other in known.difference(kept):
            remove_checkpoint(self.folder, other)
        self._reached = iteration

    def _course(self, iteration: int) -> list[int]:
        """The checkpoints that led to this one, the newest first.

        Those between the resumed one and this one, or beyond it, were damaged when the run was
        resumed; they count for nothing, lest they crowd out whole ones.
        """
        return [
            other
            for other in iterations(self.folder)
            if other == iteration
            or (other < iteration and (self._reached is None or other <= self._reached))
        ]
