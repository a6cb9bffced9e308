"""Communication between the ranks of one node through shared memory.

Read the modules in this order:

- `segment`: one mapping of /dev/shm that all ranks share. It has no name once all ranks have
  mapped it, so nothing remains however they exit.
- `futex`: how a rank waits for a change in the segment (spin, then sleep on a futex) and detects
  peers that have exited (pidfd).
- `channels`: point-to-point messages. Each ordered pair of ranks has two slots and two counters.
- `collectives`: copy-in, reduce and copy-out through slots that all ranks read, with counters that
  only their own rank writes. `SymmetricMemory` allocates tensors that are reduced in place.
- `communicator`: `SharedMemoryCommunicator`, which lays out the segment and progresses all
  operations of a rank during its calls. There is no progress thread.

A segment holds, on separate cache lines: the signals, then the counters and slots of collectives,
then those of channels. Every integer has a single writer, and x86 preserves the order of writes, so
data that is written before its counter is visible to every rank that reads the counter. A fence is
needed only where a rank must write before it reads. A rank that finds a counter unchanged waits on
its futex until the rank that changes the counter notifies it.
"""
