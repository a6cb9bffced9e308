"""Parameter servers: processes that hold the weights and the optimizer for the workers.

    strategy.py     the `parameter_server` strategy, on the workers
    client.py       a worker's requests to all servers at once
    protocol.py     the messages between a worker and a server
    server.py       a server: weight shard, synchronous rounds, one thread per worker
    assignments.py  which worker computes which part of a batch; staleness
    connection.py   the data connection between a worker and a server
    heartbeat.py    detects lost peers

Each worker has one connection to each server. Server 0 also assigns work to asynchronous workers.
launch/parameter_servers.py starts the server processes and connects them.
"""
