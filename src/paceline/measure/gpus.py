"""NVIDIA GPU metrics from the driver's management library (NVML), which needs no CUDA context.

NVML and its Python binding are optional: without them no GPUs are reported.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


class Gpus:
    """All GPUs of this machine; NVML ignores CUDA_VISIBLE_DEVICES."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[Any] = []
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            library.nvmlInit()
            self._library = library
            count = library.nvmlDeviceGetCount()
            self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except library.NVMLError:
            self._handles = []

    def sample(self) -> list[dict[str, Any]]:
        """Return the current metrics of each GPU; None for those that a GPU does not report."""
        samples = []
        for index, handle in enumerate(self._handles):
            utilization = self._query("nvmlDeviceGetUtilizationRates", handle)
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            power_milliwatts = self._query("nvmlDeviceGetPowerUsage", handle)
            samples.append(
                {
                    "gpu": index,
                    "utilisation_percent": None if utilization is None else utilization.gpu,
                    "memory_used_bytes": None if memory is None else memory.used,
                    "power_watts": None if power_milliwatts is None else power_milliwatts / 1000,
                }
            )
        return samples

    def describe(self) -> list[dict[str, Any]]:
        """Return name and memory of each GPU."""
        descriptions = []
        for handle in self._handles:
            name = self._query("nvmlDeviceGetName", handle)
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            descriptions.append(
                {
                    # Older bindings return bytes.
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "memory_bytes": None if memory is None else memory.total,
                }
            )
        return descriptions

    def close(self) -> None:
        if self._library is not None:
            self._query("nvmlShutdown")
        self._library, self._handles = None, []

    def _query(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError:
            return None


def describe_gpus() -> list[dict[str, Any]]:
    """Return name and memory of each GPU; without NVML, only the name as given by the driver."""
    gpus = Gpus()
    descriptions = gpus.describe()
    gpus.close()
    return descriptions or _describe_from_driver()


def _describe_from_driver() -> list[dict[str, Any]]:
    descriptions = []
    for file in sorted(DRIVER_FOLDER.glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                descriptions.append({"name": value.strip(), "memory_bytes": None})
    return descriptions
