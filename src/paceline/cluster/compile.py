"""The forwarder's binary, compiled at first use and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.errors import ClusterError

SOURCE = Path(__file__).with_name("forwarder.c")
COMPILERS = ("cc", "gcc", "clang")


def forwarder() -> Path:
    """The path of a binary made from the source as it is now."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    kept = _cache_folder() / f"forwarder-{key}"
    if not kept.exists():
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
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            binary = Path(folder) / target.name
            words = [found, "-O2", "-o", str(binary), str(SOURCE)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr.strip() or "no reason given").splitlines()[0]
                raise ClusterError(f"cannot compile the forwarder for latency: {said}")
            binary.replace(target)
    except OSError as error:
        raise ClusterError(f"cannot compile into {target.parent}: {error.strerror}") from None


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline"
