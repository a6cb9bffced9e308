"""Machine description: container limits are found, and nothing private is included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

from paceline.measure import gpus, machine
from paceline.measure.gpus import Gpus


class FakeSystem:
    """Fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.cgroups.mkdir()

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def limit(self, path: str, text: str) -> None:
        file = self.cgroups / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def cpu_quota(self) -> float | None:
        return machine.cpu_quota(self.proc, self.cgroups)

    def memory(self) -> int:
        return machine.memory_usable_bytes(self.proc, self.cgroups)


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


def test_quota_of_a_cgroup_v2(system: FakeSystem) -> None:
    system.belongs_to("0::/job")
    system.limit("job/cpu.max", "150000 100000")
    assert system.cpu_quota() == 1.5


def test_lowest_quota_of_nested_cgroups_applies(system: FakeSystem) -> None:
    system.belongs_to("0::/outer/inner")
    system.limit("outer/inner/cpu.max", "400000 100000")
    system.limit("outer/cpu.max", "200000 100000")
    assert system.cpu_quota() == 2.0


def test_quota_of_a_cgroup_v1(system: FakeSystem) -> None:
    system.belongs_to("5:cpu,cpuacct:/job", "2:memory:/")
    system.limit("cpu,cpuacct/job/cpu.cfs_quota_us", "50000")
    system.limit("cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    assert system.cpu_quota() == 0.5


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/", "cpu.max", "max 100000"),
        ("3:cpu:/", "cpu/cpu.cfs_quota_us", "-1"),
        ("0::/", "cpu.max", ""),
    ],
)
def test_no_quota_if_none_is_set(system: FakeSystem, line: str, file: str, text: str) -> None:
    system.belongs_to(line)
    system.limit(file, text)
    system.limit("cpu/cpu.cfs_period_us", "100000")
    assert system.cpu_quota() is None


def test_quota_is_found_inside_a_container_with_a_host_path(system: FakeSystem) -> None:
    system.belongs_to("0::/host/path/not/mounted/here")
    system.limit("cpu.max", "300000 100000")
    assert system.cpu_quota() == 3.0


def test_no_quota_without_cgroups(system: FakeSystem) -> None:
    assert system.cpu_quota() is None


def test_cores_are_bounded_by_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    assert machine.cores_usable() == 1


def test_cores_are_bounded_by_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.cores_usable() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_memory_is_bounded_by_the_cgroup(system: FakeSystem) -> None:
    system.belongs_to("0::/job", "4:memory:/other")
    system.limit("job/memory.max", str(64 << 20))
    system.limit("memory/other/memory.limit_in_bytes", str(32 << 20))
    assert system.memory() == 32 << 20


def test_memory_is_that_of_the_machine_without_a_cgroup_limit(system: FakeSystem) -> None:
    system.belongs_to("0::/job", "4:memory:/")
    system.limit("job/memory.max", "max")
    system.limit("memory/memory.limit_in_bytes", "9223372036854771712")
    assert system.memory() == psutil.virtual_memory().total


def test_hardware_is_json_without_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(machine.hardware())
    assert os.uname().nodename not in json.loads(text).values()


def test_machine_module_does_not_import_torch() -> None:
    program = (
        "import sys; from paceline.measure.machine import hardware, software;"
        "hardware(); software(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_versions_match_the_modules() -> None:
    import numpy
    import torch

    software = machine.software()
    assert software["numpy"] == numpy.__version__
    # The local version label, such as +cpu, is not always in the package metadata.
    assert str(software["torch"]).partition("+")[0] == torch.__version__.partition("+")[0]
    assert software["python"] == sys.version.split()[0]


def test_missing_package_has_no_version() -> None:
    assert machine.installed_version("no-such-package-anywhere") is None


def test_no_gpus_without_nvml_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().sample() == []


class FakeNvmlError(Exception):
    pass


def fake_nvml() -> types.ModuleType:
    """A fake NVML with one GPU that does not report power."""
    library = types.ModuleType("pynvml")

    def no_power(handle: object) -> int:
        raise FakeNvmlError

    functions = {
        "NVMLError": FakeNvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetName": lambda handle: b"A GPU",
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=75),
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=2, total=3),
        "nvmlDeviceGetPowerUsage": no_power,
    }
    for name, function in functions.items():
        setattr(library, name, function)
    return library


def test_unreported_gpu_metric_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert Gpus().sample() == [
        {"gpu": 0, "utilisation_percent": 75, "memory_used_bytes": 2, "power_watts": None}
    ]


def test_power_is_in_watts(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fake_nvml()
    monkeypatch.setattr(library, "nvmlDeviceGetPowerUsage", lambda handle: 250_000)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert Gpus().sample()[0]["power_watts"] == 250


def test_no_gpus_if_the_driver_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fake_nvml()

    def no_driver() -> None:
        raise FakeNvmlError

    monkeypatch.setattr(library, "nvmlInit", no_driver)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert Gpus().sample() == []


def test_without_nvml_binding_gpus_are_described_by_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "DRIVER_FOLDER", tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t A GPU\nIRQ: 7\n")
    assert gpus.describe_gpus() == [{"name": "A GPU", "memory_bytes": None}]
