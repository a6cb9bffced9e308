"""Parameter servers: processes that hold the weights and the optimizer for the workers.

    strategy.py     the `parameter_server` strategy, on the workers
    client.py       a worker's requests to all servers at once
    protocol.py     the messages between a worker and a server
    memory.py       a worker's gradients and weights, which servers on its node share
    server.py       a server: weight shard, and the thread that handles all requests
    assignments.py  which worker computes which part of a batch; staleness
    heartbeat.py    detects lost peers

Each worker has a connection (comm/connection.py) to each server. Server 0 also assigns work to
asynchronous workers. launch/parameter_servers.py starts the server processes and connects them.
"""
