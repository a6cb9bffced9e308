"""The command line: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cli import COMMANDS, main
from paceline.cli.config_flags import add_config_flags, given_flags
from paceline.config import from_mapping, non_default_values, to_argv
from paceline.errors import ConfigError

SMALL = ["--train-samples", "64", "--test-samples", "32", "--batch-size", "16", "--threads", "1",
         "--iterations", "4", "--sample-seconds", "0", "--no-tensorboard"]  # fmt: skip


LONG = "x" * 100_000


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with exit code 2 and one line; returns the line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("paceline: error: ")
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "lenet5"], "unknown model 'lenet5': did you mean lenet"),
        (["--data", "digitz"], "unknown data 'digitz': did you mean digits"),
        (["--strategy", "sigle"], "unknown strategy 'sigle': did you mean single"),
        (["--model", "no_such_module:Net"], "cannot import no_such_module"),
        (["--model", "paceline:Net"], "has no Net"),
        (["--iterations", "0"], "--iterations: must be at least 1"),
        (["--batch-size", "-4"], "--batch-size: must be at least 1"),
        (["--iterations", "2.5"], "--iterations: must be a whole number"),
        (["--batch-size", "65"], "--batch-size: must be at most 64"),
        (["--epochs", "1"], "--epochs and --iterations: use only one of them"),
        (["--data", "mnist", "--data-dir", "/nonexistent"], "paceline data fetch mnist"),
        (["--strategy", "single", "--nproc-per-node", "2"], "trains 1 worker, not 2"),
        (["-o", "speed=9"], "strategy single has no such option"),
        (["--model-options", "widht=2"], "lenet has no such option; it has width (did you mean"),
        (["--model-options", "width"], "--model-options: must be key=value, got 'width'"),
        (["-o", "a=1", "-o", "foo"], "-o: must be key=value, got 'foo'"),
        (["--bogus", "3"], "unknown flag --bogus: see `paceline train --help`"),
        (["--lr"], "--lr needs a value: learning rate"),
        (["lenet"], "unexpected argument 'lenet'"),
        (["--device", "cuda"], "no CUDA device"),
        (["--modell", "lenet"], "did you mean --model?"),
        (["--out", ""], "--out: must not be empty"),
        (["--train-samples", "999999999999"], "use fewer --train-samples"),
        (["--resume", ""], "is not a run"),
        (["--threads", "99999999"], "--threads: must be at least 1 and at most 1024"),
        (["--optimizer", "adam", "--beta1", "1"], "--beta1: must be at least 0 and below 1"),
        (["--slow", "0=nan"], "--slow: must be rank=factor"),
        (["--lr-steps", "inf:1", "--schedule", "steps"], "--lr-steps: must be"),
        (["--warmup-epochs", "1e308"], "--warmup-epochs: must be at least 0 and at most 1000000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_one_line_and_leaves_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in flags:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here, so asking for one is no mistake")
    line = refused(capsys, "train", *SMALL, "--out", str(tmp_path / "runs"), *flags)
    assert message in line
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "-o", "a\nb=1"], r"-o 'a\nb': strategy single has no such option"),
        (["train", "--a\nb"], r"unknown flag '--a\nb'"),
        (["train", "a\rb"], r"unexpected argument 'a\rb'"),
        (["train", "--model", "a\nb"], r"unknown model 'a\nb'"),
        (["train", "--lr", "\x1b[31mred"], r"--lr: must be a number, got '\x1b[31mred'"),
        (["train", "--out", "/proc/no\nwhere"], r"cannot write to /proc/no\nwhere"),
        (["list", "a\nb"], r"unknown kind 'a\nb'"),
        (["study", "run", "a\nb"], r"unknown study 'a\nb'"),
        (["study", "show", "no\nsuch.yaml"], r"cannot read no\nsuch.yaml"),
        (["a\nb"], r"unknown command 'a\nb'"),
        (["compare", "no\nrun"], r"no\nrun"),
    ],
    ids=lambda value: ascii(value[-1]) if isinstance(value, list) else "",
)
def test_control_characters_of_arguments_are_escaped(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_a_value_may_begin_with_a_minus(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "profile", "--steps", "-3:5", "--", "python", "train.py")
    assert "--steps: must be A:B with A below B, such as 20:120, got '-3:5'" in line


@pytest.mark.parametrize(
    ("strategy", "option", "message"),
    [
        ("ddp", "bucket_mib=1e300", "at least 0 and at most 1000000, got 1e+300"),
        ("overlap", "bucket_mib=1e300", "at least 0 and at most 1000000, got 1e+300"),
        ("overlap", "first_bucket_mib=-1", "at least 0 and at most 1000000, got -1.0"),
        ("local_sgd", "every=10000000000", "at least 1 and at most 1000000000, got 10000000000"),
        ("local_sgd", "warmup=-1", "at least 0 and at most 1000000000, got -1"),
        ("easgd", "tau=0", "at least 1 and at most 1000000000, got 0"),
        ("easgd", "alpha=2", "above 0 and at most 1, got 2.0"),
        ("easgd", "alpha=nan", "a finite number, got 'nan'"),
        ("parameter_server", "staleness=-1", "at least 0 and at most 1000000000, got -1"),
        ("parameter_server", "servers=1025", "at least 1 and at most 1024, got 1025"),
    ],
)
def test_a_strategy_option_out_of_range_reports_the_range(
    strategy: str, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "train", *SMALL, "--strategy", strategy, "-o", option)
    name = option.partition("=")[0]
    assert line == f"paceline: error: -o {name}: must be {message}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--model", LONG],
        ["train", "--lr", LONG],
        ["train", "--strategy", "ddp", "-o", f"{LONG}=1"],
        ["train", "--strategy", "local_sgd", "-o", f"every={LONG}"],
        ["train", "--shares", LONG],
        ["train", "--cluster", LONG],
        ["train", "--out", LONG],
        ["train", "--resume", LONG],
        ["train", f"--{LONG}"],
        ["train", LONG],
        ["list", LONG],
        ["study", "run", LONG],
        ["study", "run", "first-look", "--repeats", LONG],
        ["comm", "--sizes", LONG],
        ["comm", "--operations", LONG],
        ["slurm", "--nodes", LONG],
        ["ui", "--port", LONG],
        ["cluster", "up", "--nodes", LONG],
        ["report", LONG],
        [LONG],
    ],
    ids=lambda words: " ".join(word[:12] for word in words),
)
def test_a_long_argument_is_echoed_in_part(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *arguments)
    assert 20 * "x" in line
    assert len(line) < 2200


def test_several_invalid_flags_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--epochs", "0", "--lr", "x", "--seed", "-1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize(
    ("place", "message"), [("/proc/nowhere", "cannot write to"), ("a-file", "--out: a-file is not")]
)
def test_an_unwritable_output_is_one_line(
    place: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("not a folder")
    assert message in refused(capsys, "train", *SMALL, "--out", place)


def test_an_existing_run_is_not_trained_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *SMALL, "--quiet", "--out", str(tmp_path), "--name", "one"]
    assert main(arguments) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert "exists already" in refused(capsys, *arguments)
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("content", [None, "{", '{"schema": 99}', '{"schema": 1}'])
def test_resume_and_compare_reject_paths_that_are_not_runs(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "something"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert str(folder) in refused(capsys, "train", "--resume", str(folder))
    assert str(folder) in refused(capsys, "compare", str(folder))


def test_a_diverged_run_exits_with_1_and_keeps_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lr", "1e9", "--iterations", "60"]
    code = main(["train", *SMALL, *flags, "--quiet", "--out", str(tmp_path), "--name", "run"])
    assert code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "loss became" in line
    assert (tmp_path / "run" / "result.json").exists()


def test_a_resumed_run_is_shown_with_the_path_of_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--iterations", "2", "--checkpoint-every", "2", "--out", "runs", "--name", "run"]
    assert main(["train", *SMALL, *flags]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "runs/run", "--iterations", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "paceline: resuming after iteration 2"
    assert lines[-1].split() == ["records", "runs/run"]


def test_a_full_disk_while_checkpointing_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    """From the second checkpoint on, the system refuses files over 20 kB."""
    program = (
        "import resource, sys, paceline.training.checkpoint as f\n"
        "from paceline.cli import main\n"
        "write, calls = f.write_checkpoint, []\n"
        "def limited(folder, iteration, state):\n"
        "    calls.append(iteration)\n"
        "    if len(calls) == 2:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "    return write(folder, iteration, state)\n"
        "import paceline.training.checkpoint as c\n"
        "c.write_checkpoint = limited\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *SMALL, "--checkpoint-every", "1", "--quiet",
         "--out", str(tmp_path), "--name", "run"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert "checkpoint" in line
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.pt")] == [
        "iteration-00000001.pt"
    ]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20_000


def test_a_full_disk_while_recording_still_leaves_a_result(tmp_path: Path) -> None:
    """Files may grow to 8 kB: too little for the events of so many evaluations."""
    limited = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))\n"
        "from paceline.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "train", *SMALL, "--iterations", "60", "--eval-every", "1",
         "--model", "softmax", "--quiet", "--out", str(tmp_path), "--name", "run"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot write" in done.stderr


def test_train_prints_the_console_columns_and_the_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SMALL, "--out", str(tmp_path), "--name", "run"]) == 0
    out = capsys.readouterr().out
    heading = next(line for line in out.splitlines() if "epoch" in line)
    for column in ("epoch", "rank", "test loss", "test acc", "lr", "wall s"):
        assert column in heading
    for word in ("forward", "backward", "accuracy", "finished", str(tmp_path / "run")):
        assert word in out.replace("\n", "") or word in out
    assert max(map(len, out.splitlines())) <= 80


def test_compare_puts_runs_side_by_side_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        flags = ["--lr", f"0.0{number + 1}", "--name", f"run-with-a-long-name-{number}"]
        assert main(["train", *SMALL, "--quiet", "--out", str(tmp_path), *flags]) == 0
    capsys.readouterr()
    assert main(["compare", *map(str, sorted(tmp_path.iterdir()))]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    (rates, _) = re.findall(r"^lr .*$", out, flags=re.M)
    assert rates.split() == ["lr", "0.01", "0.02", "0.03", "0.04"]
    assert "momentum" not in out, "what is the same in all runs is left out"


@pytest.mark.parametrize("kind", ["models", "data", "strategies", "algorithms", "codecs"])
def test_list_names_every_entry_with_a_summary(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli.listing import KINDS

    assert main(["list", kind]) == 0
    out = capsys.readouterr().out
    for entry in KINDS[kind]:
        assert entry.name in out
        assert entry.summary
    assert max(map(len, out.splitlines())) <= 80


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from paceline.cli import main
sys.exit(main(sys.argv[2:]))
"""
"""A command where a module cannot be imported, as if it were not installed."""


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--iterations", "1"],
        ["train", "--nproc-per-node", "2"],
        ["comm"],
        ["demo"],
        ["study", "run", "four-ways"],
        ["slurm", "--dry-run"],
    ],
    ids=" ".join,
)
def test_a_missing_torch_is_one_line(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "torch", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    line = f"paceline: error: torch is not installed: install it with `{sys.executable} -m pip"
    assert done.stderr == f"{line} install torch`\n"


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom paceline.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    for arguments in (["--help"], ["train", "--help"], ["list", "models"], ["train", "--lr", "x"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, check=False
        )
        assert done.returncode == 0, arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "unknown command 'trian': did you mean train?"),
        ("xyzzy", "unknown command 'xyzzy': choose from demo, train, "),
        ("--versoin", "unknown flag --versoin: did you mean --version?"),
        ("list", "paceline list needs KIND: one of strategies, algorithms, "),
        ("list model", "unknown kind 'model': did you mean models?"),
        ("report", "paceline report needs PATH: a run, a folder of runs, or a study's folder"),
        ("study rn first-look", "unknown action 'rn': did you mean run?"),
        ("study run first-look --dry", "unknown flag --dry: did you mean --dry-run?"),
        (
            "study run first-look --scale all",
            "--scale: must be one of quick, real, full, got 'all'",
        ),
        ("ui --port http", "--port: must be a whole number, got 'http'"),
        ("train --quiet=yes", "--quiet: takes no value, got 'yes'"),
    ],
)
def test_a_mistyped_command_gets_a_hint(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *words.split())


def test_python_raises_the_errors_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "train", "--epochs", "many")
    with pytest.raises(ConfigError) as caught:
        paceline.train(epochs="many")
    assert line == f"paceline: error: {caught.value}"
    assert len(caught.traceback) == 2, "the caller's line and that of paceline.train"


@pytest.mark.parametrize("command", COMMANDS)
def test_lists_that_the_help_names_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for named in re.findall("`paceline (list[^`]*)`", text):
        assert main(named.split()) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "usage: paceline" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "auto"),
        (["--channels-last"], "on"),
        (["--channels-last", "--lr", "0.1"], "on"),
        (["--channels-last", "off"], "off"),
        (["--channels-last=auto"], "auto"),
        (["--no-channels-last"], "off"),
    ],
)
def test_a_switch_is_on_alone_and_off_with_no(flags: list[str], expected: str) -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    config = from_mapping(given_flags(parser.parse_args(flags)))
    assert config.channels_last == expected
    again = from_mapping(given_flags(parser.parse_args(to_argv(non_default_values(config)))))
    assert again == config
