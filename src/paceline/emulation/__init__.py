"""Emulated clusters on one machine: network namespaces with shaped links and CPU quotas."""
