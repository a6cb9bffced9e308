"""What a result says of the emulated cluster that its run was in."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cluster.state import VARIABLE, load
from paceline.errors import ClusterError


def cluster_account(path: str | None = None) -> dict[str, Any] | None:
    """What was asked for, what was measured to be, and where the two differ.

    Of the cluster with this state file, or of the one that this process is in; None without one.
    """
    path = path or os.environ.get(VARIABLE)
    if path is None:
        return None
    try:
        state = load(Path(path))
    except ClusterError as error:
        return {
            "asked": None,
            "got": [],
            "busy_cores": None,
            "delayed_by": None,
            "warnings": [str(error)],
        }
    calibration = state.calibration
    return {
        "asked": asdict(state.spec),
        "got": [asdict(item) for item in calibration.measured] if calibration else [],
        "busy_cores": calibration.busy_cores if calibration else None,
        "delayed_by": state.delay,
        "warnings": [*state.notes, *(calibration.warnings() if calibration else [])],
    }
