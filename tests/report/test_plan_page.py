"""The page of a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.plan.calibration import Calibration
from tests.support.calibrations import calibration


def page(tmp_path: Path, known: Calibration, *arguments: str) -> str:
    source, out = tmp_path / "calibration.json", tmp_path / "plan.html"
    known.write(source)
    assert main(["plan", str(source), "--html", str(out), *arguments]) == 0
    return out.read_text()


def test_the_recommendation_comes_first(tmp_path: Path) -> None:
    text = page(tmp_path, calibration(), "--workers", "1,2,8", "--strategy", "ring,ddp")
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == ["Recommendation", "Scaling", "What limits a step", "Assumptions and limits"]
    assert text.index("paceline train --model lenet") < text.index("<h2>Scaling</h2>")
    assert "one worker 1.3 times slower" in text
    # One file: nothing is loaded from elsewhere.
    assert not re.search(r'(?:src|href)="https?://', text)


def test_extrapolated_points_are_hollow(tmp_path: Path) -> None:
    text = page(tmp_path, calibration(), "--workers", "1,2,64", "--strategy", "ring")
    curve = next(part for part in text.split("<g ") if 'data-label="ring"' in part)
    assert curve.count('class="dot hollow"') == 1
    assert curve.count('class="dot"') == 2
    assert "extrapolated: 64 workers, measured 2" in text


def test_reasons_to_extrapolate_are_one_note_for_all_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--workers", "2,16,64", "--strategy", "ring", "--link", "2gbit")
    text = page(tmp_path, calibration(), *arguments)
    printed = capsys.readouterr().out
    for note in (
        "extrapolated: 16, 64 workers, measured 2",
        "extrapolated: 1, 4 samples per worker, measured 16 to 64",
        "extrapolated: collectives on link 2gbit, measured 1gbit",
    ):
        assert f"* {note}\n" in printed
        assert f"<li>{note}</li>" in text


def test_every_link_has_its_curves(tmp_path: Path) -> None:
    links = ("--link", "1gbit", "--link", "10gbit,100us")
    text = page(tmp_path, calibration(), "--workers", "2,4", "--strategy", "ring", *links)
    assert "<h2>Scaling: link 1gbit</h2>" in text
    assert "<h2>Scaling: link 10gbit,100us</h2>" in text
    names = re.findall(r'<figure class="figure" id="([^"]+)"', text)
    assert len(names) == len(set(names)) == 4


def test_the_terminal_shows_what_limits_and_contended_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "calibration.json"
    replace(calibration(), other_processes_share=0.4).write(source)
    assert main(["plan", str(source), "--workers", "1,2", "--strategy", "ddp"]) == 0
    printed = capsys.readouterr().out
    assert "What limits ddp, 2 workers, batch 64" in printed
    assert "bandwidth x 2" in printed
    assert "Other processes used up to 40.0% of the CPU during the runs" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_ready_times_are_missing_only_where_buckets_start_before_the_last_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(total_bytes: int, *options: str) -> str:
        source = tmp_path / "calibration.json"
        known = calibration(sizes_bytes=(total_bytes - 4_000, 4_000))
        replace(known, has_ready_times=False).write(source)
        assert main(["plan", str(source), "--workers", "2", "--strategy", "overlap", *options]) == 0
        return capsys.readouterr().out

    note = "When gradients are ready was not measured"
    assert note not in printed(100_000)
    assert note in printed(100_000, "-o", "bucket_mib=0.05")
    assert note in printed(2**20)


def test_captions_name_bars_only_where_there_are_figures(tmp_path: Path) -> None:
    text = page(tmp_path, calibration(), "--workers", "2", "--strategy", "ring")
    assert "Small numbers: the 80% interval." in text
    assert "vertical bars" not in text
    text = page(tmp_path, calibration(), "--workers", "2,4", "--strategy", "ring")
    assert text.count("vertical bars") == 1


def test_tables_keep_all_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of intervals around a millisecond, beside many samples per second."""
    fast = tuple(
        replace(each, phases={name: spent / 75 for name, spent in each.phases.items()})
        for each in calibration().compute
    )
    path = tmp_path / "calibration.json"
    replace(calibration(), compute=fast).write(path)
    arguments = ["--workers=1,2", "--link=100gbit,100us", "--strategy=parameter_server"]
    assert main(["plan", str(path), *arguments]) == 0
    printed = capsys.readouterr().out
    (row,) = re.findall(r" 1 single .*", printed)
    assert re.fullmatch(r" 1 single +9\d\d us \(\d{3} to 1,\d{3}\) +[\d,]+ +100% +0%", row)
    assert max(map(len, printed.splitlines())) <= 80
