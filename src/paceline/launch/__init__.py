"""Launchers: how the processes of a run start, and how they end."""

from __future__ import annotations

import os
import sys

# torch reads it once, when it loads. Its messages about lost peers would hide the root cause.
if "torch" not in sys.modules:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
