"""Machines reached over ssh: what is refused before anything trains, and a run over real ones."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.commands import (
    ENDLESS,
    LIMIT_SECONDS,
    TINY,
    Command,
    Ended,
    are_gone,
    is_training,
    launch,
    names_in,
    train,
    wait_until,
)
from paceline.cluster.emulated import EmulatedCluster
from paceline.cluster_spec import ClusterSpec
from paceline.config import from_mapping
from paceline.errors import ConfigError, UsageError
from paceline.launch import start
from paceline.launch.ssh import SSH, Host, SshFleet
from paceline.records import read_json


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
def test_hosts_are_given_as_for_ssh(text: str, address: str, words: list[str]) -> None:
    host = Host.parse(text)
    assert (host.address, host.words()) == (address, words)


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "me@", "@node1", "a b", "-l@node1", "a:b"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--hosts: "):
        Host.parse(text)


def test_a_machine_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--hosts: each machine once"):
        SshFleet(["me@a", "a"])


def test_hosts_are_not_for_workers_that_torchrun_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="give these without torchrun or srun"):
        start.train(from_mapping({**TINY, "hosts": "a,b"}))


@pytest.fixture
def pretended_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """An ssh that runs commands here; what befalls those for the second host, the test says."""

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
        "127.0.0.2: ssh does not get there (ssh: connect to host 127.0.0.2 port 22: No route to"
        " host): `ssh 127.0.0.2 true` must work without a question",
    ),
    "without Python": (
        "word='sh -c /nowhere/python'; eval $word; exit",
        f"127.0.0.2: has no Python at {sys.executable}: name the one there in $PACELINE_PYTHON",
    ),
    "without paceline": (
        f"exec {sys.executable} -I -S -m paceline.launch.node",
        f"127.0.0.2: paceline 0.1.0 is not installed for {sys.executable} there: install it, or"
        " name another Python in $PACELINE_PYTHON",
    ),
    "another version": (
        f"sed -u 1s/0.1.0/0.0.9/ | {sys.executable} -m paceline.launch.node; exit 2",
        "127.0.0.2: has paceline 0.1.0, and the command that starts it 0.0.9: install the same"
        " version on all machines",
    ),
}


@pytest.mark.parametrize("fake", FAKES)
def test_a_host_that_cannot_take_part_is_told_in_one_line(
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
        start.train(from_mapping(values), quiet=True)
    assert str(raised.value) == line
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists() or not names_in(tmp_path / "runs")


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
        return shlex.join(switch.words(["ssh", "-F", str(self._folder / "ssh_config")]))

    def remote_processes(self) -> list[psutil.Process]:
        """What the servers have started, and what that has."""
        return [
            process
            for server in self.servers
            for process in psutil.Process(server.pid).children(recursive=True)
            if "paceline" in " ".join(process.cmdline())
        ]

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(LIMIT_SECONDS)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with EmulatedCluster.up(ClusterSpec(nodes=2), calibrate=False) as cluster:
        machines = Machines(cluster, tmp_path_factory.mktemp("machines"))
        try:
            yield machines
        finally:
            machines.close()


@pytest.mark.root
@pytest.mark.iproute
@pytest.mark.ssh
@pytest.mark.timeout(300)
def test_hosts_train_what_one_machine_trains_and_all_records_come_here(
    machines: Machines, talkative_run: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped half-way and resumed, the hosts in another order: the run travels both ways."""
    monkeypatch.setenv(SSH, machines.ssh)
    settings = {"hosts": ",".join(machines.hosts), "threads": 1, "checkpoint_every": 6}
    folder = launch(machines.out, **settings, iterations=6).folder.path
    assert folder == machines.out / "run"
    assert names_in(folder) == names_in(machines.disks[0] / "run")
    assert {"events-1.jsonl", "resources-1.jsonl", "result.json"} <= names_in(folder)

    shutil.rmtree(machines.disks[1] / "run")
    changes = {"iterations": 12, "hosts": ",".join(machines.hosts[::-1])}
    result = start.resume(str(folder), changes, quiet=True).result
    assert result is not None
    assert result == read_json(folder / "result.json")
    assert [worker["node"] for worker in result["workers"]] == [0, 1]
    assert result["config"]["master_addr"] == machines.hosts[1].removesuffix(":2222")
    one_machine = read_json(talkative_run[0] / "result.json")
    assert result["weights_sha256"] == one_machine["weights_sha256"]


@pytest.mark.root
@pytest.mark.iproute
@pytest.mark.ssh
@pytest.mark.timeout(300)
def test_hosts_stop_when_their_starter_is_killed(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process of its own from the start, with no pipe but its own.
    monkeypatch.setattr(Command, "nursery", None)
    settings = {**ENDLESS, "hosts": ",".join(machines.hosts), "threads": 1, "name": "killed"}
    with train(machines.out, {SSH: machines.ssh}, **settings) as command:
        disks = machines.disks
        wait_until(lambda: is_training(disks[0] / "killed", [0]), "the first host trains")
        wait_until(lambda: is_training(disks[1] / "killed", [1]), "the second host trains")
        processes = machines.remote_processes()
        assert len(processes) >= 4
        command.process.kill()
        wait_until(lambda: are_gone(processes), "the hosts have stopped")
    assert not (machines.out / "killed").exists()
