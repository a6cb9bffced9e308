"""Machines over ssh: what is rejected before training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import from_mapping
from paceline.errors import ConfigError, UsageError
from paceline.launch import launcher
from paceline.launch.remote.ssh import SSH, Host, SshMachines
from tests.support.commands import TINY, names_in


@pytest.mark.parametrize(
    ("text", "address", "words"),
    [
        ("node1", "node1", ["node1"]),
        ("me@node1", "node1", ["me@node1"]),
        ("node1:2222", "node1", ["-p", "2222", "node1"]),
        ("me@10.0.0.1:22", "10.0.0.1", ["-p", "22", "me@10.0.0.1"]),
        ("fe80::1", "fe80::1", ["fe80::1"]),
        ("me@[fe80::1]:2222", "fe80::1", ["-p", "2222", "me@fe80::1"]),
    ],
)
def test_hosts_have_the_syntax_of_ssh(text: str, address: str, words: list[str]) -> None:
    host = Host.parse(text)
    assert (host.address, host.arguments()) == (address, words)


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "me@", "@node1", "a b", "-l@node1", "a:b"])
def test_an_invalid_host_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--hosts: "):
        Host.parse(text)


def test_a_duplicate_machine_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^--hosts: duplicate machine"):
        SshMachines(["me@a", "a"])


def test_hosts_are_not_for_workers_that_torchrun_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="use them without torchrun or srun"):
        launcher.train(from_mapping({**TINY, "hosts": "a,b"}))


@pytest.fixture
def pretended_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A fake ssh that runs commands here; the test chooses what happens for the second host."""

    def pretend(on_b: str) -> None:
        script = tmp_path / "ssh"
        script.write_text(
            "#!/bin/sh\n"
            "for last; do before=$host; host=$word; word=$last; done\n"
            f'[ "$host" = 127.0.0.2 ] && {{ {on_b}; }}\n'
            'eval exec "$word"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv(SSH, str(script))

    return pretend


FAKES = {
    "unreachable": (
        "echo ssh: connect to host 127.0.0.2 port 22: No route to host >&2; exit 255",
        "127.0.0.2: ssh cannot connect (ssh: connect to host 127.0.0.2 port 22: No route to"
        " host): `ssh 127.0.0.2 true` must work without a prompt",
    ),
    "without Python": (
        "word='sh -c /nowhere/python'; eval $word; exit",
        f"127.0.0.2: has no Python at {sys.executable}: set its path in $PACELINE_PYTHON",
    ),
    "without paceline": (
        f"exec {sys.executable} -I -S -m paceline.launch.remote.node_main",
        f"127.0.0.2: paceline 0.1.0 is not installed for {sys.executable}: install it, or"
        " set another Python in $PACELINE_PYTHON",
    ),
    "another version": (
        f"sed -u 1s/0.1.0/0.0.9/ | {sys.executable} -m paceline.launch.remote.node_main; exit 2",
        "127.0.0.2: has paceline 0.1.0, but the launcher has 0.0.9: install the same"
        " version on all machines",
    ),
}


@pytest.mark.parametrize("fake", FAKES)
def test_an_unusable_host_is_reported_in_one_line(
    fake: str,
    pretended_ssh: Callable[[str], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    on_b, line = FAKES[fake]
    pretended_ssh(on_b)
    values = {
        **TINY,
        "out": str(tmp_path / "runs"),
        "hosts": "127.0.0.1,127.0.0.2",
        "name": "run",
    }
    with pytest.raises(UsageError) as raised:
        launcher.train(from_mapping(values), quiet=True)
    assert str(raised.value) == line
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists() or not names_in(tmp_path / "runs")
