"""Machines that are reached over ssh (`--hosts`)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import __version__
from paceline.errors import ConfigError, PacelineError, RunError, UsageError, shown
from paceline.launch.remote.control_channel import NodeExit, popen_piped
from paceline.launch.remote.machines import describe_end

SSH = "PACELINE_SSH"
"""The ssh command, with options, where it is not just `ssh`."""
PYTHON = "PACELINE_PYTHON"
"""The Python on the hosts, where it is not where it is here."""

OPTIONS = (
    # Nobody is there to type a password, or to say yes to an unknown host.
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    # A connection that is cut must be noticed within seconds.
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
    # A connection that others share would not look for signs of life, nor end with ours.
    *("-o", "ControlMaster=no"),
    *("-o", "ControlPath=none"),
    "-T",
)
_OF_SSH, _NOT_FOUND, _NOT_A_PROGRAM = 255, 127, 126


@dataclass(frozen=True, slots=True)
class Host:
    text: str
    """As the user gave it."""
    address: str
    user: str | None
    port: str | None

    @classmethod
    def parse(cls, text: str) -> Host:
        """`[user@]host[:port]`; an IPv6 address with a port stands in brackets."""
        user, at, rest = text.rpartition("@")
        match = re.fullmatch(
            r"\[([^\]]+)\](?::(\d+))?|([^:\[\]]+)(?::(\d+))?|([^\[\]]*:[^\[\]]*:[^\[\]]*)", rest
        )
        address = next(filter(None, (match[1], match[3], match[5])), "") if match else ""
        # What begins with a dash, ssh would take for an option.
        is_name = re.fullmatch(r"[\w.:%][\w.:%-]*", address)
        if match is None or not is_name or not re.fullmatch(r"([\w.][\w.@+-]*)?", user):
            raise ConfigError([f"--hosts: must be host, user@host or host:port, got {shown(text)}"])
        if at and not user:
            raise ConfigError([f"--hosts: the user before @ is missing in {shown(text)}"])
        return cls(text, address, user or None, match[2] or match[4])

    def words(self) -> list[str]:
        target = f"{self.user}@{self.address}" if self.user else self.address
        return [*(["-p", self.port] if self.port else []), target]


class SshMachines:
    cluster_file = None

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = [Host.parse(text) for text in hosts]
        self.addresses = [host.address for host in self._hosts]
        self.python = os.environ.get(PYTHON) or sys.executable
        self._ssh = shlex.split(os.environ.get(SSH) or "ssh")
        seen = {(host.address, host.port) for host in self._hosts}
        if len(seen) < len(hosts):
            raise ConfigError(
                ["--hosts: each machine once; for more workers on each, give --nproc-per-node"]
            )

    def start(self, node: int, words: Sequence[str], given: bytes) -> subprocess.Popen[bytes]:
        # The same folder where there is one, so that relative paths and own code are found.
        folder = shlex.quote(str(Path.cwd()))
        script = f"cd {folder} 2>/dev/null; exec {shlex.join(words)}"
        command = [
            *self._ssh,
            *OPTIONS,
            *self._hosts[node].words(),
            shlex.join(["sh", "-c", script]),
        ]
        try:
            return popen_piped(command, given)
        except OSError as error:
            raise UsageError(
                f"--hosts: cannot start {self._ssh[0]} ({error.strerror}): install ssh, or name"
                f" another command in ${SSH}"
            ) from None

    def explain(self, end: NodeExit) -> PacelineError:
        host, last = self._hosts[end.node].text, end.last_line
        if end.code == _OF_SSH and end.has_started:
            return RunError(f"lost contact with node {end.node} ({host}){f': {last}' * bool(last)}")
        if end.code == _OF_SSH:
            trial = shlex.join(["ssh", *self._hosts[end.node].words(), "true"])
            return UsageError(
                f"{host}: ssh does not get there ({last or 'it said nothing'}): `{trial}`"
                " must work without a question"
            )
        if end.code in (_NOT_FOUND, _NOT_A_PROGRAM) and not end.has_started:
            return UsageError(
                f"{host}: has no Python at {self.python}: name the one there in ${PYTHON}"
            )
        if "No module named" in last and "paceline" in last and not end.has_started:
            return UsageError(
                f"{host}: paceline {__version__} is not installed for {self.python} there: install"
                f" it, or name another Python in ${PYTHON}"
            )
        return RunError(describe_end(end, host))
