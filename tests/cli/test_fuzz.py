"""Random invalid input on the command line and in study files: one line each, exit code 2.

Every case contains at least one invalid value, so that no command starts to work. The cases are
random but seeded: a failure names its case and happens again.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config import fields, flag_of, option_of, type_of
from paceline.study.settings import FIELDS
from paceline.study.study_file import KEYS

SEED = 20240607
LONGEST_MESSAGE = 2200

NO_NUMBERS = [
    "", " ", "nan", "inf", "-inf", "Infinity", "1e400", "-1e400", "9" * 5000, "-" + "9" * 5000,
    "9" * 100_000, "0x10", "1,5", "1 2", "--1", "1e", "one", "None", "True", "[]", "{}", "a\nb",
    "\r\n", "\x00", "\x1b[2J", "\u2028", "\udcff", "x" * 100_000, "%s", "{0}", "$(id)", "'", '"',
    "½", "1:2", "1=2", "=", ":", "/", ",", ",,", "1e308,1e308", "-", "--", "--lr", "🚀" * 30,
]  # fmt: skip
"""Values that no numeric setting accepts."""

OUT_OF_RANGE = ["-1", "-0.5", "1e300", "-1e300", str(2**63), str(2**64), str(10**18 * 10)]
"""Numbers that no numeric setting accepts."""

YAML_VALUES = [
    ".nan", ".inf", "-.inf", "1e400", "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "~", "''",
    "true", "[]", "{}", "[[1]]", "{a: {b: 1}}", "[{a: 1}, [2]]", "2020-01-01", "12:30:45", "-1",
    "0", "1e300", str(2**64), "'a\tb'", '"a\\nb"', '"\\0"', '"\\e[2J"', "x" * 5000,
    "[" + "1, " * 300 + "1]", "!!binary aGk=",
    "&a 1", "'%s'", "a=b", "nodes=2", "1=2", "1e308,1e308", "=", "a:b",
]  # fmt: skip


def numeric_flags() -> list[str]:
    """Flags that take a number; not those that also take words, such as `none`."""
    return [
        flag_of(item.name)
        for item in fields()
        if {"int", "float"} & set(re.findall(r"\w+", str(type_of(item))))
    ]


def messages(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command that must exit with 2; returns its messages, one for each line."""
    case = ascii(arguments)[:400]
    assert main(arguments) == 2, case
    # Not splitlines(): a terminal breaks the line only at a line feed.
    *lines, end = capsys.readouterr().err.split("\n")
    assert end == "", case
    assert lines, case
    for line in lines:
        assert line.startswith("paceline: error: "), (case, line[:300])
        assert line.isprintable(), (case, line[:300])
        assert len(line) <= LONGEST_MESSAGE, (case, line[:300])
    return lines


def test_a_bad_number_is_one_line_for_every_numeric_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(SEED)
    for flag in numeric_flags():
        values = chance.sample(NO_NUMBERS, 8) + chance.sample(OUT_OF_RANGE, 3)
        for value in values:
            (line,) = messages(["train", f"{flag}={value}"], capsys)
            assert line.startswith(f"paceline: error: {flag}: must be"), (flag, ascii(value)[:60])
    assert not list(tmp_path.iterdir())


def test_random_command_lines_are_rejected_in_one_line_for_each_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(SEED)
    flags = [flag_of(item.name) for item in fields() if type_of(item) is not bool]
    flags += [option.short for item in fields() if (option := option_of(item)).short]
    values = [value for value in NO_NUMBERS if "\x00" not in value] + OUT_OF_RANGE

    def some_flags(count: int) -> list[str]:
        chosen = (chance.choice(flags) for _ in range(count))
        return [
            f"{flag}={chance.choice(values)}"
            if flag.startswith("--")
            else flag + chance.choice(values)
            for flag in chosen
        ]

    def value() -> str:
        # A word that begins with a dash would be another flag.
        return chance.choice([each for each in values if each and not each.startswith("-")])

    for _ in range(300):
        count = chance.randrange(4)
        arguments = chance.choice(
            [
                ["train", "--lr=nan", *some_flags(count)],
                ["slurm", "--lr=nan", *some_flags(count)],
                ["comm", "--repeats=nan"],
                ["comm", f"--sizes={value()}", f"--link={value()}", "--seconds=nan"],
                ["train", f"--{value()}"],
                ["train", "--lr=nan", value()],
                ["train", f"--resume={value()}"],
                ["cluster", "up", "--nodes=0", f"--cpus={value()}", f"--slow={value()}"],
                ["cluster", "exec", value(), "--", "true"],
                ["study", "run", value()],
                ["study", "run", "first-look", f"--repeats=0{value()}"],
                ["study", value()],
                ["data", "verify", value()],
                ["list", value()],
                ["report", value() + "/none"],
                ["compare", value() + "/none"],
                ["ui", "--port", value()],
                [value()],
            ]
        )
        lines = messages(arguments, capsys)
        assert len(lines) <= len(arguments) + 1, ascii(arguments)[:400]
    assert not list(tmp_path.iterdir())


def test_random_study_files_are_rejected_with_file_and_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(SEED)
    keys = [*FIELDS, "options", "options.every", "cluster", "cluster.nodes", "cluster.cpus"]
    keys += ["cluster.bandwidth", "'a\\nb'", '"a\\nb"', "k" * 500, "options.", "a.b", "label"]
    path = tmp_path / "mine.yaml"
    for _ in range(400):
        lines = ["base:", "  momentum: 7"]
        lines += [
            f"  {chance.choice(keys)}: {chance.choice(YAML_VALUES)}"
            for _ in range(chance.randrange(3))
        ]
        if chance.random() < 0.5:
            lines += ["grid:", f"  {chance.choice(keys)}: [{chance.choice(YAML_VALUES)}]"]
        for key in chance.sample(KEYS, chance.randrange(3)):
            if key not in ("base", "grid"):
                lines.append(f"{key}: {chance.choice(YAML_VALUES)}")
        text = "\n".join(lines) + "\n"
        path.write_text(text)
        for message in messages(["study", "run", str(path), "--dry-run"], capsys):
            where = re.escape(f"paceline: error: {path}:")
            assert re.match(rf"{where}\d+: ", message), (text[:300], message[:300])
    assert [each.name for each in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("digits", [5000, 100_000])
@pytest.mark.parametrize("file", ["config.json", "result.json"])
def test_records_with_huge_numbers_are_rejected_in_one_line(
    digits: int, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"schema": 1, "config": {}}))
    (folder / file).write_text(f'{{"schema": 1, "config": {{"epochs": {"9" * digits}}}}}')
    commands = [["compare", str(folder)]]
    if file == "config.json":
        commands.append(["train", "--resume", str(folder)])
    for arguments in commands:
        (line,) = messages(arguments, capsys)
        assert f"{folder}/{file} is damaged: it has a number of too many digits" in line
