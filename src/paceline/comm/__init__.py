"""Communication between ranks. See docs/communication.md for an introduction.

Modules in reading order:

- `communicator`: the `Communicator` contract, default collectives built on send and recv, and the
  traffic formulas
- `work`: handles for operations in progress
- `algorithms`: all-reduce algorithms over send and recv
- `in_process`: ranks as threads of one process
- `process_groups`, `torch_distributed`: gloo and NCCL process groups, and the communicator over
  them
- `shm`: the communicator for the ranks of one node, over shared memory
- `hierarchical`: the multi-node communicator, with shared memory within a node and
  torch.distributed across nodes
- `connection`: messages between two processes over a socket, for parameter servers
- `background`: a thread that runs blocking collectives
- `buffers`: chunk bounds, contiguous staging copies
- `objects`: collectives for JSON values, bytes and scalars
- `rank_info`, `rendezvous`: the rank of a process, and how ranks find each other
- `cost`: the alpha-beta cost model
"""
