"""The quickest connection between the members of a group, whichever hosts they are on."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch lists neither

from paceline.comm import arena, hierarchical
from paceline.comm.communicator import Communicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.errors import UsageError
from paceline.measure.machine import cores_usable

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Seat:
    """What the others need to know of where a member is."""

    host: str
    """What processes have in common that share memory and a network: machine, or container."""
    cores: int

    @classmethod
    def own(cls) -> Seat:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        memory = arena.FOLDER.stat().st_dev
        network = Path("/proc/self/ns/net").stat().st_ino
        return cls(f"{machine} {memory} {network}", cores_usable())


def exchange_seats(store: Store, rank: int, world_size: int) -> list[Seat]:
    """Those of all ranks. Collective."""
    store.set(f"seat/{rank}", json.dumps(asdict(Seat.own())))
    return [Seat(**json.loads(store.get(f"seat/{each}"))) for each in range(world_size)]


def connect(
    store: Store, rank: int, seats: Sequence[Seat], address: str, timeout: timedelta
) -> Communicator:
    """Shared memory inside a host, gloo across hosts. Collective."""
    network = TorchCommunicator(
        PrefixStore("communicator", store),
        rank,
        len(seats),
        address=address,
        timeout_seconds=timeout.total_seconds(),
    )
    if len(seats) == 1:
        return network
    hosts = list(dict.fromkeys(seat.host for seat in seats))
    quicker: Communicator | None = None
    try:
        quicker = hierarchical.over(network, hosts.index(seats[rank].host))
    except UsageError as error:
        cause = str(error).removesuffix(arena.OTHERWISE).removesuffix(" or ").rstrip(" ,:")
        warnings.warn(f"paceline: gloo instead of shared memory: {cause}", stacklevel=2)
    except BaseException:
        network.close()
        raise
    failures = torch.tensor([int(quicker is None)])
    network.all_reduce(failures, "control").wait()
    if quicker is None or failures:
        if quicker is not None:
            quicker.close()
        return network
    network.close()
    return quicker


def address_for(seats: Sequence[Seat]) -> str:
    """Where the others reach this process: loopback suffices inside a host.

    Across hosts, gloo's own rule: the interface that GLOO_SOCKET_IFNAME names, or what this host's
    name stands for.
    """
    if are_on_one_host(seats):
        return LOOPBACK
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for each in psutil.net_if_addrs().get(interface, []):
        if each.family == socket.AF_INET:
            return each.address
    return socket.gethostname()


def are_on_one_host(seats: Sequence[Seat]) -> bool:
    return len({seat.host for seat in seats}) == 1


def have_spare_cores(seats: Sequence[Seat]) -> bool:
    """Whether cores of the one host would idle while all members exchange something in a call."""
    return min(seat.cores for seat in seats) > len(seats)
