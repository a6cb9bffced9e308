"""One copy of the weights per host, in shared memory.

All ranks of a host map one segment, which `SegmentLayout` (strategy.py) lays out as:

    weights               read by every rank, each shard updated by one rank
    gradients of rank 0   written by rank 0, read by the ranks that sum them
    gradients of rank 1
    ...
    linear factors        per factored layer, one block per rank (linear_factors.py)

Weights and gradients are aligned flat buffers, split into one shard per updating rank.

Two barriers per step keep access to the segment safe:

1. After all gradients are published, and before any rank sums its shard.
2. After all shards are updated, and before any rank reads the weights or overwrites gradients. A
   rank that updates all shards does not wait for the second barrier, since no other rank changes
   what it reads.

gradients.py has two implementations: gradients in place for small models, and published gradients
for all others.
"""
