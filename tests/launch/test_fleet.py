"""Commands on several machines: their output, and how they end together."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

import pytest

from paceline.config import from_mapping
from paceline.errors import PacelineError, RecordsError, RunError, StoppedError, UsageError
from paceline.launch.remote import folder_transfer
from paceline.launch.remote import machines as fleet_module
from paceline.launch.remote.control_channel import NodeExit, popen_piped
from paceline.launch.remote.folder_transfer import is_plain, unpack
from paceline.launch.remote.machines import NodeSupervisor, describe_node_exit, run_on_nodes
from paceline.launch.signals import SignalMonitor, signal_name
from paceline.records import RunFolder
from tests.support.commands import LIMIT_SECONDS

UNTIL_LET_GO = "import sys; sys.stdin.read()"


class LocalFleet:
    """Three names for this machine."""

    addresses = ("a", "b", "c")
    python = sys.executable
    cluster_file = None

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, argv: Sequence[str], request: bytes) -> subprocess.Popen[bytes]:
        self.started.append(popen_piped(argv, request))
        return self.started[-1]

    def explain(self, end: NodeExit) -> PacelineError:
        return RunError(describe_node_exit(end, self.addresses[end.node]))


def run(*programs: str, given: str = "") -> list[int]:
    """Run one Python program on each node."""
    with SignalMonitor() as signals:
        exits, _, error = run_on_nodes(
            LocalFleet(),
            lambda node: [sys.executable, "-c", programs[node]],
            lambda _: given.encode(),
            signals,
        )
    if error:
        raise error
    return [each.code or 0 for each in exits]


def test_output_of_the_first_node_is_plain_and_of_the_others_prefixed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    say = "import sys; print(sys.stdin.readline() + 'out'); sys.stderr.write('err')"
    assert run(say, say, "", given="given\n") == [0, 0, 0]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[b] given", "[b] out", "given", "out"]
    assert sorted(err.splitlines()) == ["[b] err", "err"]


def test_the_first_failure_stops_all_and_its_error_is_reported(
    capfd: pytest.CaptureFixture[str],
) -> None:
    complain = "import sys; sys.exit(sys.stderr.write('paceline: error: no disk\\n') and 2)"
    with pytest.raises(UsageError, match=r"^b: no disk$"):
        run(UNTIL_LET_GO, complain, UNTIL_LET_GO)
    assert capfd.readouterr() == ("", "")


def test_an_error_of_several_nodes_is_reported_without_an_address() -> None:
    complain = "import sys; sys.exit(sys.stderr.write('paceline: error: it broke\\n') and 1)"
    with pytest.raises(RunError, match=r"^it broke$"):
        run(complain, "print(1)", complain)


def test_a_node_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "GRACE_SECONDS", 0.1)
    kill = "import os; print(1, flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(RunError, match=r"^node 2 \(c\) was killed by SIGKILL$"):
        run(UNTIL_LET_GO, UNTIL_LET_GO, kill)


def test_the_last_line_of_a_failed_node_is_reported_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    fail = "import sys; print(1); sys.stderr.write('before\\nthe end\\n'); sys.exit(9)"
    with pytest.raises(RunError, match=r"^node 0 \(a\) ended with exit code 9: the end$"):
        run(fail, UNTIL_LET_GO, UNTIL_LET_GO)
    assert capfd.readouterr() == ("1\n", "before\n")


def test_a_node_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "KILL_SECONDS", 0.2)
    stubborn = f"import time; time.sleep({LIMIT_SECONDS})"
    with pytest.raises(RunError, match=r"^node 0 \(a\) ended with exit code 3: no output$"):
        run("import sys; sys.exit(3)", stubborn, stubborn)


def test_ctrl_c_reaches_every_node(capfd: pytest.CaptureFixture[str]) -> None:
    program = """if True:
        import signal, sys, time
        from paceline.launch.remote.control_channel import LauncherWatch, read_request
        def stop(number, frame):
            sys.exit(sys.stderr.write(f"paceline: error: stopped by {number}\\n") and 130)
        signal.signal(signal.SIGINT, stop)
        print(read_request(), flush=True)
        LauncherWatch()
        time.sleep(90)
    """

    shown: list[str] = []

    def interrupt() -> None:
        while "".join(shown).count("here") < 3:
            shown.append(capfd.readouterr().out)
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(StoppedError, match=r"^stopped by 2$"):
            run(program, program, program, given='{"here": 1}\n')
    finally:
        thread.join()


@contextlib.contextmanager
def bound_to_starter(silence_seconds: float = 60.0) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs until its control channel ends it."""
    program = f"""if True:
        import signal, time
        from paceline.launch.remote import control_channel as starter
        starter.SILENCE_SECONDS = {silence_seconds}
        starter.LAST_ITERATION_SECONDS = starter.CLEARING_SECONDS = 0.1
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        starter.read_request()
        starter.LauncherWatch()
        print("ready", flush=True)
        time.sleep({LIMIT_SECONDS})
    """
    with popen_piped([sys.executable, "-c", program], b"{}\n") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_a_node_ends_when_its_launcher_is_gone() -> None:
    """Even if it ignores all signals but SIGKILL."""
    with bound_to_starter() as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL


def test_a_node_ends_when_its_launcher_is_silent() -> None:
    with bound_to_starter(silence_seconds=0.3) as process:
        assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL


def test_an_elastic_run_continues_without_a_lost_node(capfd: pytest.CaptureFixture[str]) -> None:
    fleet = LocalFleet()
    programs = ["import time; time.sleep(1); print('done')", "import sys; sys.exit(4)", ""]
    with SignalMonitor() as signals, NodeSupervisor(fleet, signals, min_nodes=2) as supervisor:
        exits = supervisor.run(lambda node: [sys.executable, "-c", programs[node]], lambda _: b"")
    assert [each.code for each in exits] == [0, 4, 0]
    assert supervisor.lost_nodes == {1}
    out, err = capfd.readouterr()
    assert out == "done\n"
    assert err.startswith("paceline: continuing without node 1: node 1 (b) ended with exit code 4")


class Records:
    """A run folder here and on another machine."""

    def __init__(self, root: Path) -> None:
        config = from_mapping({"out": str(root / "there"), "name": "run"})
        self.there = RunFolder.create(config)
        self.here = RunFolder(root / "here" / "run")
        (self.there.path / "events-0.jsonl").write_text("{}\n")
        self.there.checkpoints.mkdir()
        (self.there.checkpoints / "iteration-3.pt").write_bytes(b"weights" * 1000)

    @staticmethod
    def contents(folder: RunFolder) -> dict[str, bytes]:
        files = (path for path in folder.path.rglob("*") if path.is_file())
        return {str(path.relative_to(folder.path)): path.read_bytes() for path in files}


def test_records_are_fetched_as_they_are(tmp_path: Path) -> None:
    records = Records(tmp_path)
    expected = records.contents(records.there)
    (records.there.path / "link").symlink_to("/etc/hostname")
    (records.there.path / "launch-0.json").write_text("{}")
    assert folder_transfer.download(LocalFleet(), 0, str(records.there.path), records.here)
    assert records.contents(records.here) == expected


def test_the_same_folder_is_not_fetched(tmp_path: Path) -> None:
    records = Records(tmp_path)
    before = records.there.identity()
    assert folder_transfer.download(LocalFleet(), 0, str(records.there.path), records.there)
    assert records.there.identity() == before


def test_a_run_is_sent_to_where_it_is_resumed(tmp_path: Path) -> None:
    records = Records(tmp_path)
    folder_transfer.upload(LocalFleet(), 0, str(records.here.path), records.there)
    assert records.contents(records.here) == records.contents(records.there)


def test_another_run_is_not_written_over(tmp_path: Path) -> None:
    records = Records(tmp_path)
    other = RunFolder.create(from_mapping({"out": str(tmp_path), "name": "other", "seed": 5}))
    with pytest.raises(UsageError, match=r"^a: .*other is a different run: move it away$"):
        folder_transfer.upload(LocalFleet(), 0, str(other.path), records.there)
    assert other.read_config().seed == 5


@pytest.mark.parametrize(
    "name",
    ["../up", "/etc/passwd", "a/../../b", "", ".hidden", "a//b", "a\nb", "/".join("abcdefgh")],
)
def test_names_outside_the_folder_are_rejected(name: str) -> None:
    assert not is_plain(name)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_entries_that_are_not_regular_files_are_rejected(kind: bytes, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as archive:
        entry = tarfile.TarInfo("events-0.jsonl")
        entry.type, entry.linkname = kind, "/etc/passwd"
        archive.addfile(entry)
    packed.seek(0)
    with pytest.raises(RecordsError, match="not a file of a run"):
        unpack(packed, tmp_path, lambda _: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize(("there", "kept"), [(b"1\n2\n3\n", b"1\n2\n3\n"), (b"1\n", b"1\n2\n")])
def test_events_are_replaced_only_by_a_longer_file(
    there: bytes, kept: bytes, replace: bool, tmp_path: Path
) -> None:
    (tmp_path / "events-0.jsonl").write_bytes(there)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as archive:
        entry = tarfile.TarInfo("events-0.jsonl")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"1\n2\n"))
    packed.seek(0)
    unpack(packed, tmp_path, lambda _: None, replace)
    assert (tmp_path / "events-0.jsonl").read_bytes() == kept


def test_a_signal_without_a_name_is_reported_by_number() -> None:
    assert [signal_name(-9), signal_name(-40)] == ["SIGKILL", "signal 40"]
