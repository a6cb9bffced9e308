"""The lock of a folder, when its owner forks and when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.folder_lock import LOCK_FILE, locked

OWNER = """
import os, sys, time
from pathlib import Path
from paceline.folder_lock import locked

with locked(Path(sys.argv[1]), "wait", is_inherited=sys.argv[2] == "inherited"):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # by now the hooks of the fork have run
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


@contextmanager
def child_of_dead_owner(folder: Path, kind: str) -> Iterator[int]:
    """The pid of a process that locked the folder, forked, and was killed; its child lives on."""
    command = [sys.executable, "-c", OWNER, str(folder), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        try:
            yield owner.pid
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    with child_of_dead_owner(tmp_path, "own"), locked(tmp_path, "wait"):
        pass


def test_the_message_says_that_the_named_process_has_ended(tmp_path: Path) -> None:
    with child_of_dead_owner(tmp_path, "inherited") as owner:
        with pytest.raises(UsageError) as raised, locked(tmp_path, "wait"):
            pass
        assert str(raised.value) == (
            f"{tmp_path} is in use by a child of process {owner} on {socket.gethostname()},"
            " which has ended: wait"
        )


def test_a_forked_child_that_leaves_the_block_does_not_release_the_lock(tmp_path: Path) -> None:
    parent = os.getpid()
    status = None
    try:
        with locked(tmp_path, "wait"):
            child = os.fork()
            if child:
                status = os.waitpid(child, 0)[1]
                assert (tmp_path / LOCK_FILE).read_text().split()[0] == str(parent)
                with pytest.raises(UsageError, match=f"process {parent} "), locked(tmp_path, "x"):
                    pass
    finally:
        if os.getpid() != parent:
            os._exit(sys.exc_info()[0] is not None)
    assert status == 0
    assert not (tmp_path / LOCK_FILE).exists()
