"""The rank of a process and its rendezvous address, as torchrun's environment variables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of a worker process in a run, and the rendezvous address of all workers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    master_addr: str
    master_port: int
    has_external_store: bool
    """Whether a process other than rank 0, such as a launcher, serves the rendezvous store."""
    restart_count: int = 0
    """Number of times the workers were restarted; an external store survives a restart."""

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that torchrun sets."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.has_external_store),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
        }


SINGLE_PROCESS = RankInfo(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nnodes=1,
    master_addr="127.0.0.1",
    master_port=0,
    has_external_store=False,
)
"""The only worker of a run."""
