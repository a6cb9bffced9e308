"""Measured step times, kept between runs.

Formats that are about equally fast can change places from one measurement to the next, and a run
would then differ from an earlier run of the same configuration. A machine therefore measures a
training step once. Deleting the file makes the next run measure again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.measure.machine import installed_version
from paceline.records import write_json
from paceline.training.gpu.precision import Format, Measure, Measurement, microbatch_samples


def default_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline" / "step-times.json"


def describe_step(
    config: RunConfig, model: nn.Module, device: torch.device, samples: int, *, captured: bool
) -> str:
    """Return a text that differs where step times may differ; `samples` is the dataset's size."""
    shapes = [(name, list(weight.shape)) for name, weight in model.named_parameters()]
    described = {
        "paceline": installed_version("paceline"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "model": config.model,
        "options": dict(config.model_options),
        "weights": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "data": config.data,
        "samples": microbatch_samples(config, samples),
        "captured": captured,
    }
    return json.dumps(described, sort_keys=True, default=str)


def remembered(measure: Measure, step: str, path: Path | None = None) -> Measure:
    """Return `measure` with a memory: a step that was measured before is not measured again."""
    file = path or default_path()

    def recall_or_measure(formats: Sequence[Format]) -> Measurement:
        key = f"{step} {', '.join(map(str, formats))}"
        known = _read(file).get(key)
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            return _recalled(known, formats)
        measured = measure(formats)
        if measured.step_seconds:
            entry = {
                "method": measured.method,
                "step_seconds": {str(one): each for one, each in measured.step_seconds.items()},
                "failures": {str(one): cause for one, cause in measured.failures.items()},
            }
            # Without a writable folder, every run measures.
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {**_read(file), key: entry})
        return measured

    return recall_or_measure


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _recalled(entry: Any, formats: Sequence[Format]) -> Measurement:
    names = {str(one): one for one in formats}
    times = {names[name]: float(spent) for name, spent in entry["step_seconds"].items()}
    if not times or min(times.values()) <= 0:
        raise ValueError(entry)
    # In the order of the candidates, which decides between equally fast formats.
    return Measurement(
        {one: times[one] for one in formats if one in times},
        str(entry["method"]),
        {names[name]: str(cause) for name, cause in entry["failures"].items()},
        is_from_earlier_run=True,
    )
