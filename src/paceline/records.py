"""The run folder `runs/<id>/`: workers write it, analysis and reports read it.

    config.json              kind and settings of the run, written before workers start
    events-<rank>.jsonl      appended during the run; readable after a crash
    resources-<node>.jsonl   samples of CPU, memory, network, disk and GPU
    result.json              the result of the run, written at its end
    trace-<rank>.json        phases and transfers of some iterations, with --trace
    trace.json               those of all ranks on one clock
    output-<rank>.txt        standard output and error of a worker, if any
    traceback.txt            of an unexpected exception
    .lock                    held by the process that runs it
    tensorboard/ checkpoints/

Files are replaced atomically and JSON lines are appended, so a reader sees the old or the new
state. Events are objects with an "event" key:

    start       the run started or resumed: iteration, resumed, workers
    iterations  a block: first (iteration), seconds [...], loss [...], learning_rate,
                phases (seconds in each so far, in this process); asynchronous also
                batch, part, ahead and behind [...]: docs/metrics.md
    gradient_noise  of rank 0, norms of gradients in some iterations: iteration [...], small_batch,
                batch, small_square and square [...]: docs/metrics.md
    evaluation  one entry of the result's history, with rank, wall_seconds, samples_per_second
    checkpoint  iteration, blocked_seconds
    warning     text
    end         status, cause
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shutil
import stat
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from paceline import formatting
from paceline.config import Kind, RunConfig, RunSettings
from paceline.errors import (
    ConfigError,
    DamagedRecordError,
    MissingRecordError,
    NewerSchemaError,
    RecordsError,
    RunError,
)
from paceline.folder_lock import LOCK_FILE, locked

SCHEMA = 1

PHASES = (
    "input",
    "forward",
    "backward",
    "exchange",
    "wait",
    "update",
    "evaluate",
    "checkpoint",
    "other",
)
"""The breakdown of a worker's wall time; docs/metrics.md defines each phase."""

BETWEEN_ITERATIONS = ("evaluate", "checkpoint", "other")
"""Phases outside iterations."""

TRAFFIC_KINDS = ("gradients", "parameters", "buffers", "metrics", "control")
MEMORY_KEYS = ("setup_bytes", "forward_bytes", "backward_bytes", "update_bytes", "peak_bytes")
"""Of a worker: memory after its setup, after each part of a step, and at the peak."""

NOISE_SCALE_KEYS = (
    "every",
    "value",
    "low",
    "high",
    "variance",
    "gradient_square",
    "batch",
    "small_batch",
    "measurements",
)
"""Of rank 0: the gradient noise scale at the end, its interval, and what it is based on."""

RESULT_KEYS = (
    "id",
    "status",
    "cause",
    "config",
    "software",
    "hardware",
    "wall_seconds",
    "iterations",
    "samples",
    "weights_sha256",
    "final",
    "seconds_to_target",
    "history",
    "workers",
    "nodes",
    "checkpoints",
    "measurement_overhead",
)
"""Keys of every result, besides the schema number."""

LAUNCHER_FILES = ("launch-", "failure-")
"""Prefixes of files that pass between a launcher and its own processes."""

TRANSIENT = (*LAUNCHER_FILES, "report-")
"""Prefixes of JSON files that matter only while a run lasts."""

KIND_NAMES: dict[Kind, str] = {
    "train": "`paceline train`",
    "join": "a loop with paceline.join",
    "profile": "`paceline profile`",
}
"""Who writes runs of each kind."""

LOCATION_FIELDS = ("out", "name")
"""Fields of a configuration that locate the run folder."""

NUMBER_MAX = 1e60
"""No loss in single precision gets there; below it, sums of squares are finite."""
INTEGER_MAX = 2**63 - 1

Result = dict[str, Any]
"""The contents of result.json; docs/metrics.md describes its keys."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def events_file(self, rank: int) -> Path:
        return self.path / f"events-{rank}.jsonl"

    def report_file(self, rank: int) -> Path:
        """Report of a worker at its end, until it is part of the result."""
        return self.path / f"report-{rank}.json"

    def trace_file(self, rank: int) -> Path:
        return self.path / f"trace-{rank}.json"

    @property
    def merged_trace_file(self) -> Path:
        return self.path / "trace.json"

    def resources_file(self, node: int) -> Path:
        return self.path / f"resources-{node}.jsonl"

    def launch_file(self, name: int | str) -> Path:
        """The configuration that a node's launcher passes to its processes."""
        return self.path / f"launch-{name}.json"

    def failure_file(self, rank: int) -> Path:
        """Why a process ended before it could train, for its launcher."""
        return self.path / f"failure-{rank}.json"

    def output_file(self, process: int | str) -> Path:
        """Standard output and error of a rank or of another process; kept unless it is empty."""
        return self.path / f"output-{process}.txt"

    def record_files(self, ranks: Iterable[int], nodes: Iterable[int]) -> list[Path]:
        """The files that workers of these ranks, on these nodes, leave for node 0."""
        files = [self.resources_file(node) for node in nodes]
        for rank in ranks:
            files += [self.events_file(rank), self.report_file(rank), self.trace_file(rank)]
        return files

    def remove_transient(self, files: Iterable[Path] | None = None) -> None:
        """Remove files that matter only while the run lasts, and output files that are empty.

        `files` limits it to these, because other nodes may share the folder.
        """
        for file in self.path.glob("*") if files is None else files:
            if file.name.startswith(TRANSIENT) and file.suffix == ".json":
                file.unlink(missing_ok=True)
            elif file.name.startswith("output-") and file.exists() and not file.stat().st_size:
                file.unlink()

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Create a folder for a new run of `paceline train`; RecordsError if it exists."""
        return cls.create_at(_new_path(config), RunSettings.of(config))

    @classmethod
    def create_at(
        cls, path: Path, settings: RunSettings, *, out: str = "--out", name: str = "--name"
    ) -> RunFolder:
        """Create a folder for a new run of any kind; RecordsError if it exists.

        `out` and `name` are what the user changes to get another folder.
        """
        folder = cls(path)
        try:
            make_folder(folder.path.parent)
            try:
                folder.path.mkdir()
            except FileExistsError:
                raise _taken(folder.path, settings.kind, name) from None
            sync_folder(folder.path.parent)
            folder.write_settings(settings)
        except (FileExistsError, NotADirectoryError):
            raise RecordsError(f"{out}: {folder.path.parent} is not a folder") from None
        except OSError as error:
            raise RecordsError(f"{out}: cannot write to {folder.path}: {error.strerror}") from None
        return folder

    @classmethod
    def unused(cls, config: RunConfig) -> RunFolder:
        """Return the folder of a new run without creating it; RecordsError if it exists."""
        folder = cls(_new_path(config))
        if folder.path.exists():
            raise _taken(folder.path, "train", "--name")
        return folder

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of the run; a UsageError names the process that holds it.

        The process that starts the run on the first node holds it until the run ends.
        """
        return locked(self.path, "wait until it ends, or stop it")

    def discard(self, records: Iterable[Path] = ()) -> None:
        """Remove the folder of a run that never trained, with these files; other files stay."""
        for file in records:
            file.unlink(missing_ok=True)
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.tensorboard, ignore_errors=True)
        self.config_file.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    @classmethod
    def open_or_create(cls, config: RunConfig, name: str) -> RunFolder:
        """Return the folder that the first node named, local or shared; create it if necessary."""
        return cls.open_or_create_at(Path(config.out) / name, RunSettings.of(config))

    @classmethod
    def open_or_create_at(cls, path: Path, settings: RunSettings) -> RunFolder:
        """Return the folder of a run of any kind, local or shared; create it if necessary."""
        folder = cls(path)
        try:
            make_folder(folder.path)
            if not folder.config_file.exists():
                folder.write_settings(settings)
        except OSError as error:
            raise RecordsError(f"cannot write to {folder.path}: {error.strerror}") from None
        return folder

    def identity(self) -> list[int | str]:
        """Return a value that is equal for processes that see the same folder, also if shared."""
        status = self.config_file.stat()
        return [status.st_ino, status.st_mtime_ns, str(status.st_size)]

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an existing run."""
        # Resolved, so that "." has a name.
        folder = cls(Path(path).resolve()) if str(path) else cls(Path("no such run"))
        if not folder.config_file.is_file():
            raise RecordsError(f"{path} is not a run: it has no config.json")
        return folder

    def write_settings(self, settings: RunSettings) -> None:
        """Write config.json."""
        write_json(self.config_file, {"schema": SCHEMA, **settings.to_record()})

    def read_settings(self) -> RunSettings:
        """Read config.json of a run of any kind."""
        settings = settings_of(read_json(self.config_file), self.config_file)
        if settings.config is not None or "world_size" in settings.values:
            return settings
        # A script that is still running has as many workers as have written events.
        workers = sum(1 for _ in self.path.glob("events-*.jsonl"))
        return replace(settings, values={**settings.values, "world_size": max(1, workers)})

    def read_config(self) -> RunConfig:
        """Read config.json of a run of `paceline train`; RecordsError for any other run."""
        settings = self.read_settings()
        if settings.config is None:
            raise RecordsError(
                f"{self.path} was written by {KIND_NAMES[settings.kind]}: choose a run of"
                " `paceline train`"
            )
        return settings.config

    def read_result(self) -> Result | None:
        """Return the result; None if the run has not ended."""
        if not self.result_file.exists():
            return None
        result = read_json(self.result_file)
        missing = [key for key in RESULT_KEYS if key not in result]
        if missing:
            raise RecordsError(f"{self.result_file} is damaged: it has no {missing[0]}")
        return result

    def readable_result(self) -> Result | None:
        """Return the result; None if the run has not ended or its result is damaged."""
        try:
            return self.read_result()
        except RecordsError:
            return None

    @property
    def is_finished(self) -> bool:
        """Whether the run has a result with status finished."""
        result = self.readable_result()
        return result is not None and result["status"] == "finished"

    def change_config(self, config: RunConfig) -> None:
        """Replace config.json; the previous one is kept as config-<n>.json."""
        if config != self.read_config():
            shutil.copyfile(self.config_file, self._free_name("config"))
            self.write_settings(RunSettings.of(config))

    def _free_name(self, stem: str) -> Path:
        names = (self.path / f"{stem}-{number}.json" for number in itertools.count(1))
        return next(name for name in names if not name.exists())

    def archive_result(self) -> None:
        """Keep the result of an earlier session of a resumed run as result-<n>.json."""
        if self.result_file.exists():
            self.result_file.rename(self._free_name("result"))

    def write_result(self, result: Mapping[str, Any]) -> None:
        try:
            write_json(self.result_file, result)
        except OSError as error:
            raise RunError(explain_write_error(self.result_file, error)) from None


def settings_of(record: Mapping[str, Any], file: Path) -> RunSettings:
    """The settings in the contents of config.json or result.json; RecordsError if invalid."""
    try:
        return RunSettings.from_record(record)
    except ConfigError as error:
        raise RecordsError(f"{file}: {error.problems[0]}") from None


def _new_path(config: RunConfig) -> Path:
    out = Path(config.out)
    return out / (config.name or default_name(out, config.model, config.strategy))


def _taken(path: Path, kind: str, name: str) -> RecordsError:
    resume = ", or continue it with --resume" if kind == "train" else ""
    return RecordsError(f"{path} exists already: choose another {name}{resume}")


def default_name(out: Path, *parts: str) -> str:
    """Return `<time>-<part>-...`, such as model and strategy, with a counter if it exists."""
    plain = (re.sub(r"[^A-Za-z0-9_]+", "_", part.rpartition(":")[2]) for part in parts)
    name = "-".join((time.strftime("%Y%m%d-%H%M%S"), *plain))
    for counter in range(2, 1000):
        if not (out / name).exists():
            break
        name = f"{name.partition('~')[0]}~{counter}"
    return name


def explain_write_error(path: Path, error: OSError) -> str:
    """Return a line with the file, and with the disk if it is full."""
    text = f"cannot write {path}: {error.strerror or error}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return text
    disk = next((folder for folder in path.absolute().parents if folder.is_mount()), Path("/"))
    return f"{text} (disk mounted at {disk})"


class EventWriter:
    """Appends events to the file of a rank, flushed after each call."""

    def __init__(self, path: Path) -> None:
        try:
            # A truncated line must not swallow the first event of the resumed run.
            _end_cut_line(path)
            file = _open_to_append(path)
        except OSError as error:
            raise RunError(explain_write_error(path, error)) from None
        self._file: TextIO = io.TextIOWrapper(file, encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        self.write_all([(event, values)])

    def write_all(self, events: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Append several events at once, each with its name."""
        now = time.time()
        lines = [
            json.dumps({"event": event, "time": now, **values}, allow_nan=False) + "\n"
            for event, values in events
        ]
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:
            raise RunError(explain_write_error(Path(self._file.name), error)) from None

    def close(self) -> None:
        # write() has reported a failure; closing would fail again.
        with contextlib.suppress(OSError):
            self._file.close()


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a record is a finite number from which sums and means can be computed."""
    if isinstance(value, float):
        return abs(value) < NUMBER_MAX
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INTEGER_MAX


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; skips lines that a crash truncated."""
    try:
        file = open_record(path)
    except OSError:
        return
    with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def read_iteration_seconds(path: Path, until: int, since: int = 0) -> list[float]:
    """Return the step times of the iterations from `since` to `until` in a rank's events.

    Of iterations that a resumed run repeated, the last time counts. Iterations without a worker of
    this rank are missing.
    """
    numbers: list[int] = []
    seconds: list[float] = []
    for event in read_lines(path):
        if event.get("event") == "iterations":
            first = bisect_left(numbers, event["first"])
            del numbers[first:], seconds[first:]
            numbers += range(event["first"], event["first"] + len(event["seconds"]))
            seconds += event["seconds"]
    return seconds[bisect_left(numbers, since) : bisect_left(numbers, until)]


def summarize_iterations(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the first duration, and mean, median and 95th percentile of the others."""
    if not seconds:
        return dict.fromkeys(("first", "mean", "median", "p95"))
    rest = sorted(seconds[1:]) or [seconds[0]]
    return {
        "first": seconds[0],
        "mean": statistics.fmean(rest),
        "median": statistics.median(rest),
        "p95": rest[min(len(rest) - 1, round(0.95 * (len(rest) - 1)))],
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    missing = list(itertools.takewhile(lambda each: not each.exists(), (path, *path.parents)))
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)
    # An existing path may be a file.
    path.mkdir(exist_ok=True)


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that renames and new files in it are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def open_record(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; OSError for anything else.

    Opening a FIFO would block until a writer opens it.
    """
    return open(path, "rb", opener=_open_regular)


def _open_to_append(path: Path) -> io.BufferedWriter:
    return open(path, "ab", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        # A FIFO without a reader cannot be opened for writing.
        if error.errno != errno.ENXIO:
            raise
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object with a schema number, of this version of paceline or an older one."""
    try:
        with open_record(path) as file:
            value = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError as error:
        raise MissingRecordError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise DamagedRecordError(f"{path} is damaged: it is not JSON") from None
    except ValueError:
        raise DamagedRecordError(f"{path} is damaged: it has a number of too many digits") from None
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise DamagedRecordError(f"{path} is not a paceline record: it has no schema number")
    if value["schema"] > SCHEMA:
        raise NewerSchemaError(
            f"{path} has schema {value['schema']}, newer than this paceline's {SCHEMA}"
        )
    return value


def _end_cut_line(path: Path) -> None:
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def is_numerics(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is the `numerics` of a worker: precision, memory format and their reason."""
    if not isinstance(value, dict):
        return False
    times = value.get("step_seconds", {})
    return (
        isinstance(value.get("precision"), str)
        and isinstance(value.get("channels_last"), bool)
        and isinstance(value.get("reason"), str)
        and isinstance(times, dict)
        and all(map(is_number, times.values()))
    )


def is_cuda_graph(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is the `cuda_graph` of a worker: how its steps ran on a GPU."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("captured"), bool)
        and isinstance(value.get("reason"), str | None)
        and is_number(value.get("graphs"))
        and is_number(value.get("capture_seconds"))
    )


def is_memory(value: object) -> TypeGuard[dict[str, float | None]]:
    """Whether a value is the `memory` of a worker: what its setup and steps added."""
    return isinstance(value, dict) and all(
        (size := value.get(key)) is None or is_number(size) for key in MEMORY_KEYS
    )


def is_noise_scale(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is the `noise_scale` of rank 0: an estimate, or why there is none."""
    if not isinstance(value, dict) or not isinstance(value.get("reason"), str | None):
        return False
    figures = (value.get(key) for key in NOISE_SCALE_KEYS)
    return all(figure is None or is_number(figure) for figure in figures)


def cuda_graph_text(cuda_graph: Mapping[str, Any]) -> str:
    """Such as "5 graphs, captured in 70.00 ms", or "none: --cuda-graph off"."""
    if not cuda_graph["captured"]:
        return f"none: {cuda_graph['reason']}"
    spent = formatting.seconds(cuda_graph["capture_seconds"])
    return f"{cuda_graph['graphs']:,} graphs, captured in {spent}"


def noise_scale_text(noise: Mapping[str, Any]) -> str:
    """Such as "412 samples (95% interval 300 to 610), measured at batch size 64".

    Without a value, "at least 93 samples (95% confidence)".
    """
    if noise.get("batch") is None:
        return f"not measured: {noise['reason']}"
    value, low, high = noise["value"], noise["low"], noise["high"]
    text = "unknown" if value is None else f"{value:,.0f} samples"
    if value is None and low is not None:
        text = f"at least {low:,.0f} samples (95% confidence)"
    elif low is not None:
        interval = f"at least {low:,.0f}" if high is None else f"{low:,.0f} to {high:,.0f}"
        text += f" (95% interval {interval})"
    return f"{text}, measured at batch size {noise['batch']:,.0f}"


def format_name(precision: str, channels_last: bool) -> str:
    """Such as "bf16 channels-last"."""
    return f"{precision} channels-last" if channels_last else precision


def numerics_text(numerics: Mapping[str, Any]) -> str:
    """Such as "bf16 (measured: fp32 3.40 ms, bf16 1.90 ms per step)"."""
    times = numerics.get("step_seconds", {})
    measured = ", ".join(f"{name} {formatting.seconds(spent)}" for name, spent in times.items())
    how = f"{numerics['reason']}: {measured} per step" if times else numerics["reason"]
    return f"{format_name(numerics['precision'], numerics['channels_last'])} ({how})"
