"""State files: what was made for each cluster, so that it can be found, used and removed.

What a cluster was asked to be against what it was measured to be.

What a result says of the emulated cluster that its run was in."""

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
"""In the environment of everything inside a cluster: the path of its state file."""


@dataclass(slots=True)
class ClusterState:
    path: Path
    spec: ClusterSpec
    addresses: list[str] = field(default_factory=list)
    owner: ProcessId | None = None
    """Whose end ends the cluster; None: it stays until `down`."""
    switch: Namespace | None = None
    nodes: list[Namespace] = field(default_factory=list)
    groups: dict[int, Path] = field(default_factory=dict)
    """CPU groups by node, from before they are made."""
    offering: Path | None = None
    """The group that offers its children the CPU controller for the sake of clusters only."""
    cores: dict[int, list[int]] = field(default_factory=dict)
    """Cores that a node is held to."""
    delay: str = "none"
    """What makes the latency: none, netem or forwarder."""
    forwarder: ProcessId | None = None
    """The process that makes the latency, where one of ours does."""
    notes: list[str] = field(default_factory=list)
    """What is not as asked, a line each."""
    calibration: Calibration | None = None
    boot: str = field(default_factory=boot_id)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def group_name(self) -> str:
        """How the names of its CPU groups begin; two users may have clusters of one name."""
        digest = hashlib.sha256(str(self.path).encode()).hexdigest()[:8]
        return f"paceline-{self.name}-{digest}"

    def name_of(self, node: int) -> str:
        """What users know a node by."""
        return f"node {node} of cluster {self.name}"

    def is_whole(self) -> bool:
        """Whether all that was made is still there."""
        forwards = self.forwarder is None or self.forwarder.is_alive()
        return forwards and all(namespace.is_held() for namespace in self.namespaces())

    def namespaces(self) -> list[Namespace]:
        return self.nodes if self.switch is None else [*self.nodes, self.switch]

    def environment(self) -> dict[str, str]:
        return {**os.environ, VARIABLE: str(self.path)}

    def create(self) -> None:
        """Write the file, whole or not at all; ClusterError where there is one of this name."""
        written = self._write()
        try:
            self.path.hardlink_to(written)
        except FileExistsError:
            raise ClusterError(
                f"a cluster named {self.name} is up already: take it down with "
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
    """The state that a file tells; ClusterError where there is none or it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(path, values)
    except FileNotFoundError:
        raise ClusterError(f"no cluster named {path.stem}{_offer(path.parent)}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(
            f"cannot read the cluster's state in {path} ({type(error).__name__}): remove that file"
        ) from None


def path_of(name: str) -> Path:
    return state_folder() / f"{name}.json"


def all_paths() -> Iterator[Path]:
    return iter(sorted(state_folder().glob("[!.]*.json")))


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Inside, no other command of this user chooses what clusters are not to have in common.

    What was chosen is to be saved inside, so that the next one sees it.
    """
    with (state_folder() / ".lock").open("a") as lock:
        # Not every file system of a shared home has locks.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def state_folder() -> Path:
    """Where this user's state files are; made where it is missing."""
    problem = ""
    for folder in _folders():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            # Not where a link leads that another user may have put there.
            if any(path.lstat().st_uid != os.geteuid() for path in (folder.parent, folder)):
                raise PermissionError(13, "belongs to another user")
        except OSError as error:
            problem = f"cannot use {folder} for state files: {error.strerror}"
        else:
            return folder
    raise ClusterError(problem)


def _folders() -> Iterator[Path]:
    """The first that can be made is used.

    For ordinary users it outlives their sessions, as clusters do that stay until `down`;
    $XDG_RUNTIME_DIR would not, since it goes at logout.
    """
    if os.geteuid() == 0:
        yield Path("/run/paceline/clusters")
        return
    with contextlib.suppress(RuntimeError):  # users without a home
        states = Path(os.environ.get("XDG_STATE_HOME", ""))
        if not states.is_absolute():
            states = Path("~/.local/state").expanduser()
        # Several machines may share a home, and each knows only its own processes.
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
    """JSON knows only text as keys."""
    return {int(key): value for key, value in values.items()}


def _offer(folder: Path) -> str:
    names = [path.stem for path in sorted(folder.glob("[!.]*.json"))]
    return f"; there is {', '.join(names)}" if names else ": make one with `paceline cluster up`"


PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
TOLERANCE = 0.1
"""How far what was got may be from what was asked before it is told."""


@dataclass(frozen=True, slots=True)
class Measured:
    what: str
    """bandwidth out, bandwidth in, round trip or cpus."""
    node: int | None
    """None: of all nodes alike."""
    asked: float | None
    """None: nothing was asked for."""
    got: float
    unit: str

    @property
    def deviation(self) -> float:
        """As a part of what was asked."""
        return 0.0 if not self.asked else self.got / self.asked - 1

    @property
    def is_off(self) -> bool:
        return abs(self.deviation) > TOLERANCE


@dataclass(frozen=True, slots=True)
class Calibration:
    measured: list[Measured] = field(default_factory=list)
    busy_cores: float = 0.0
    """Cores that other programs kept busy just before; much of it makes the figures doubtful."""

    def warnings(self) -> list[str]:
        """A line for each thing that is over 10 % from what was asked."""
        return [
            f"the emulated cluster's {item.what}{_of(item.node)} is {amount(item.got, item.unit)},"
            f" {100 * item.deviation:+.0f} % from the {amount(item.asked, item.unit)} asked for"
            for item in self.measured
            if item.asked is not None and item.is_off
        ]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Calibration:
        return cls([Measured(**item) for item in values["measured"]], values["busy_cores"])


def _of(node: int | None) -> str:
    return "" if node is None else f" (node {node})"


def amount(value: float, unit: str) -> str:
    """A figure with its unit; of a rate with a prefix, as it was asked for."""
    if unit != "bit/s":
        return f"{value:.3g} {unit}"
    scale, prefix = next((pair for pair in PREFIXES if value >= pair[0]), PREFIXES[-1])
    return f"{value / scale:.4g} {prefix}bit/s"


def cluster_record(path: str | None = None) -> dict[str, Any] | None:
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
