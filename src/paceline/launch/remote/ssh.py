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
from paceline.launch.remote.machines import describe_node_exit

SSH = "PACELINE_SSH"
"""Environment variable: the ssh command with options, if it is not `ssh`."""
PYTHON = "PACELINE_PYTHON"
"""Environment variable: the Python on the hosts, if its path differs from here."""

OPTIONS = (
    # No prompts for a password or an unknown host.
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    # Detect a lost connection within seconds.
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
    # A shared connection would not send keepalives, nor end with this process.
    *("-o", "ControlMaster=no"),
    *("-o", "ControlPath=none"),
    "-T",
)
_SSH_FAILED, _NOT_FOUND, _NOT_A_PROGRAM = 255, 127, 126


@dataclass(frozen=True, slots=True)
class Host:
    text: str
    """As on the command line."""
    address: str
    user: str | None
    port: str | None

    @classmethod
    def parse(cls, text: str) -> Host:
        """Parse `[user@]host[:port]`; an IPv6 address with a port is in brackets."""
        user, at, rest = text.rpartition("@")
        match = re.fullmatch(
            r"\[([^\]]+)\](?::(\d+))?|([^:\[\]]+)(?::(\d+))?|([^\[\]]*:[^\[\]]*:[^\[\]]*)", rest
        )
        address = next(filter(None, (match[1], match[3], match[5])), "") if match else ""
        # ssh would take a leading dash for an option.
        is_name = re.fullmatch(r"[\w.:%][\w.:%-]*", address)
        if match is None or not is_name or not re.fullmatch(r"([\w.][\w.@+-]*)?", user):
            raise ConfigError([f"--hosts: must be host, user@host or host:port, got {shown(text)}"])
        if at and not user:
            raise ConfigError([f"--hosts: the user before @ is missing in {shown(text)}"])
        return cls(text, address, user or None, match[2] or match[4])

    def arguments(self) -> list[str]:
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
                ["--hosts: duplicate machine; for more workers on each, set --nproc-per-node"]
            )

    def start(self, node: int, argv: Sequence[str], request: bytes) -> subprocess.Popen[bytes]:
        # The same folder if it exists, so that relative paths and user code are found.
        folder = shlex.quote(str(Path.cwd()))
        script = f"cd {folder} 2>/dev/null; exec {shlex.join(argv)}"
        command = [
            *self._ssh,
            *OPTIONS,
            *self._hosts[node].arguments(),
            shlex.join(["sh", "-c", script]),
        ]
        try:
            return popen_piped(command, request)
        except OSError as error:
            raise UsageError(
                f"--hosts: cannot start {self._ssh[0]} ({error.strerror}): install ssh, or set"
                f" another command in ${SSH}"
            ) from None

    def explain(self, end: NodeExit) -> PacelineError:
        host, last = self._hosts[end.node].text, end.last_line
        if end.code == _SSH_FAILED and end.has_started:
            return RunError(f"lost contact with node {end.node} ({host}){f': {last}' * bool(last)}")
        if end.code == _SSH_FAILED:
            trial = shlex.join(["ssh", *self._hosts[end.node].arguments(), "true"])
            return UsageError(
                f"{host}: ssh cannot connect ({last or 'no output'}): `{trial}` must work without a"
                " prompt"
            )
        if end.code in (_NOT_FOUND, _NOT_A_PROGRAM) and not end.has_started:
            return UsageError(f"{host}: has no Python at {self.python}: set its path in ${PYTHON}")
        if "No module named" in last and "paceline" in last and not end.has_started:
            return UsageError(
                f"{host}: paceline {__version__} is not installed for {self.python}: install it,"
                f" or set another Python in ${PYTHON}"
            )
        return RunError(describe_node_exit(end, host))
