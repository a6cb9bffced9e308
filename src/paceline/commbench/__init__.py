"""Communication benchmark: time and bandwidth of each collective by size, algorithm and backend.

`launch.measure` starts the workers and returns the record; `runner.run` measures as one worker.
record.py describes the record, docs/communication.md explains how to read it.
"""
