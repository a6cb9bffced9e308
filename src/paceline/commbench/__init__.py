"""How fast workers exchange tensors here: each operation by size, algorithm and communicator.

`run.py` measures as one of the workers; `here.py` starts this machine's workers and `command.py`
those of all machines. What comes out is the record that results.py describes. docs/communication.md
tells how to read it.
"""
