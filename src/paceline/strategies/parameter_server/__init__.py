"""Parameter servers: processes that hold the weights and the optimizer while others train.

`pair.py` connects the two sides, `heartbeat.py` notices a peer that is lost, `link.py` is what both
sides speak, `shard.py` what a server holds, `dealer.py` who computes what,
`serving.py` a server, and `client.py` a worker's view of all of them.
"""
