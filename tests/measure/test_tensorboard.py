"""TensorBoard event files are readable by TensorBoard, and failures do not affect training."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.measure import tensorboard
from paceline.measure.tensorboard import TensorBoardWriter


def read(folder: Path, tag: str) -> list[Any]:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return list(accumulator.Scalars(tag))


def test_tensorboard_reads_steps_and_values_of_every_tag(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "deep" / "folder")
    # Steps around the varint size boundaries; values that float32 represents exactly.
    steps = [0, 1, 127, 128, 16383, 16384, 2**31, 2**40]
    for step in steps:
        writer.add("train/loss", step / 4 % 1000, step)
        writer.add("test/Genauigkeit für heute" * 10, -1.5, step)
    writer.close()
    losses = read(tmp_path / "deep" / "folder", "train/loss")
    assert [(event.step, event.value) for event in losses] == [
        (step, step / 4 % 1000) for step in steps
    ]
    others = read(tmp_path / "deep" / "folder", "test/Genauigkeit für heute" * 10)
    assert [(event.step, event.value) for event in others] == [(step, -1.5) for step in steps]


def test_seconds_are_relative_to_the_creation_of_the_writer(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.add("loss", 1.0, 1, 10.0)
    writer.add("loss", 1.0, 2, 13.5)
    writer.close()
    first, second = read(tmp_path, "loss")
    assert second.wall_time - first.wall_time == pytest.approx(3.5, abs=1e-5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.inf, math.inf), (-1e300, -math.inf), (1e-300, 0.0), (True, 1.0)],
)
def test_values_outside_the_float32_range_become_infinite(
    tmp_path: Path, value: float, expected: float
) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.add("loss", value, 0)
    assert writer.close() is None
    assert read(tmp_path, "loss")[0].value == expected


def test_nan_stays_nan(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.add("loss", math.nan, 0)
    writer.close()
    assert math.isnan(read(tmp_path, "loss")[0].value)


def test_resumed_run_replaces_repeated_steps(tmp_path: Path) -> None:
    before = TensorBoardWriter(tmp_path)
    for step in range(5):
        before.add("loss", 0.0, step)
        before.add("rate", 0.0, step)
    before.close()
    after = TensorBoardWriter(tmp_path, resumed_step=3)
    after.add("loss", 1.0, 3)
    after.add("rate", 1.0, 4)
    after.close()
    assert [(event.step, event.value) for event in read(tmp_path, "loss")] == [
        (0, 0.0),
        (1, 0.0),
        (2, 0.0),
        (3, 1.0),
    ]
    assert [event.step for event in read(tmp_path, "rate")] == [0, 1, 2, 4]


def test_values_are_visible_before_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "FLUSH_SECONDS", 0.0)
    writer = TensorBoardWriter(tmp_path)
    writer.add("loss", 0.5, 7)
    assert [event.step for event in read(tmp_path, "loss")] == [7]
    writer.close()


def test_checksum_is_crc_32c() -> None:
    # The standard check value of the digits 1 to 9.
    assert tensorboard._crc32c(b"123456789") == 0xE3069283


def test_writer_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    writer = TensorBoardWriter(tmp_path)
    writer.add("loss", 0.5, 7)
    assert threading.active_count() == before
    writer.close()


def test_uncreatable_folder_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = TensorBoardWriter(tmp_path / "file" / "below")
    writer.add("loss", 0.5, 0)
    warning = writer.close()
    assert warning is not None
    assert "Not a directory" in warning


def test_full_disk_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TensorBoardWriter(tmp_path)
    assert writer._file is not None
    writer._file.close()
    writer._file = Path("/dev/full").open("wb")  # noqa: SIM115 (the writer closes it)
    for step in range(1000):
        writer.add("loss", 0.5, step)
    warning = writer.close()
    assert warning is not None
    assert "No space left" in warning


def test_writer_imports_neither_torch_nor_tensorboard() -> None:
    program = (
        "import sys; import paceline.measure.tensorboard;"
        "sys.exit(bool({'torch', 'tensorboard', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
