"""The forwarder's binary, compiled at first use and kept where nobody else can write."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from paceline.errors import ClusterError

SOURCE = Path(__file__).with_name("forwarder.c")
COMPILERS = ("cc", "gcc", "clang")
ROOTS_CACHE = Path("/var/cache/paceline")


def forwarder() -> Path:
    """The path of a binary made from the source as it is now.

    It runs with this user's rights, so one that another user could have written is made anew, and a
    folder that another user can write is refused.
    """
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    kept = _cache_folder() / f"forwarder-{key}"
    if not _is_ours_alone(kept):
        _compile(kept)
    return kept


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _compile(target: Path) -> None:
    found = compiler()
    if found is None:
        raise ClusterError(
            "latency needs the kernel's netem or a C compiler, and there is neither: "
            "install gcc, or leave out latency"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours_alone(target.parent):
            raise ClusterError(f"others can write to {target.parent}: remove it, it is made again")
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            binary = Path(folder) / target.name
            words = [found, "-O2", "-o", str(binary), str(SOURCE)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr.strip() or "no reason given").splitlines()[0]
                raise ClusterError(f"cannot compile the forwarder for latency: {said}")
            binary.chmod(0o700)
            binary.replace(target)
    except OSError as error:
        raise ClusterError(f"cannot compile into {target.parent}: {error.strerror}") from None


def _cache_folder() -> Path:
    """Of datasets' folders apart, which a group may share; of the environment apart, for root."""
    if os.geteuid() == 0:
        return ROOTS_CACHE
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline" / "programs"


def _is_ours_alone(path: Path) -> bool:
    """Whether it is there and only this user can write it, and the folder it is in alike."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    is_kept = found.st_uid == os.geteuid() and not found.st_mode & others
    if stat.S_ISREG(found.st_mode):
        return is_kept and _is_ours_alone(path.parent)
    return is_kept and stat.S_ISDIR(found.st_mode)
