"""Every failure of a rendezvous is one line that names the endpoint and what to check."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.comm.rendezvous import Rendezvous, port_of
from paceline.errors import PacelineError, RunError, UsageError
from tests.support.worker_pool import free_port


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def failures(*meetings: Rendezvous) -> list[str]:
    """Return the error of each rank when all of them join at once, in threads."""
    stores = []  # Keeps the served store alive for the other ranks.

    def join(meeting: Rendezvous) -> str:
        try:
            stores.append(meeting.join())
        except PacelineError as error:
            return str(error)
        return "joined"

    with ThreadPoolExecutor(len(meetings)) as threads:
        return list(threads.map(join, meetings))


def test_port_in_use_is_reported(taken_port: int) -> None:
    with pytest.raises(UsageError) as caught:
        Rendezvous(0, 2, "127.0.0.1", taken_port, timeout_seconds=1.0).join()
    assert str(caught.value) == (
        f"port {taken_port} on 127.0.0.1 is in use: choose another --master-port"
    )


def test_exhausted_ports_are_reported_without_the_port_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bind(*_: object) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(UsageError, match=r"^no free port on 127\.0\.0\.1 ") as caught:
        Rendezvous(0, 1, "127.0.0.1", 0, timeout_seconds=1.0).join()
    assert "--master-port" not in str(caught.value)


def test_port_zero_selects_a_free_port() -> None:
    store = Rendezvous(0, 2, "127.0.0.1", 0, timeout_seconds=5.0).join_or_serve(may_serve=True)[0]
    others = Rendezvous(1, 2, "127.0.0.1", port_of(store), timeout_seconds=5.0)
    assert others.join_or_serve(may_serve=False)[1] is False


def test_rank_zero_rejects_an_address_of_another_machine() -> None:
    with pytest.raises(
        UsageError, match=r"^192\.0\.2\.1 is not an address of this machine"
    ) as caught:
        Rendezvous(0, 2, "192.0.2.1", 29500, timeout_seconds=1.0).join()
    assert "--master-addr" in str(caught.value)


def test_unresolvable_name_is_rejected() -> None:
    with pytest.raises(
        UsageError, match=r"^cannot resolve no\.such\.host\.invalid .*--master-addr"
    ):
        Rendezvous(1, 2, "no.such.host.invalid", 29500, timeout_seconds=1.0).join()


def test_missing_store_is_an_error_after_the_timeout() -> None:
    port = free_port()
    with pytest.raises(RunError) as caught:
        Rendezvous(1, 2, "127.0.0.1", port, timeout_seconds=0.2).join()
    assert str(caught.value) == (
        f"rank 1: no response from 127.0.0.1:{port} within 0.2 s: is rank 0 running, and are "
        "--master-addr and --master-port correct?"
    )


def test_another_program_at_the_address_is_an_error(taken_port: int) -> None:
    with pytest.raises(RunError) as caught:
        Rendezvous(1, 2, "127.0.0.1", taken_port, timeout_seconds=0.2).join()
    assert str(caught.value) == (
        f"rank 1: the process listening on 127.0.0.1:{taken_port} is not a paceline run: "
        "check --master-addr and --master-port"
    )


def test_missing_ranks_are_named() -> None:
    port = free_port()
    with pytest.raises(RunError) as caught:
        Rendezvous(0, 4, "127.0.0.1", port, timeout_seconds=0.2).join()
    assert str(caught.value) == (f"rank 0: ranks 1-3 did not join 127.0.0.1:{port} within 0.2 s")


def test_rendezvous_completes_when_all_ranks_join() -> None:
    port = free_port()
    assert (
        failures(*(Rendezvous(rank, 3, "127.0.0.1", port) for rank in range(3))) == ["joined"] * 3
    )


def test_different_world_sizes_are_reported() -> None:
    port = free_port()
    errors = failures(
        Rendezvous(0, 2, "127.0.0.1", port, timeout_seconds=2.0),
        Rendezvous(1, 3, "127.0.0.1", port, timeout_seconds=2.0),
    )
    assert errors[0] == (
        f"rank 0 expects 2 ranks at 127.0.0.1:{port}, but rank 1 expects 3: start all with the same"
        " --nnodes and --nproc-per-node"
    )


def test_duplicate_rank_is_rejected() -> None:
    port = free_port()
    errors = failures(
        Rendezvous(0, 3, "127.0.0.1", port, timeout_seconds=1.0),
        Rendezvous(1, 3, "127.0.0.1", port, timeout_seconds=1.0),
        Rendezvous(1, 3, "127.0.0.1", port, timeout_seconds=1.0),
    )
    rejected = [line for line in errors[1:] if f"127.0.0.1:{port} as rank 1" in line]
    assert len(rejected) == 1
    assert rejected[0].endswith("check --node-rank")
