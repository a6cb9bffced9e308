"""The forwarder's binary: made once, kept, and never one that another user could have written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.emulation import latency
from paceline.errors import ClusterError


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(latency, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(ClusterError, match="install gcc, or omit latency"):
        latency.forwarder()


def test_the_binary_is_made_once_and_again_for_another_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if latency.compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(latency, "_cache_folder", lambda: tmp_path / "kept")
    source = tmp_path / "forwarder.c"
    source.write_text("int main(void) { return 0; }\n")
    monkeypatch.setattr(latency, "SOURCE", source)
    first = latency.forwarder()
    made_at = first.stat().st_mtime_ns
    assert latency.forwarder() == first
    assert first.stat().st_mtime_ns == made_at
    source.write_text("int main(void) { return 1; }\n")
    assert latency.forwarder() != first


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A binary in a private folder; recompiling changes its contents."""

    def pretend(target: Path) -> None:
        target.write_text("compiled")
        target.chmod(0o700)

    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(latency, "_cache_folder", lambda: folder)
    monkeypatch.setattr(latency, "_compile", pretend)
    made = latency.forwarder()
    made.write_text("kept")
    return made


def test_a_binary_that_is_ours_alone_is_run_again(kept: Path) -> None:
    assert latency.forwarder().read_text() == "kept"


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_world_writable_binary_is_recompiled(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    assert latency.forwarder().read_text() == "compiled"


def test_a_binary_in_a_world_writable_folder_is_recompiled(kept: Path) -> None:
    kept.parent.chmod(0o777)
    assert latency.forwarder().read_text() == "compiled"


def test_a_binary_of_another_user_is_recompiled(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    assert latency.forwarder().read_text() == "compiled"


def test_nothing_is_compiled_into_a_folder_that_others_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(latency, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(latency, "compiler", lambda: "/bin/false")
    with pytest.raises(ClusterError, match="other users can write to"):
        latency.forwarder()


def test_root_ignores_environment_variables_for_the_state_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp")
    assert latency._cache_folder() == Path("/var/cache/paceline")
