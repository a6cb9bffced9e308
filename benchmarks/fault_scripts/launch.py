"""Starts two ranks of a script, like torchrun, but without importing torch itself.

launch.py SCRIPT ARGUMENTS...
"""

import os
import socket
import subprocess
import sys

RANKS = 2


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": f"{RANKS}",
        "LOCAL_WORLD_SIZE": f"{RANKS}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]],
            env={**os.environ, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank in range(RANKS)
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
