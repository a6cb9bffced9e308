"""Where processes come from, and how they end."""

from __future__ import annotations

import os
import sys

# torch asks only once, when it is loaded; what it says of lost peers would bury the first cause.
if "torch" not in sys.modules:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
