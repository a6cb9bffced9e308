"""Communication between ranks; docs/communication.md is an introduction.

Modules in reading order:

- `communicator`: the `Communicator` contract, with default collectives over send and recv, and the
  formulas that count traffic
- `work`: handles of operations in progress
- `algorithms`: all-reduce algorithms over send and recv
- `in_process`: ranks as threads of one process
- `process_groups`, `torch_distributed`: gloo and NCCL process groups, and the communicator over
  them
- `shm`: the ranks of one node over shared memory
- `hierarchical`: several nodes: shared memory within a node, torch.distributed across nodes
- `background`: a thread that runs blocking collectives
- `buffers`: chunk bounds, contiguous staging copies
- `objects`: JSON, bytes and scalars between ranks
- `rank_info`, `rendezvous`: which rank a process is, and how ranks find each other
- `cost`: the alpha-beta cost model
"""
