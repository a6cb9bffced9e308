"""Runs on a Ray cluster (`--launcher ray`), as machines of launch/remote/."""
