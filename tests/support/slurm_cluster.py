"""A SLURM cluster with three nodes on this machine, with its own daemons and key."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.commands import free_port, wait_until

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Addresses serve as names: workers resolve the name of the first node."""

SETTINGS = {
    "ClusterName": "tests",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "MpiDefault": "none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "SlurmdParameters": "config_overrides",
    "ReturnToService": "2",
    "MailProg": "/bin/true",
}


@contextmanager
def slurm_cluster() -> Iterator[Path]:
    """Yields the path of slurm.conf, to be set as SLURM_CONF."""
    # Not below pytest's folder: every user must be able to access munged's socket, and socket
    # paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="paceline-slurm-"))
    folder.chmod(0o755)
    conf = folder / "slurm.conf"
    variables = {
        **os.environ,
        "SLURM_CONF": str(conf),
        "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
    }
    try:
        _write_settings(folder, conf)
        with ExitStack() as stack:
            for words in (
                _munged(folder),
                ["slurmctld", "-D", "-c"],
                *(["slurmd", "-D", "-N", node] for node in NODES),
            ):
                stack.enter_context(_daemon(words, variables, folder))
            idle = ["idle"] * len(NODES)
            wait_until(lambda: _node_states(variables) == idle, "all machines are idle")
            yield conf
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_settings(folder: Path, conf: Path) -> None:
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    host = socket.gethostname()
    settings = {
        **SETTINGS,
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": free_port(),
        "AuthInfo": f"socket={folder}/munge.socket",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool" / "%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
    }
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2"
        for node in NODES
    ]
    lines = [f"{name}={value}" for name, value in settings.items()]
    conf.write_text("\n".join([*lines, *nodes, "PartitionName=all Nodes=ALL Default=YES", ""]))


def _munged(folder: Path) -> list[str]:
    files = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munged.seed",
    }
    return ["munged", "-F", *(f"--{name}={folder / file}" for name, file in files.items())]


@contextmanager
def _daemon(words: Sequence[str], variables: Mapping[str, str], folder: Path) -> Iterator[None]:
    with (folder / "daemons.txt").open("ab") as log:
        process = subprocess.Popen(
            words, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _node_states(variables: Mapping[str, str]) -> list[str]:
    words = ["sinfo", "--noheader", "--Node", "--format=%t"]
    return subprocess.run(
        words, env=variables, capture_output=True, text=True, check=False
    ).stdout.split()
