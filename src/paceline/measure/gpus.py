"""NVIDIA GPUs through the driver's management library, which needs no CUDA context.

Both the library and its Python binding are optional: without them there are no GPUs to report.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


class Gpus:
    """The GPUs of this machine, all of them: the library does not heed CUDA_VISIBLE_DEVICES."""

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
        """Use of each GPU now; a figure that a GPU does not give is None."""
        samples = []
        for index, handle in enumerate(self._handles):
            utilisation = self._ask("nvmlDeviceGetUtilizationRates", handle)
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
            power_milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
            samples.append(
                {
                    "gpu": index,
                    "utilisation_percent": None if utilisation is None else utilisation.gpu,
                    "memory_used_bytes": None if memory is None else memory.used,
                    "power_watts": None if power_milliwatts is None else power_milliwatts / 1000,
                }
            )
        return samples

    def describe(self) -> list[dict[str, Any]]:
        """Name and memory of each GPU."""
        descriptions = []
        for handle in self._handles:
            name = self._ask("nvmlDeviceGetName", handle)
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
            descriptions.append(
                {
                    # Older bindings give bytes.
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "memory_bytes": None if memory is None else memory.total,
                }
            )
        return descriptions

    def close(self) -> None:
        if self._library is not None:
            self._ask("nvmlShutdown")
        self._library, self._handles = None, []

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError:
            return None


def describe_gpus() -> list[dict[str, Any]]:
    """Name and memory of each GPU; where only the driver can be asked, the name alone."""
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
