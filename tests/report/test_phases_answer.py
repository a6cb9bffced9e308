"""The answer of the phases section."""

from __future__ import annotations

from pathlib import Path

from paceline.analysis.collection import collect
from paceline.report.build import to_document
from paceline.report.document import Text
from tests.support.records import FakeRun, write_run


def answer_of(folder: Path) -> str:
    (chapter,) = to_document(collect(folder)).chapters
    (section,) = [one for one in chapter.sections if one.name == "phases"]
    return next(
        one.text for one in section.blocks if isinstance(one, Text) and one.kind == "answer"
    )


def write_batches(folder: Path, small: int, large: int) -> None:
    """Twice the time per iteration with the second batch size."""
    for name, size, scale in (("small", small, 1), ("large", large, 2)):
        phases = {"forward": 0.008 * scale, "exchange": 0.002 * scale}
        settings = {"batch_size": size, "nproc_per_node": 2, "lr": 0.01 * scale}
        write_run(folder, FakeRun(name, settings, (phases, phases)))


def test_the_fastest_of_one_batch_size_has_the_shortest_iteration(tmp_path: Path) -> None:
    write_batches(tmp_path, 64, 64)
    text = answer_of(tmp_path)
    assert "with lr 0.01 (the fastest);" in text
    assert text.endswith("with lr 0.02 (the slowest).")


def test_batch_sizes_are_compared_per_sample(tmp_path: Path) -> None:
    write_batches(tmp_path, 64, 256)
    fastest, slowest = answer_of(tmp_path).split(" (the fastest per sample);")
    assert "lr 0.02" in fastest
    assert "lr 0.01" in slowest
    assert slowest.endswith(" (the slowest per sample).")
