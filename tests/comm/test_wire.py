"""Counted bytes against those of the kernel, including library collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.root
@pytest.mark.iproute
def test_counted_bytes_match_the_bytes_of_the_kernel() -> None:
    probe = f"ip link set lo up && exec {sys.executable} {FOLDER / 'wire_probe.py'}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", probe],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    for name, account in json.loads(done.stdout).items():
        # Framing, acknowledgements and the barrier add a little, more if a busy machine sends small
        # packets. A transfer that is counted incorrectly is off by at least 10%.
        assert 1.0 <= account["seen"] / account["counted"] <= 1.05, (name, account)
