"""An emulated cluster: network namespaces on shaped links, each with a share of the CPU."""
