"""What is particular to workers that share memory: what they leave, and what becomes of faults."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.comm.shm import communicator as shared_memory
from paceline.comm.shm import segment
from paceline.comm.work import Work
from paceline.errors import PeerError, UsageError
from tests.support.worker_pool import WorkerPool


@contextmanager
def files_in(folder: Path, on_map: Callable[[Path], None]) -> Iterator[None]:
    """Let this process make its shared memory elsewhere, and look at each file before it maps it.

    Many programs share /dev/shm.
    """
    make_map = segment._map

    def look_and_map(path: Path, size_bytes: int) -> object:
        on_map(path)
        return make_map(path, size_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "FOLDER", folder)
        patch.setattr(segment, "_map", look_and_map)
        yield


def names_and_modes(communicator: Communicator, folder: Path) -> list[object]:
    """While the memory is shared, and when all are connected."""
    seen: list[object] = []
    with (
        files_in(folder, lambda path: seen.append(oct(S_IMODE(path.stat().st_mode)))),
        shared_memory.connect(communicator) as team,
    ):
        team.all_reduce(torch.ones(3), "control").wait()
        seen.append(list(folder.iterdir()))
    return seen


def test_segment_is_private_to_the_user_and_unlinked_once_connected(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert pool.run(3, names_and_modes, tmp_path) == [["0o600", []]] * 3


def stay_away(communicator: Communicator, folder: Path) -> None:
    with files_in(folder, lambda _: None):
        if communicator.rank == 1:
            raise RuntimeError("out of memory, say")
        shared_memory.connect(communicator)


def test_missing_peer_leaves_no_name(pool: WorkerPool, tmp_path: Path) -> None:
    first, _ = pool.outcomes(2, stay_away, tmp_path, fresh=True)
    assert isinstance(first.error, PeerError)
    assert not list(tmp_path.iterdir())


def exit_while_connecting(communicator: Communicator, folder: Path) -> None:
    with files_in(folder, lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        shared_memory.connect(communicator)


def test_next_segment_unlinks_names_of_processes_killed_while_connecting(
    pool: WorkerPool, tmp_path: Path
) -> None:
    with WorkerPool(2) as mortals:
        assert all(each.died for each in mortals.outcomes(2, exit_while_connecting, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1, "they were to be killed before they removed the name"
    assert pool.run(2, names_and_modes, tmp_path) == [["0o600", []]] * 2


@contextmanager
def other_process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            yield other.pid
        finally:
            other.kill()


def test_only_names_of_exited_processes_are_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    space, own = segment.pid_namespace(), os.getpid()
    with other_process() as ended:
        left = {
            f"paceline-{segment._owner(ended)}-aa",
            f"paceline-{space}-{own}-1-number-used-anew",
        }
    with other_process() as living:
        stays = {
            f"paceline-{segment._owner(living)}-bb",
            f"paceline-{space + 1}-{ended}-1-of-another-container",
            f"paceline-{space}-none",
            f"paceline-{space}-x-y-z",
            f"another-{segment._owner(ended)}-cc",
        }
        for name in left | stays:
            (tmp_path / name).touch()
        segment.unlink_stale_segments()
        assert {path.name for path in tmp_path.iterdir()} == stays


@pytest.mark.root
def test_names_of_other_users_are_not_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    theirs = tmp_path / f"paceline-{segment.pid_namespace()}-{os.getpid()}-1-aa"
    theirs.touch()
    os.chown(theirs, 65534, 65534)
    segment.unlink_stale_segments()
    assert theirs.exists()


def connect_in(communicator: Communicator, folder: Path) -> str:
    with files_in(folder, lambda _: None):
        try:
            shared_memory.connect(communicator).close()
        except UsageError as error:
            return str(error)
    return "no error"


@pytest.mark.root
def test_insufficient_memory_is_a_one_line_error_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    small = ["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(tmp_path)]
    subprocess.run(small, check=True)
    try:
        first, second = pool.run(2, connect_in, tmp_path)
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert first == second
    assert " MiB of shared memory required" in first
    assert f"{tmp_path} has 1 MiB free" in first
    assert "\n" not in first


def kinds_of_waiting(team: Communicator, absent: int) -> list[Callable[[], Work]]:
    return [
        lambda: team.recv(torch.zeros(3), absent, "control"),
        lambda: team.all_reduce(torch.zeros(1000), "gradients"),
        team.barrier,
    ]


def lose_rank_three(communicator: Communicator) -> tuple[str, float]:
    """Each of the others waits for it in another way; what is said, and after how long."""
    with shared_memory.connect(communicator) as team:
        team.barrier().wait()
        if team.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            kinds_of_waiting(team, 3)[team.rank]().wait()
        except PeerError as error:
            said = str(error)
        seconds = time.monotonic() - began
        # Not to be mistaken for the one who was killed.
        communicator.close()
        time.sleep(0.2)
        return said, seconds


def test_killed_peer_is_named_long_before_the_timeout() -> None:
    with WorkerPool(4) as mortals:
        *others, lost = mortals.outcomes(4, lose_rank_three, fresh=True, timeout_seconds=1000.0)
    assert lost.died
    values = [each.value for each in others if each.value is not None]
    assert [said for said, _ in values] == [
        "rank 0: recv from rank 3: its process has ended",
        "rank 1: all_reduce with rank 3: its process has ended",
        "rank 2: barrier with rank 3: its process has ended",
    ]
    assert max(seconds for _, seconds in values) < 5.0


def stall(communicator: Communicator) -> str:
    """Rank 1 is stopped, until rank 0 has given it up."""
    processes = torch.zeros(2, dtype=torch.int64)
    processes[communicator.rank] = os.getpid()
    communicator.all_reduce(processes, "control").wait()
    with shared_memory.connect(communicator) as team:
        team.barrier().wait()
        if team.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        try:
            team.all_reduce(torch.zeros(1000), "gradients").wait()
        except PeerError as error:
            return str(error)
        finally:
            os.kill(int(processes[1]), signal.SIGCONT)
    return "no error"


def test_stalled_peer_is_an_error_after_the_timeout(pool: WorkerPool) -> None:
    said = pool.run(2, stall, fresh=True, timeout_seconds=1.0)[0]
    assert said == "rank 0: all_reduce with rank 1: no answer within the timeout of 1 s"


POLLING_SECONDS = 20.0
"""How long a test looks on; with the defect that it is about, it would do so forever."""


def poll(work: Work) -> str:
    """Ask whether an operation is done until it is; then what `wait()` says."""
    deadline = time.monotonic() + POLLING_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            return "never done"
        time.sleep(0.001)
    try:
        work.wait()
    except PeerError as error:
        return str(error)
    return "no error"


def poll_after_exit(communicator: Communicator, operation: int) -> str:
    with shared_memory.connect(communicator) as team:
        team.barrier().wait()
        if team.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return poll(kinds_of_waiting(team, 1)[operation]())


@pytest.mark.parametrize(
    ("operation", "name"), [(0, "recv from"), (1, "all_reduce with"), (2, "barrier with")]
)
def test_polling_completes_with_an_error_if_a_peer_exits(operation: int, name: str) -> None:
    with WorkerPool(2) as mortals:
        survivor, lost = mortals.outcomes(
            2, poll_after_exit, operation, fresh=True, timeout_seconds=1000.0
        )
    assert lost.died
    assert survivor.value == f"rank 0: {name} rank 1: its process has ended"


def poll_after_stop(communicator: Communicator) -> str:
    """Rank 1 is stopped, until rank 0 has given up on it."""
    processes = torch.zeros(2, dtype=torch.int64)
    processes[communicator.rank] = os.getpid()
    communicator.all_reduce(processes, "control").wait()
    with shared_memory.connect(communicator) as team:
        team.barrier().wait()
        if team.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        try:
            return poll(team.all_reduce(torch.zeros(1000), "gradients"))
        finally:
            os.kill(int(processes[1]), signal.SIGCONT)


def test_polling_completes_with_an_error_after_the_timeout(pool: WorkerPool) -> None:
    said = pool.run(2, poll_after_stop, fresh=True, timeout_seconds=1.0)[0]
    assert said == "rank 0: all_reduce with rank 1: no answer within the timeout of 1 s"


def searches_while_polling(communicator: Communicator) -> int:
    """How often 200 polls at two moments look for peers that are gone."""
    with shared_memory.connect(communicator) as team:
        if team.rank == 1:
            communicator.barrier().wait()
            team.barrier().wait()
            return 0
        work = team.barrier()
        now = [1000.0]
        searches: list[float] = []
        find_gone = team._signals.gone

        def gone() -> tuple[Sequence[int], Sequence[int]]:
            searches.append(now[0])
            return find_gone()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory, "monotonic", lambda: now[0])
            patch.setattr(team._signals, "gone", gone)
            for _ in range(2):
                now[0] += 1.0
                for _ in range(100):
                    assert not work.is_completed()
        communicator.barrier().wait()
        work.wait()
        return len(searches)


def test_polling_checks_for_exited_peers_at_intervals(pool: WorkerPool) -> None:
    assert pool.run(2, searches_while_polling, fresh=True)[0] == 2


def poll_a_closed_connection(communicator: Communicator) -> str:
    with shared_memory.connect(communicator) as team:
        team.barrier().wait()
        work = team.all_reduce(torch.zeros(1000), "gradients") if team.rank == 0 else None
        team.close()
        return "" if work is None else poll(work)


def test_polling_completes_with_an_error_after_close(pool: WorkerPool) -> None:
    said = pool.run(2, poll_a_closed_connection, fresh=True)[0]
    assert said == "rank 0: all_reduce with rank 1: the connection was closed"


def seconds_of_computing(communicator: Communicator) -> float:
    """While rank 0 sleeps and all others wait for it."""
    with shared_memory.connect(communicator) as team:
        team.barrier().wait()
        if team.rank == 0:
            time.sleep(1.0)
        before = time.process_time()
        team.all_reduce(torch.zeros(1000), "gradients").wait()
        spent = time.process_time() - before
        team.barrier().wait()
    return spent


@pytest.mark.parametrize("workers", [2, 4])
def test_waiting_ranks_yield_their_cores(pool: WorkerPool, workers: int) -> None:
    assert max(pool.run(workers, seconds_of_computing)) < 0.2


def held_after_closing(communicator: Communicator) -> int:
    """Shared memory and descriptors of processes, beyond those before."""
    gc.collect()  # what other tests left in cycles must not go away in between
    before = _held()
    for _ in range(3):
        with shared_memory.connect(communicator) as team, team.dup() as fork:
            team.all_reduce(torch.ones(3), "control").wait()
            [peer] = fork.peers
            fork.sendrecv(torch.ones(3), peer, torch.ones(3), peer, "control").wait()
        del team, fork
    return _held() - before


def _held() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            opened.append(str(descriptor.readlink()))
    return sum("/paceline-" in text or "pidfd" in text for text in maps + opened)


def test_closing_releases_memory_and_descriptors(pool: WorkerPool) -> None:
    assert pool.run(2, held_after_closing) == [0, 0]


def sum_parts_in_place(communicator: Communicator, dtype: torch.dtype) -> list[torch.Tensor]:
    """A whole tensor of `zeros`, then three neighbouring parts of one, all under way together."""
    elements, cpu = 300_001, torch.device("cpu")
    with shared_memory.connect(communicator) as team:
        whole, cut = (team.zeros(elements, dtype, cpu) for _ in range(2))
        for tensor in (whole, cut):
            tensor.copy_(torch.arange(elements) % 7 + team.rank)
        parts = cut.tensor_split(3)
        for work in [team.all_reduce(each, "gradients") for each in (whole, parts[0], parts[2])]:
            work.wait()
        return [whole.clone(), *(part.clone() for part in parts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_symmetric_memory_is_reduced_in_place_without_touching_other_slices(
    pool: WorkerPool, workers: int, dtype: torch.dtype
) -> None:
    start = torch.arange(300_001) % 7
    total = (workers * start + sum(range(workers))).to(dtype)
    for rank, (whole, first, between, last) in enumerate(
        pool.run(workers, sum_parts_in_place, dtype)
    ):
        assert torch.equal(whole, total)
        assert torch.equal(first, total.tensor_split(3)[0])
        assert torch.equal(between, (start + rank).to(dtype).tensor_split(3)[1])
        assert torch.equal(last, total.tensor_split(3)[2])


def slots_changed(communicator: Communicator) -> list[bool]:
    """Whether a sum in place changes what is in the outboxes, and whether another does."""
    with shared_memory.connect(communicator) as team:
        tensor = team.zeros(100_000, torch.float32, torch.device("cpu")).fill_(1)
        changed = []
        for each in (tensor, tensor.clone()):
            team.barrier().wait()
            before = team._buffers._memory.clone()
            team.barrier().wait()
            team.all_reduce(each, "gradients").wait()
            team.barrier().wait()
            changed.append(not torch.equal(team._buffers._memory, before))
        return changed


def test_in_place_sum_does_not_use_slots(pool: WorkerPool) -> None:
    assert pool.run(3, slots_changed) == [[False, True]] * 3


def sum_without_shared_memory(communicator: Communicator) -> tuple[float, int]:
    """A tensor of `zeros` where no more memory can be shared: its sum, and how many are shared."""

    def refuse(size_bytes: int) -> Path:
        raise OSError(errno.ENOSPC, "no space left")

    with shared_memory.connect(communicator) as team, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "_create", refuse)
        tensor = team.zeros(100_000, torch.float32, torch.device("cpu")).fill_(team.rank + 1)
        team.all_reduce(tensor, "gradients").wait()
        return float(tensor.sum()), len(team._symmetric_memory)


def test_zeros_falls_back_to_ordinary_memory(
    pool: WorkerPool,
) -> None:
    assert pool.run(3, sum_without_shared_memory) == [(600_000.0, 0)] * 3


def completions(communicator: Communicator, elements: int) -> tuple[int, int]:
    """How often a sum said that it was complete: after its last step, and after `wait()`."""
    with shared_memory.connect(communicator) as team:
        moments: list[object] = []
        work = team.all_reduce(torch.ones(elements), "gradients")
        work.add_done_callback(lambda *moment: moments.append(moment))
        deadline = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        done = len(moments)
        work.wait()
        team.barrier().wait()
        return done, len(moments)


@pytest.mark.parametrize("elements", [5, 3_000_000])
def test_sum_completes_with_its_last_step(pool: WorkerPool, elements: int) -> None:
    """And not only when somebody waits for it, which may be long after."""
    assert pool.run(2, completions, elements) == [(1, 1)] * 2
