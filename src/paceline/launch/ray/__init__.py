"""Runs on a Ray cluster (`--launcher ray`): its machines are one more fleet (launch/machines.py)."""
