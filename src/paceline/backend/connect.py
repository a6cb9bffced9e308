"""The quickest connection between the members of a group, whichever hosts they are on."""

from __future__ import annotations

import os
import socket
import warnings
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch lists neither

from paceline.comm import arena, shared_memory
from paceline.comm.communicator import Communicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.errors import UsageError

LOOPBACK = "127.0.0.1"


def connect(
    store: Store, rank: int, world_size: int, address: str, nodes: list[int], timeout: timedelta
) -> Communicator:
    """Shared memory inside a host, gloo across hosts. Collective."""
    network = TorchCommunicator(
        PrefixStore("communicator", store),
        rank,
        world_size,
        address=address,
        timeout_seconds=timeout.total_seconds(),
    )
    if len(set(nodes)) > 1:
        return network
    try:
        memory = shared_memory.over(network)
    except UsageError as error:
        # All ranks get here together, so all of them stay with gloo.
        warnings.warn(f"paceline: gloo instead of shared memory: {error}", stacklevel=2)
        return network
    except BaseException:
        network.close()
        raise
    network.close()
    return memory


def nodes_of(store: Store, rank: int, world_size: int) -> list[int]:
    """By rank, the number of the host that it is on. Collective."""
    store.set(f"host/{rank}", _host())
    hosts = [store.get(f"host/{each}") for each in range(world_size)]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def _host() -> str:
    """What processes have in common that share memory and a network: a machine, or a container."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    memory = arena.FOLDER.stat().st_dev
    network = Path("/proc/self/ns/net").stat().st_ino
    return f"{machine} {memory} {network}"


def address_for(nodes: list[int]) -> str:
    """Where the others reach this process: loopback suffices inside a host.

    Across hosts, gloo's own rule: the interface that GLOO_SOCKET_IFNAME names, or what this host's
    name stands for.
    """
    if len(set(nodes)) == 1:
        return LOOPBACK
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for each in psutil.net_if_addrs().get(interface, []):
        if each.family == socket.AF_INET:
            return each.address
    return socket.gethostname()
