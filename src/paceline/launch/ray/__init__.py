"""Runs on a Ray cluster (`--launcher ray`), whose nodes are `Machines` (launch/machines.py)."""
