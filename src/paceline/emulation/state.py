"""The state of a cluster: its file, its calibration, and the record that results carry."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.cluster_spec import ClusterSpec
from paceline.emulation.namespaces import Namespace
from paceline.emulation.processes import ProcessId, boot_id, process_space
from paceline.errors import ClusterError

SCHEMA = 1
VARIABLE = "PACELINE_CLUSTER"
"""Path of the state file, in the environment of every process inside a cluster."""


PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
TOLERANCE = 0.1
"""Relative deviation from the request that causes a warning."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of a cluster. Field names are keys of records."""

    what: str
    """bandwidth out, bandwidth in, round trip or cpus."""
    node: int | None
    """None: the same for all nodes."""
    asked: float | None
    """None: no limit was requested."""
    got: float
    unit: str

    @property
    def deviation(self) -> float:
        """Relative to the request."""
        return 0.0 if not self.asked else self.got / self.asked - 1

    @property
    def is_off(self) -> bool:
        return abs(self.deviation) > TOLERANCE


@dataclass(frozen=True, slots=True)
class Calibration:
    measured: list[Measured] = field(default_factory=list)
    busy_cores: float = 0.0
    """Cores used by other programs just before; high values make the measurements unreliable."""

    def warnings(self) -> list[str]:
        """One line for each measurement that deviates from the request by over 10%."""
        return [
            f"emulated cluster: {item.what}{_of(item.node)} measured at"
            f" {amount(item.got, item.unit)}, {100 * item.deviation:+.0f}% from the requested"
            f" {amount(item.asked, item.unit)}"
            for item in self.measured
            if item.asked is not None and item.is_off
        ]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Calibration:
        return cls([Measured(**item) for item in values["measured"]], values["busy_cores"])


def _of(node: int | None) -> str:
    return "" if node is None else f" (node {node})"


def amount(value: float, unit: str) -> str:
    """A number with its unit; rates have a decimal prefix."""
    if unit != "bit/s":
        return f"{value:.3g} {unit}"
    scale, prefix = next((pair for pair in PREFIXES if value >= pair[0]), PREFIXES[-1])
    return f"{value / scale:.4g} {prefix}bit/s"


@dataclass(slots=True)
class ClusterState:
    """Everything that was created for a cluster, so that it can be found, used and removed."""

    path: Path
    spec: ClusterSpec
    addresses: list[str] = field(default_factory=list)
    owner: ProcessId | None = None
    """The process whose end ends the cluster; None: it stays up until `down`."""
    switch: Namespace | None = None
    nodes: list[Namespace] = field(default_factory=list)
    groups: dict[int, Path] = field(default_factory=dict)
    """CPU groups by node, recorded before they are created."""
    offering: Path | None = None
    """The group whose CPU controller was enabled for clusters, to be disabled at the end."""
    cores: dict[int, list[int]] = field(default_factory=dict)
    """Cores that a node is pinned to."""
    delay: str = "none"
    """Mechanism of the latency: none, netem or forwarder."""
    forwarder: ProcessId | None = None
    """The process that delays frames, if there is one."""
    notes: list[str] = field(default_factory=list)
    """Deviations from the spec, one line each."""
    calibration: Calibration | None = None
    boot: str = field(default_factory=boot_id)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def group_name(self) -> str:
        """Prefix of its CPU groups' names, unique even if two users choose the same name."""
        digest = hashlib.sha256(str(self.path).encode()).hexdigest()[:8]
        return f"paceline-{self.name}-{digest}"

    def name_of(self, node: int) -> str:
        """The node in messages to users."""
        return f"node {node} of cluster {self.name}"

    def is_whole(self) -> bool:
        """Whether all namespaces and the forwarder still exist."""
        has_forwarder = self.forwarder is None or self.forwarder.is_alive()
        return has_forwarder and all(namespace.is_held() for namespace in self.namespaces())

    def namespaces(self) -> list[Namespace]:
        return self.nodes if self.switch is None else [*self.nodes, self.switch]

    def environment(self) -> dict[str, str]:
        return {**os.environ, VARIABLE: str(self.path)}

    def create(self) -> None:
        """Write the file atomically; ClusterError if a cluster of this name exists."""
        written = self._write()
        try:
            self.path.hardlink_to(written)
        except FileExistsError:
            raise ClusterError(
                f"a cluster named {self.name} is already up: remove it with "
                f"`paceline cluster down {self.name}`, or choose another --name"
            ) from None
        finally:
            written.unlink()

    def save(self) -> None:
        self._write().replace(self.path)

    def _write(self) -> Path:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=self.path.parent, prefix=".", delete=False
        ) as file:
            file.write(self._json())
        return Path(file.name)

    def _json(self) -> str:
        values = {**asdict(self), "schema": SCHEMA, "name": self.name}
        return json.dumps(values, indent=1, default=str) + "\n"


def load(path: Path) -> ClusterState:
    """Read a state file; ClusterError if it is missing or unreadable."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(path, values)
    except FileNotFoundError:
        raise ClusterError(f"no cluster named {path.stem}{_suggestion(path.parent)}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(
            f"cannot read the cluster state {path} ({type(error).__name__}): remove the file"
        ) from None


def path_of(name: str) -> Path:
    return state_folder() / f"{name}.json"


def all_paths() -> Iterator[Path]:
    return iter(sorted(state_folder().glob("[!.]*.json")))


@contextlib.contextmanager
def allocation_lock() -> Iterator[None]:
    """Lock for choosing resources that clusters of this user must not share.

    Save the choice before releasing the lock, so that the next command sees it.
    """
    with (state_folder() / ".lock").open("a") as lock:
        # Some network file systems have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def state_folder() -> Path:
    """The folder of this user's state files, created if missing."""
    problem = ""
    for folder in _folders():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            # Reject a folder or link that another user may have created.
            if any(path.lstat().st_uid != os.geteuid() for path in (folder.parent, folder)):
                raise PermissionError(13, "belongs to another user")
        except OSError as error:
            problem = f"cannot use {folder} for state files: {error.strerror}"
        else:
            return folder
    raise ClusterError(problem)


def _folders() -> Iterator[Path]:
    """Candidates; the first that can be created is used.

    They outlive a user's session, like clusters that stay up until `down`; $XDG_RUNTIME_DIR is
    removed at logout.
    """
    if os.geteuid() == 0:
        yield Path("/run/paceline/clusters")
        return
    with contextlib.suppress(RuntimeError):  # no home folder
        states = Path(os.environ.get("XDG_STATE_HOME", ""))
        if not states.is_absolute():
            states = Path("~/.local/state").expanduser()
        # Machines may share a home folder, and pids are only valid on one of them.
        yield states / "paceline" / "clusters" / process_space()
    yield Path(tempfile.gettempdir()) / f"paceline-{os.geteuid()}" / "clusters"


def _from_json(path: Path, values: dict[str, Any]) -> ClusterState:
    if values["schema"] != SCHEMA:
        raise ValueError("schema")
    spec, calibration = values["spec"], values["calibration"]
    return ClusterState(
        path=path,
        spec=ClusterSpec(
            **{
                **spec,
                "bandwidth_of": _by_number(spec["bandwidth_of"]),
                "slow": _by_number(spec["slow"]),
            }
        ),
        addresses=values["addresses"],
        owner=None if values["owner"] is None else ProcessId(*values["owner"]),
        switch=None if values["switch"] is None else _namespace(values["switch"]),
        nodes=[_namespace(node) for node in values["nodes"]],
        groups={node: Path(group) for node, group in _by_number(values["groups"]).items()},
        offering=Path(values["offering"]) if values.get("offering") else None,
        cores=_by_number(values["cores"]),
        delay=values["delay"],
        forwarder=None if values["forwarder"] is None else ProcessId(*values["forwarder"]),
        notes=values["notes"],
        calibration=None if calibration is None else Calibration.from_json(calibration),
        boot=values["boot"],
    )


def _namespace(values: dict[str, Any]) -> Namespace:
    return Namespace(ProcessId(*values["holder"]), values["number"], values["is_of_user"])


def _by_number(values: dict[str, Any]) -> dict[int, Any]:
    """JSON keys are strings."""
    return {int(key): value for key, value in values.items()}


def _suggestion(folder: Path) -> str:
    names = [path.stem for path in sorted(folder.glob("[!.]*.json"))]
    return (
        f"; available: {', '.join(names)}" if names else ": create one with `paceline cluster up`"
    )


def cluster_record(path: str | None = None) -> dict[str, Any] | None:
    """What was requested and measured of a cluster, with warnings where the two differ.

    The cluster is that of the state file, or the one that this process is in; None without one.
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
