"""A run as a batch job of SLURM: its script, submitting it, and waiting for its end.

Inside the job srun starts the workers, and launch/environment.py finds out who each one is.
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
"""How often a job that is waited for is asked after."""
SILENCE_SECONDS = 300.0
"""How long SLURM may give no answer before waiting is given up; controllers are restarted."""
LINGER_SECONDS = 30
"""What the other workers get to end by themselves and write down why, once one has ended."""

ACTIVE_STATES = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"),
    *("STAGE_OUT", "RESIZING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"),
}
GONE = "UNKNOWN"
"""The state of a job that SLURM has forgotten, as it does some minutes after a job's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What SLURM is asked for."""

    nodes: int
    ntasks_per_node: int
    options: tuple[str, ...] = ()
    """Further options of sbatch, without their dashes: `time=01:00:00`, `exclusive`."""
    setup: tuple[str, ...] = ()
    """Lines of shell that come before the run."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that SLURM has taken."""

    id: str
    output: Path


def output_path(folder: RunFolder, job_id: str) -> Path:
    """Beside the run, since SLURM opens it before the run makes its folder."""
    return folder.path.with_name(f"{folder.id}.slurm-{job_id}.txt")


def output_pattern(folder: RunFolder) -> str:
    """The same as SLURM takes it, which puts the job's number in place of %j."""
    doubled = RunFolder(Path(str(folder.path).replace("%", "%%")))
    return str(output_path(doubled, "%j"))


def script_path(folder: RunFolder, resumed: bool) -> Path:
    """Beside the run; a run that is resumed has a script for each time."""
    first = folder.path.with_name(f"{folder.id}.sbatch")
    if not resumed:
        return first
    names = (first.with_name(f"{folder.id}-{number}.sbatch") for number in range(2, 10_000))
    return next(path for path in names if not path.exists())


def batch_script(request: Request, folder: RunFolder, train_words: Sequence[str]) -> str:
    """Plain shell that a user can read, edit and submit again; `train_words` are flags of train.

    It runs in the folder, and with the Python, of whoever writes it.
    """
    options = [
        f"job-name={folder.id}",
        f"nodes={request.nodes}",
        f"ntasks-per-node={request.ntasks_per_node}",
        *request.options,
        f"chdir={Path.cwd()}",
        f"output={output_pattern(folder)}",
        # A job that SLURM starts anew would find the folder of the run taken.
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
        "# A worker for each task. When one fails the others notice, and write down why; whoever",
        f"# still runs {LINGER_SECONDS} s after the first one's end is ended by srun.",
        " \\\n  ".join(
            [srun, shlex.join([sys.executable, "-m", "paceline", "train"]), *_grouped(train_words)]
        ),
    ]
    return "\n".join(lines) + "\n"


def _quoted(option: str) -> str:
    name, sign, value = option.partition("=")
    return f"{name}{sign}{shlex.quote(value) if value else ''}"


def _grouped(words: Sequence[str]) -> list[str]:
    """A line for each flag, with its value."""
    lines: list[str] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def submit(script: str, path: Path, folder: RunFolder) -> Job:
    """Keep the script at `path` and hand it to SLURM; what SLURM refuses leaves no script."""
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
        raise UsageError(f"sbatch refused the job: {_complaint(answer)}")
    # On a cluster of clusters the id comes with a cluster's name.
    number = answer.stdout.strip().partition(";")[0]
    return Job(number, output_path(folder, number))


def follow(job: Job) -> str:
    """Show what a job says until its end; returns its last state, such as COMPLETED.

    Interrupting it leaves the job alone.
    """
    tail = _Tail(job.output)
    answered = time.monotonic()
    while True:
        state = job_state(job)
        tail.show()
        if state is not None:
            answered = time.monotonic()
            if state not in ACTIVE_STATES:
                return state
        if time.monotonic() - answered > SILENCE_SECONDS:
            raise RunError(f"job {job.id}: SLURM gives no answer; see {job.output}")
        time.sleep(POLL_SECONDS)


def job_state(job: Job) -> str | None:
    """None where SLURM gives no answer."""
    answer = _ask("scontrol", "--oneliner", "show", "job", job.id)
    if "Invalid job id" in answer.stderr:
        return GONE
    found = re.search(r"\bJobState=(\w+)", answer.stdout)
    return found[1] if found else None


class _Tail:
    """Copies what is added to a file to our own output."""

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


def _ask(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(
            f"{program} is not on this machine: submit from one of a SLURM cluster, or see the"
            " script with --dry-run"
        ) from None


def _complaint(answer: subprocess.CompletedProcess[str]) -> str:
    """What a program of SLURM says is wrong, in a line."""
    lines = [
        re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in answer.stderr.splitlines()
    ]
    return "; ".join(filter(None, lines)) or f"exit code {answer.returncode}"
