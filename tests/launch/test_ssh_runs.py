"""Runs on machines with real ssh servers: what they give, and how they end by any fault."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config.cluster_spec import ClusterSpec
from paceline.emulation.cluster import EmulatedCluster
from paceline.launch import launcher
from paceline.launch.remote.ssh import SSH
from paceline.records import read_json
from tests.support.commands import (
    ENDLESS,
    LIMIT_SECONDS,
    Command,
    Ended,
    are_gone,
    is_training,
    names_in,
    rank_of,
    train,
    wait_until,
)

pytestmark = [pytest.mark.root, pytest.mark.iproute, pytest.mark.ssh, pytest.mark.timeout(300)]

SLEEP_SECONDS = 0.4
"""Of each iteration of user_code:Slow on these machines: long enough to be disturbed."""


class Machines:
    """Two machines with an ssh server and a disk of their own, and this one in their network."""

    def __init__(self, cluster: EmulatedCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self.hosts = [f"{address}:2222" for address in cluster.addresses]
        self.out = folder / "runs"
        """On each machine it is another folder: the records have to be fetched."""
        self.out.mkdir()
        self.disks = [folder / f"disk-{node}" for node in range(2)]
        for key in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(words, check=True)
        self._write_client_config()
        self.servers = [self._serve(node) for node in range(2)]
        logs = [folder / f"sshd-{node}.txt" for node in range(2)]
        wait_until(lambda: all("listening" in log.read_text() for log in logs), "sshd listens")

    def _write_client_config(self) -> None:
        host_key = (self._folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
        known = [f"[{address}]:2222 {host_key}" for address in self._cluster.addresses]
        (self._folder / "known_hosts").write_text("\n".join(known) + "\n")
        (self._folder / "ssh_config").write_text(
            f"IdentityFile {self._folder / 'user_key'}\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {self._folder / 'known_hosts'}\nStrictHostKeyChecking yes\n"
        )

    def _serve(self, node: int) -> subprocess.Popen[bytes]:
        self.disks[node].mkdir()
        config = self._folder / f"sshd_config-{node}"
        config.write_text(
            f"ListenAddress {self._cluster.addresses[node]}:2222\nPidFile none\n"
            f"HostKey {self._folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self._folder / 'user_key.pub'}\n"
            "UsePAM no\nStrictModes no\nPermitRootLogin yes\n"
            f"SetEnv OWN_SLEEP_SECONDS={SLEEP_SECONDS}\n"
        )
        # In a mount namespace of its own: the disk, and the folder that sshd insists on.
        script = (
            "mount -t tmpfs tmpfs /run && mkdir /run/sshd"
            f" && mount --bind {self.disks[node]} {self.out}"
            f" && exec /usr/sbin/sshd -D -e -f {config}"
        )
        words = ["unshare", "-m", "sh", "-c", script]
        with (self._folder / f"sshd-{node}.txt").open("wb") as log:
            return subprocess.Popen(self._cluster.command(node, words), stdout=log, stderr=log)

    @property
    def ssh(self) -> str:
        """The ssh command of this machine, which here is the switch's."""
        switch = self._cluster.state.switch
        assert switch is not None
        return shlex.join(switch.command(["ssh", "-F", str(self._folder / "ssh_config")]))

    def remote_processes(self) -> list[psutil.Process]:
        """Processes of paceline that the servers have started, directly or not."""
        return [
            process
            for server in self.servers
            for process in psutil.Process(server.pid).children(recursive=True)
            if "paceline" in command_of(process)
        ]

    def both_train(self, name: str) -> bool:
        return all(is_training(disk / name, [rank]) for rank, disk in enumerate(self.disks))

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(LIMIT_SECONDS)


def command_of(process: psutil.Process) -> str:
    # Shells and helpers start and end meanwhile.
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with EmulatedCluster.up(ClusterSpec(nodes=2), calibrate=False) as cluster:
        machines = Machines(cluster, tmp_path_factory.mktemp("machines"))
        try:
            yield machines
        finally:
            machines.close()


def test_hosts_train_like_one_machine_and_all_records_are_downloaded(
    machines: Machines, talkative_run: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by Ctrl-C and resumed, the hosts in another order: the run travels both ways."""
    monkeypatch.setenv(SSH, machines.ssh)
    settings: dict[str, Any] = {"threads": 1, "checkpoint_every": 100}
    settings |= {"model": "user_code:Slow", "hosts": ",".join(machines.hosts)}
    with train(machines.out, **settings) as command:
        wait_until(lambda: machines.both_train("run"), "both hosts train")
        command.process.send_signal(signal.SIGINT)
        ended = command.end()
    folder = machines.out / "run"
    stopped = read_json(folder / "result.json")
    cause = f"stopped by SIGINT after iteration {stopped['iterations']}"
    assert (ended.code, stopped["status"], stopped["cause"]) == (130, "stopped", cause)
    assert ended.err.splitlines()[0] == f"paceline: {cause}"
    assert 0 < stopped["iterations"] < 12
    assert names_in(folder) == names_in(machines.disks[0] / "run")
    assert {"events-1.jsonl", "resources-1.jsonl", "result.json"} <= names_in(folder)
    assert are_gone(machines.remote_processes())

    shutil.rmtree(machines.disks[1] / "run")
    changes = {"hosts": ",".join(machines.hosts[::-1])}
    result = launcher.resume(str(folder), changes, quiet=True).result
    assert result is not None
    assert result == read_json(folder / "result.json")
    assert [worker["node"] for worker in result["workers"]] == [0, 1]
    assert result["config"]["master_addr"] == machines.hosts[1].removesuffix(":2222")
    one_machine = read_json(talkative_run[0] / "result.json")
    assert result["weights_sha256"] == one_machine["weights_sha256"]


def test_a_killed_worker_on_a_host_ends_all_with_one_cause(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SSH, machines.ssh)
    settings: dict[str, Any] = {**ENDLESS, "threads": 1, "name": "struck"}
    settings |= {"hosts": ",".join(machines.hosts)}
    with train(machines.out, **settings) as command:
        wait_until(lambda: machines.both_train("struck"), "both hosts train")
        processes = machines.remote_processes()
        [victim] = [process for process in processes if rank_of(process) == 1]
        victim.kill()
        ended = command.end()
    cause = "rank 1 was killed by SIGKILL"
    assert (ended.code, ended.err) == (1, f"paceline: error: {cause}\n")
    result = read_json(machines.out / "struck" / "result.json")
    assert (result["status"], result["cause"]) == ("failed", cause)
    wait_until(lambda: are_gone(processes), "the hosts have stopped")


def test_hosts_stop_when_their_launcher_is_killed(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A separate process without inherited pipes.
    monkeypatch.setattr(Command, "starter", None)
    settings = {**ENDLESS, "hosts": ",".join(machines.hosts), "threads": 1, "name": "killed"}
    with train(machines.out, {SSH: machines.ssh}, **settings) as command:
        wait_until(lambda: machines.both_train("killed"), "both hosts train")
        processes = machines.remote_processes()
        assert len(processes) >= 4, "a launcher and a worker on each"
        # Its own ssh processes, orphans by then, end with the connections.
        processes += psutil.Process(command.process.pid).children(recursive=True)
        command.process.kill()
        wait_until(lambda: are_gone(processes), "the hosts have stopped")
    assert not (machines.out / "killed").exists()
