"""Communication between the ranks of one node through shared memory.

Read the modules in this order:

- `segment`: a file in /dev/shm that all ranks map. It is unlinked once all ranks have mapped it, so
  nothing is left behind, no matter how they exit.
- `futex`: waits for a change in the segment (spin, then sleep on a futex) and detects peers that
  have exited (pidfd).
- `channels`: point-to-point messages. Each ordered pair of ranks has two slots and two counters.
- `collectives`: copy-in, reduce and copy-out through slots that all ranks read. Each rank writes
  only its own counters. `SymmetricMemory` allocates tensors that are reduced in place.
- `communicator`: `SharedMemoryCommunicator`, which lays out the segment. Every call makes progress
  on all pending operations of the rank. There is no progress thread.

A segment holds, on separate cache lines: the signals, then the counters and slots of collectives,
then those of channels. Every counter has a single writer, and x86 preserves the order of writes, so
data that is written before its counter is visible to every rank that reads the counter. A fence is
needed only where a rank's write must be visible before its next read. A rank that finds a counter
unchanged waits on its futex until the rank that changes the counter notifies it.
"""
