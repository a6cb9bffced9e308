"""How workers find one another: a small key-value store at an address that all of them know.

Rank 0 serves it, unless a launcher does already. It listens on that address and on no other.
Whatever keeps the workers from meeting becomes one line that names the address and says what to
check.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep

from torch.distributed import (  # type: ignore[attr-defined]  # torch lists only the first
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

from paceline.comm.communicator import format_ranks
from paceline.errors import RunError, UsageError

POLL_SECONDS = 0.02


def port_of(store: Store) -> int:
    """The port at which a store that `Rendezvous` gave is served."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    return int(store.port)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and when to meet."""

    rank: int
    world_size: int
    address: str
    port: int
    """0: any free one, for meetings whose others learn it from whoever serves the store."""
    timeout_seconds: float = 60.0
    """How long to wait for the others."""
    serves_store: bool | None = None
    """Whether this process serves the store; None: rank 0 does. False on every rank where a
    launcher has opened one at the address."""
    noun: str = "rank"
    """What those who meet are called in messages: worker ranks, or nodes."""
    name: str = "paceline"
    """Keeps groups apart that meet at one store, such as the attempts of a restarted run."""

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def _who(self) -> str:
        return f"{self.noun} {self.rank}"

    def join(self) -> Store:
        """The store, once all workers have come to it."""
        deadline = monotonic() + self.timeout_seconds
        serves = self.rank == 0 if self.serves_store is None else self.serves_store
        try:
            store = self._serve() if serves else self._connect(deadline)
            store = PrefixStore(self.name, store)
            self._sign_in(store)
            self._await_others(store, deadline)
        except DistError as error:
            cause = str(error).splitlines()[0]
            raise RunError(f"{self._who}: the meeting at {self.place} broke: {cause}") from None
        return store

    def join_or_host(self, may_serve: bool) -> tuple[Store, bool]:
        """The store, whoever else has come; and whether it is served here.

        Of those who may, and whose machine has the address, the first serves it.
        """
        deadline = monotonic() + self.timeout_seconds
        try:
            if may_serve:
                return self._store_at(self._listen()), True
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise self._explain_bind(error) from None
        try:
            return self._connect(deadline), False
        except DistError as error:
            cause = str(error).splitlines()[0]
            raise RunError(f"cannot join the run at {self.place}: {cause}") from None

    def local_address(self) -> str:
        """This machine's address on the network on which the meeting is."""
        family, _, _, _, target = self._resolve()
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing; it only chooses the route
            return str(probe.getsockname()[0])

    def _serve(self) -> Store:
        try:
            return self._store_at(self._listen())
        except OSError as error:
            raise self._explain_bind(error) from None

    def _listen(self) -> socket.socket:
        """A socket that listens at the address, and at no other.

        The store's own server would listen on all addresses, so it is given this one instead.
        """
        family, kind, protocol, _, target = self._resolve()
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(4096)
        except BaseException:
            listener.close()
            raise
        return listener

    def _store_at(self, listener: socket.socket) -> Store:
        """Served by this process; the socket is never closed in between, so nobody can take it."""
        port = int(listener.getsockname()[1])
        return replace(self, port=port)._store(serves=True, listener=listener.detach())

    def _connect(self, deadline: float) -> Store:
        # The store's own client would retry noisily, and beyond its limit.
        target = self._resolve()[4]
        while True:
            try:
                limit = max(deadline - monotonic(), POLL_SECONDS)
                socket.create_connection(target, timeout=limit).close()
                break
            except OSError:
                if monotonic() > deadline:
                    raise RunError(
                        f"{self._who}: nobody answered at {self.place} for "
                        f"{self.timeout_seconds:g} s: is {self.noun} 0 running, and are "
                        "--master-addr and --master-port right?"
                    ) from None
                sleep(POLL_SECONDS)
        # Something else that listens there and says nothing would hold up the client for ever.
        stores: SimpleQueue[Store | DistError] = SimpleQueue()
        Thread(target=lambda: stores.put(self._store_or_error()), daemon=True).start()
        try:
            store = stores.get(timeout=max(deadline - monotonic(), 1.0))
        except Empty:
            raise RunError(
                f"{self._who}: what listens at {self.place} is not a paceline run: "
                "check --master-addr and --master-port"
            ) from None
        if isinstance(store, DistError):
            raise store
        return store

    def _store_or_error(self) -> Store | DistError:
        try:
            return self._store(serves=False)
        except DistError as error:
            return error

    def _store(self, *, serves: bool, listener: int | None = None) -> Store:
        return TCPStore(
            self.address,
            self.port,
            is_master=serves,
            timeout=timedelta(seconds=self.timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _sign_in(self, store: Store) -> None:
        if store.add(f"joined/{self.rank}", 1) > 1:
            raise UsageError(
                f"two came to {self.place} as {self.noun} {self.rank}: check --node-rank"
            )
        store.set(self._seat(self.rank), str(self.world_size))

    def _await_others(self, store: Store, deadline: float) -> None:
        for rank in range(self.world_size):
            while not store.check([self._seat(rank)]):
                if monotonic() > deadline:
                    missing = [
                        each
                        for each in range(rank, self.world_size)
                        if not store.check([self._seat(each)])
                    ]
                    raise RunError(
                        f"{self._who}: {format_ranks(missing, self.noun)} did not come to "
                        f"{self.place} within {self.timeout_seconds:g} s"
                    )
                sleep(POLL_SECONDS)
            expected = int(store.get(self._seat(rank)))
            if expected != self.world_size:
                raise UsageError(
                    f"{self._who} expects {self.world_size} {self.noun}s at {self.place}, "
                    f"{self.noun} {rank} expects {expected}: start all with the same --nnodes and "
                    "--nproc-per-node"
                )

    def _seat(self, rank: int) -> str:
        return f"seat/{rank}"

    def _resolve(self) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
        try:
            found = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(
                f"cannot resolve {self.address} ({error.strerror}): check --master-addr"
            ) from None
        family, kind, protocol, name, target = found[0]
        return family, kind, protocol, name, (str(target[0]), int(target[1]))

    def _explain_bind(self, error: OSError) -> UsageError:
        if error.errno == errno.EADDRINUSE and not self.port:
            return UsageError(
                f"no port of {self.address} is free (net.ipv4.ip_local_port_range): end programs"
                " that have many connections open"
            )
        if error.errno == errno.EADDRINUSE:
            return UsageError(
                f"port {self.port} of {self.address} is in use: choose another --master-port"
            )
        if error.errno == errno.EADDRNOTAVAIL:
            return UsageError(
                f"{self.address} is no address of this machine, which has rank 0: "
                "check --master-addr"
            )
        return UsageError(f"cannot listen at {self.place} ({error.strerror}): check --master-port")
