"""Rendezvous: workers find each other through a TCPStore at an address that all of them know.

Rank 0 serves the store unless a launcher does. The store listens only on that address. Every error
message is one line that names the address and what to check.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports only the first
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

from paceline.errors import RunError, UsageError
from paceline.formatting import format_ranks

POLL_SECONDS = 0.02


def port_of(store: Store) -> int:
    """Return the port of a store that `Rendezvous` returned."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    return int(store.port)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address and timeout of a rendezvous, and the rank of this process in it."""

    rank: int
    world_size: int
    address: str
    port: int
    """0 means any free port, which `port_of` returns in the process that serves the store."""
    timeout_seconds: float = 60.0
    """Time to wait for all ranks."""
    serves_store: bool | None = None
    """Whether this process serves the store; None means that rank 0 does. False on every rank if a
    launcher serves it."""
    noun: str = "rank"
    """What error messages call a participant: "rank" or "node"."""
    name: str = "paceline"
    """Separates groups that use the same store, such as the restarts of a run."""

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def _label(self) -> str:
        return f"{self.noun} {self.rank}"

    def join(self) -> Store:
        """Wait for all ranks and return the store."""
        deadline = monotonic() + self.timeout_seconds
        serves = self.rank == 0 if self.serves_store is None else self.serves_store
        try:
            store = self._serve() if serves else self._connect(deadline)
            store = PrefixStore(self.name, store)
            self._announce(store)
            self._wait_for_others(store, deadline)
        except DistError as error:
            cause = str(error).splitlines()[0]
            raise RunError(
                f"{self._label}: the rendezvous at {self.endpoint} failed: {cause}"
            ) from None
        return store

    def join_or_serve(self, may_serve: bool) -> tuple[Store, bool]:
        """Return the store without waiting for others, and whether this process serves it.

        The first process that may serve, and whose machine has the address, serves it.
        """
        deadline = monotonic() + self.timeout_seconds
        try:
            if may_serve:
                return self._store_at(self._listen()), True
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise self._bind_error(error) from None
        try:
            return self._connect(deadline), False
        except DistError as error:
            cause = str(error).splitlines()[0]
            raise RunError(f"cannot join the run at {self.endpoint}: {cause}") from None

    def local_address(self) -> str:
        """Return the address of this machine on the network of the rendezvous."""
        family, _, _, _, target = self._resolve()
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # Sends nothing; it only selects the route.
            return str(probe.getsockname()[0])

    def _serve(self) -> Store:
        try:
            return self._store_at(self._listen())
        except OSError as error:
            raise self._bind_error(error) from None

    def _listen(self) -> socket.socket:
        """Open a socket that listens only on `address`; TCPStore would listen on all addresses."""
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
        """Serve the store on an open socket, so that no other process can take the port."""
        port = int(listener.getsockname()[1])
        return replace(self, port=port)._store(serves=True, listener=listener.detach())

    def _connect(self, deadline: float) -> Store:
        # TCPStore would log every retry and exceed the timeout.
        target = self._resolve()[4]
        while True:
            try:
                limit = max(deadline - monotonic(), POLL_SECONDS)
                socket.create_connection(target, timeout=limit).close()
                break
            except OSError:
                if monotonic() > deadline:
                    raise RunError(
                        f"{self._label}: no response from {self.endpoint} within "
                        f"{self.timeout_seconds:g} s: is {self.noun} 0 running, and are "
                        "--master-addr and --master-port correct?"
                    ) from None
                sleep(POLL_SECONDS)
        # Another program that listens there without responding would block TCPStore forever.
        stores: SimpleQueue[Store | DistError] = SimpleQueue()
        Thread(target=lambda: stores.put(self._store_or_error()), daemon=True).start()
        try:
            store = stores.get(timeout=max(deadline - monotonic(), 1.0))
        except Empty:
            raise RunError(
                f"{self._label}: the process listening on {self.endpoint} is not a paceline run:"
                " check --master-addr and --master-port"
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

    def _announce(self, store: Store) -> None:
        if store.add(f"joined/{self.rank}", 1) > 1:
            raise UsageError(
                f"two processes joined {self.endpoint} as {self._label}: check --node-rank"
            )
        store.set(self._key(self.rank), str(self.world_size))

    def _wait_for_others(self, store: Store, deadline: float) -> None:
        for rank in range(self.world_size):
            while not store.check([self._key(rank)]):
                if monotonic() > deadline:
                    missing = [
                        each
                        for each in range(rank, self.world_size)
                        if not store.check([self._key(each)])
                    ]
                    raise RunError(
                        f"{self._label}: {format_ranks(missing, self.noun)} did not join "
                        f"{self.endpoint} within {self.timeout_seconds:g} s"
                    )
                sleep(POLL_SECONDS)
            expected = int(store.get(self._key(rank)))
            if expected != self.world_size:
                raise UsageError(
                    f"{self._label} expects {self.world_size} {self.noun}s at {self.endpoint}, but "
                    f"{self.noun} {rank} expects {expected}: start all with the same --nnodes and "
                    "--nproc-per-node"
                )

    def _key(self, rank: int) -> str:
        return f"world_size/{rank}"

    def _resolve(self) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
        try:
            found = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(
                f"cannot resolve {self.address} ({error.strerror}): check --master-addr"
            ) from None
        family, kind, protocol, name, target = found[0]
        return family, kind, protocol, name, (str(target[0]), int(target[1]))

    def _bind_error(self, error: OSError) -> UsageError:
        if error.errno == errno.EADDRINUSE and not self.port:
            return UsageError(
                f"no free port on {self.address} (net.ipv4.ip_local_port_range): stop programs"
                " that have many open connections"
            )
        if error.errno == errno.EADDRINUSE:
            return UsageError(
                f"port {self.port} on {self.address} is in use: choose another --master-port"
            )
        if error.errno == errno.EADDRNOTAVAIL:
            return UsageError(
                f"{self.address} is not an address of this machine, which is {self._label}: "
                "check --master-addr"
            )
        return UsageError(
            f"cannot listen on {self.endpoint} ({error.strerror}): check --master-port"
        )
