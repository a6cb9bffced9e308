"""All-reduce algorithms, one a file, each with its formulas beside it.

Read them in this order: algorithm.py (the contract), root.py, tree.py, chunks.py, ring.py,
halving_doubling.py, library.py.
"""
