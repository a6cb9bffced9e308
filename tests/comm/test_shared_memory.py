"""Shared-memory communicators: segments, lost peers, polling, in-place sums."""

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
from paceline.comm.shm import progress, segment
from paceline.comm.work import Work
from paceline.errors import PeerError, UsageError
from tests.support.worker_pool import WorkerPool


@contextmanager
def files_in(folder: Path, on_map: Callable[[Path], None]) -> Iterator[None]:
    """Create segments in `folder` and call `on_map` before each is mapped.

    Other programs also use /dev/shm.
    """
    make_map = segment.map_file

    def look_and_map(path: Path, size_bytes: int) -> object:
        on_map(path)
        return make_map(path, size_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "FOLDER", folder)
        patch.setattr(segment, "map_file", look_and_map)
        yield


def modes_and_names(communicator: Communicator, folder: Path) -> list[object]:
    """Return the mode of each segment, and the names left once all ranks are connected."""
    seen: list[object] = []
    with (
        files_in(folder, lambda path: seen.append(oct(S_IMODE(path.stat().st_mode)))),
        shared_memory.connect(communicator) as shm,
    ):
        shm.all_reduce(torch.ones(3), "control").wait()
        seen.append(list(folder.iterdir()))
    return seen


def test_segment_is_private_to_the_user_and_unlinked_once_connected(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert pool.run(3, modes_and_names, tmp_path) == [["0o600", []]] * 3


def fail_on_rank_one(communicator: Communicator, folder: Path) -> None:
    with files_in(folder, lambda _: None):
        if communicator.rank == 1:
            raise RuntimeError("out of memory")
        shared_memory.connect(communicator)


def test_missing_peer_leaves_no_name(pool: WorkerPool, tmp_path: Path) -> None:
    first, _ = pool.outcomes(2, fail_on_rank_one, tmp_path, fresh=True)
    assert isinstance(first.error, PeerError)
    assert not list(tmp_path.iterdir())


def exit_while_connecting(communicator: Communicator, folder: Path) -> None:
    with files_in(folder, lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        shared_memory.connect(communicator)


def test_next_segment_unlinks_names_of_processes_killed_while_connecting(
    pool: WorkerPool, tmp_path: Path
) -> None:
    with WorkerPool(2) as workers:
        assert all(each.died for each in workers.outcomes(2, exit_while_connecting, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1, (
        "the processes must be killed before they unlink the name"
    )
    assert pool.run(2, modes_and_names, tmp_path) == [["0o600", []]] * 2


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
    assert " MiB of shared memory, but " in first
    assert f"{tmp_path} has 1 MiB free" in first
    assert "\n" not in first


def waiting_operations(shm: Communicator, absent: int) -> list[Callable[[], Work]]:
    return [
        lambda: shm.recv(torch.zeros(3), absent, "control"),
        lambda: shm.all_reduce(torch.zeros(1000), "gradients"),
        shm.barrier,
    ]


def lose_rank_three(communicator: Communicator) -> tuple[str, float]:
    """Each other rank waits for it in a different way; return its error and the seconds it took."""
    with shared_memory.connect(communicator) as shm:
        shm.barrier().wait()
        if shm.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            waiting_operations(shm, 3)[shm.rank]().wait()
        except PeerError as error:
            message = str(error)
        seconds = time.monotonic() - began
        # Stay alive, so that peers do not report this rank instead of the killed one.
        communicator.close()
        time.sleep(0.2)
        return message, seconds


def test_killed_peer_is_named_long_before_the_timeout() -> None:
    with WorkerPool(4) as workers:
        *others, lost = workers.outcomes(4, lose_rank_three, fresh=True, timeout_seconds=1000.0)
    assert lost.died
    values = [each.value for each in others if each.value is not None]
    assert [error for error, _ in values] == [
        "rank 0: recv from rank 3: its process exited",
        "rank 1: all_reduce with rank 3: its process exited",
        "rank 2: barrier with rank 3: its process exited",
    ]
    assert max(seconds for _, seconds in values) < 5.0


def with_stopped_peer(communicator: Communicator, complete: Callable[[Work], str]) -> str:
    """Rank 1 is stopped until rank 0 has completed an all-reduce with it."""
    processes = torch.zeros(2, dtype=torch.int64)
    processes[communicator.rank] = os.getpid()
    communicator.all_reduce(processes, "control").wait()
    with shared_memory.connect(communicator) as shm:
        shm.barrier().wait()
        if shm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        try:
            return complete(shm.all_reduce(torch.zeros(1000), "gradients"))
        finally:
            os.kill(int(processes[1]), signal.SIGCONT)


def error_of_wait(work: Work) -> str:
    try:
        work.wait()
    except PeerError as error:
        return str(error)
    return "no error"


def test_stalled_peer_is_an_error_after_the_timeout(pool: WorkerPool) -> None:
    error = pool.run(2, with_stopped_peer, error_of_wait, fresh=True, timeout_seconds=1.0)[0]
    assert error == "rank 0: all_reduce with rank 1: no response within the timeout of 1 s"


POLLING_SECONDS = 20.0
"""How long a test polls; with the defect that it checks for, polling never ends."""


def poll(work: Work) -> str:
    """Poll an operation until it is complete; return the error of `wait()`."""
    deadline = time.monotonic() + POLLING_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            return "never completed"
        time.sleep(0.001)
    return error_of_wait(work)


def poll_after_exit(communicator: Communicator, operation: int) -> str:
    with shared_memory.connect(communicator) as shm:
        shm.barrier().wait()
        if shm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return poll(waiting_operations(shm, 1)[operation]())


@pytest.mark.parametrize(
    ("operation", "name"), [(0, "recv from"), (1, "all_reduce with"), (2, "barrier with")]
)
def test_polling_completes_with_an_error_if_a_peer_exits(operation: int, name: str) -> None:
    with WorkerPool(2) as workers:
        survivor, lost = workers.outcomes(
            2, poll_after_exit, operation, fresh=True, timeout_seconds=1000.0
        )
    assert lost.died
    assert survivor.value == f"rank 0: {name} rank 1: its process exited"


def test_polling_completes_with_an_error_after_the_timeout(pool: WorkerPool) -> None:
    error = pool.run(2, with_stopped_peer, poll, fresh=True, timeout_seconds=1.0)[0]
    assert error == "rank 0: all_reduce with rank 1: no response within the timeout of 1 s"


def searches_while_polling(communicator: Communicator) -> int:
    """Return how often 200 polls at two times check for exited peers."""
    with shared_memory.connect(communicator) as shm:
        if shm.rank == 1:
            communicator.barrier().wait()
            shm.barrier().wait()
            return 0
        work = shm.barrier()
        now = [1000.0]
        searches: list[float] = []
        find = shm._signals.disconnected_and_exited_peers

        def count_and_find() -> tuple[Sequence[int], Sequence[int]]:
            searches.append(now[0])
            return find()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(progress, "monotonic", lambda: now[0])
            patch.setattr(shm._signals, "disconnected_and_exited_peers", count_and_find)
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
    with shared_memory.connect(communicator) as shm:
        shm.barrier().wait()
        work = shm.all_reduce(torch.zeros(1000), "gradients") if shm.rank == 0 else None
        shm.close()
        return "" if work is None else poll(work)


def test_polling_completes_with_an_error_after_close(pool: WorkerPool) -> None:
    error = pool.run(2, poll_a_closed_connection, fresh=True)[0]
    assert error == "rank 0: all_reduce with rank 1: the connection was closed"


def seconds_of_computing(communicator: Communicator) -> float:
    """Return the CPU time of a rank while rank 0 sleeps and the others wait for it."""
    with shared_memory.connect(communicator) as shm:
        shm.barrier().wait()
        if shm.rank == 0:
            time.sleep(1.0)
        before = time.process_time()
        shm.all_reduce(torch.zeros(1000), "gradients").wait()
        spent = time.process_time() - before
        shm.barrier().wait()
    return spent


@pytest.mark.parametrize("workers", [2, 4])
def test_waiting_ranks_yield_their_cores(pool: WorkerPool, workers: int) -> None:
    assert max(pool.run(workers, seconds_of_computing)) < 0.2


def held_after_closing(communicator: Communicator) -> int:
    """Return how many mappings and pidfds remain after closing."""
    gc.collect()  # Collect reference cycles of other tests first.
    before = _held()
    for _ in range(3):
        with shared_memory.connect(communicator) as shm, shm.dup() as duplicate:
            shm.all_reduce(torch.ones(3), "control").wait()
            [peer] = duplicate.peers
            duplicate.sendrecv(torch.ones(3), peer, torch.ones(3), peer, "control").wait()
        del shm, duplicate
    return _held() - before


def _held() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # The descriptor of this listing.
            opened.append(str(descriptor.readlink()))
    return sum("/paceline-" in text or "pidfd" in text for text in maps + opened)


def test_closing_releases_memory_and_descriptors(pool: WorkerPool) -> None:
    assert pool.run(2, held_after_closing) == [0, 0]


def sum_parts_in_place(communicator: Communicator, dtype: torch.dtype) -> list[torch.Tensor]:
    """Reduce a whole `zeros` tensor and two of three slices of another at the same time."""
    elements, cpu = 300_001, torch.device("cpu")
    with shared_memory.connect(communicator) as shm:
        whole, cut = (shm.zeros(elements, dtype, cpu) for _ in range(2))
        for tensor in (whole, cut):
            tensor.copy_(torch.arange(elements) % 7 + shm.rank)
        parts = cut.tensor_split(3)
        for work in [shm.all_reduce(each, "gradients") for each in (whole, parts[0], parts[2])]:
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
    """Return whether an in-place sum changes the slots, and whether an ordinary sum does."""
    with shared_memory.connect(communicator) as shm:
        tensor = shm.zeros(100_000, torch.float32, torch.device("cpu")).fill_(1)
        changed = []
        for each in (tensor, tensor.clone()):
            shm.barrier().wait()
            before = [slots.clone() for slots in shm._buffers._memory]
            shm.barrier().wait()
            shm.all_reduce(each, "gradients").wait()
            shm.barrier().wait()
            slots = zip(shm._buffers._memory, before, strict=True)
            changed.append(not all(torch.equal(now, old) for now, old in slots))
        return changed


def test_in_place_sum_does_not_use_slots(pool: WorkerPool) -> None:
    assert pool.run(3, slots_changed) == [[False, True]] * 3


def sum_without_shared_memory(communicator: Communicator) -> tuple[float, int]:
    """Return the sum of a `zeros` tensor without free shared memory, and how many are shared."""

    def refuse(size_bytes: int) -> Path:
        raise OSError(errno.ENOSPC, "no space left")

    with shared_memory.connect(communicator) as shm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "create_file", refuse)
        tensor = shm.zeros(100_000, torch.float32, torch.device("cpu")).fill_(shm.rank + 1)
        shm.all_reduce(tensor, "gradients").wait()
        return float(tensor.sum()), len(shm._symmetric_memory)


def test_zeros_falls_back_to_ordinary_memory(
    pool: WorkerPool,
) -> None:
    assert pool.run(3, sum_without_shared_memory) == [(600_000.0, 0)] * 3


def completions(communicator: Communicator, elements: int) -> tuple[int, int]:
    """Return how many callbacks ran before `wait()`, and after it."""
    with shared_memory.connect(communicator) as shm:
        moments: list[object] = []
        work = shm.all_reduce(torch.ones(elements), "gradients")
        work.add_done_callback(lambda *moment: moments.append(moment))
        deadline = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        done = len(moments)
        work.wait()
        shm.barrier().wait()
        return done, len(moments)


@pytest.mark.parametrize("elements", [5, 3_000_000])
def test_sum_completes_with_its_last_step(pool: WorkerPool, elements: int) -> None:
    """Completion is not delayed until `wait()`."""
    assert pool.run(2, completions, elements) == [(1, 1)] * 2
