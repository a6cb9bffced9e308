"""A run as a SLURM batch job: write the script, submit it, and follow the job.

Inside the job srun starts the workers, and launch/environment.py detects their ranks.
"""

from __future__ import annotations

import codecs
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RecordsError, RunError, UsageError
from paceline.records import RunFolder

POLL_SECONDS = 2.0
"""How often to query the state of a job."""
SILENCE_SECONDS = 300.0
"""How long SLURM may not answer before waiting fails; controllers may restart."""
LINGER_SECONDS = 30
"""Time for the other workers to end and record the cause, once one has ended."""

ACTIVE_STATES = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"),
    *("STAGE_OUT", "RESIZING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"),
}
GONE = "UNKNOWN"
"""The state of a job that SLURM does not know any more, some minutes after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Resources and options of a batch job."""

    nodes: int
    ntasks_per_node: int
    options: tuple[str, ...] = ()
    """Other options of sbatch without dashes: `time=01:00:00`, `exclusive`."""
    setup: tuple[str, ...] = ()
    """Shell commands before the run."""


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job."""

    id: str
    output: Path


def output_path(folder: RunFolder, job_id: str) -> Path:
    """The job's output, beside the run folder, because SLURM opens it before that exists."""
    return folder.path.with_name(f"{folder.id}.slurm-{job_id}.txt")


def output_pattern(folder: RunFolder) -> str:
    """The same path for sbatch, which replaces %j by the job's id."""
    doubled = RunFolder(Path(str(folder.path).replace("%", "%%")))
    return str(output_path(doubled, "%j"))


def script_path(folder: RunFolder, resumed: bool) -> Path:
    """The batch script, beside the run folder; each time a run is resumed has its own."""
    first = folder.path.with_name(f"{folder.id}.sbatch")
    if not resumed:
        return first
    names = (first.with_name(f"{folder.id}-{number}.sbatch") for number in range(2, 10_000))
    return next(path for path in names if not path.exists())


def batch_script(request: Request, folder: RunFolder, train_flags: Sequence[str]) -> str:
    """A shell script that users can edit and submit again; `train_flags` are flags of train.

    It runs in the current folder with this Python.
    """
    options = [
        f"job-name={folder.id}",
        f"nodes={request.nodes}",
        f"ntasks-per-node={request.ntasks_per_node}",
        *request.options,
        f"chdir={Path.cwd()}",
        f"output={output_pattern(folder)}",
        # A requeued job would find that the run folder exists.
        "no-requeue",
    ]
    # srun does not take this one from the job.
    asks_for_cpus = any(option.startswith("cpus-per-task=") for option in request.options)
    cpus = ['--cpus-per-task="$SLURM_CPUS_PER_TASK"'] if asks_for_cpus else []
    srun = " ".join(["srun", *cpus, "--kill-on-bad-exit=0", f"--wait={LINGER_SECONDS}"])
    lines = [
        "#!/bin/bash",
        "# Written by `paceline slurm`. It can be edited, and submitted again with sbatch.",
        *(f"#SBATCH --{_quoted(option)}" for option in options),
        "",
        *request.setup,
        *([""] if request.setup else []),
        "# One worker per task. When one fails, the others notice and record the cause; srun kills",
        f"# workers that still run {LINGER_SECONDS} s after the first one ended.",
        " \\\n  ".join(
            [srun, shlex.join([sys.executable, "-m", "paceline", "train"]), *_grouped(train_flags)]
        ),
    ]
    return "\n".join(lines) + "\n"


def _quoted(option: str) -> str:
    name, sign, value = option.partition("=")
    return f"{name}{sign}{shlex.quote(value) if value else ''}"


def _grouped(flags: Sequence[str]) -> list[str]:
    """One line per flag with its value."""
    lines: list[str] = []
    for word in flags:
        if word.startswith("-") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def submit(script: str, path: Path, folder: RunFolder) -> Job:
    """Write the script to `path` and submit it; a rejected job leaves no script."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(script)
    except FileExistsError:
        raise RecordsError(
            f"{path} exists already: choose another --name, or submit it again with `sbatch {path}`"
        ) from None
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None
    try:
        answer = _ask("sbatch", "--parsable", str(path))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if answer.returncode:
        path.unlink(missing_ok=True)
        raise UsageError(f"sbatch rejected the job: {_error_message(answer)}")
    # In a multi-cluster setup, the cluster's name follows the id.
    number = answer.stdout.strip().partition(";")[0]
    return Job(number, output_path(folder, number))


def follow(job: Job) -> str:
    """Show the output of a job until it ends; returns its final state, such as COMPLETED.

    Ctrl-C does not affect the job.
    """
    tail = _Tail(job.output)
    answered_at = time.monotonic()
    while True:
        state = job_state(job)
        tail.show()
        if state is not None:
            answered_at = time.monotonic()
            if state not in ACTIVE_STATES:
                return state
        if time.monotonic() - answered_at > SILENCE_SECONDS:
            raise RunError(f"job {job.id}: SLURM does not answer; see {job.output}")
        time.sleep(POLL_SECONDS)


def job_state(job: Job) -> str | None:
    """The state of a job; None if SLURM does not answer."""
    answer = _ask("scontrol", "--oneliner", "show", "job", job.id)
    if "Invalid job id" in answer.stderr:
        return GONE
    found = re.search(r"\bJobState=(\w+)", answer.stdout)
    return found[1] if found else None


class _Tail:
    """Copies data that is appended to a file to standard output."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._shown_bytes)
            added = file.read()
        self._shown_bytes += len(added)
        sys.stdout.write(self._decoder.decode(added))
        sys.stdout.flush()


def _ask(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(
            f"{program} is not installed on this machine: submit on a SLURM cluster, or print the"
            " script with --dry-run"
        ) from None


def _error_message(answer: subprocess.CompletedProcess[str]) -> str:
    """The error message of a SLURM program, in one line."""
    lines = [
        re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in answer.stderr.splitlines()
    ]
    return "; ".join(filter(None, lines)) or f"exit code {answer.returncode}"
