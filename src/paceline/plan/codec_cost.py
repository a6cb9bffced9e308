"""Cost of a codec: the time of encoding and decoding, and the bytes that it sends.

The time is linear in the size of the gradient, and in the number of workers whose payloads are
decoded, as measured by `paceline comm --codecs`. The bytes are those that the codec itself states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.compression import CODECS, create, option_names
from paceline.errors import MissingMeasurementError
from paceline.plan.calibration import CodecTiming

if TYPE_CHECKING:
    from paceline.compression.codec import Codec, WireBytes

Floats = NDArray[np.float64]

ELEMENT_BYTES = 4
CODEC_OPTIONS = ("codec", "chunk", "ratio", "rank")
PLANNED_CODECS = tuple(name for name in CODECS.names() if name not in ("none", "powersgd"))
"""What powersgd sends depends on the shapes of tensors, which runs do not record."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Of one codec; sizes are those of float32 gradients."""

    codec: Codec
    lines: Mapping[int, tuple[float, float]]
    """By number of workers: seconds of an exchange, and of each byte of it."""
    factor: float = 1.0
    """On all times."""

    def wire_bytes(self, size_bytes: float) -> WireBytes:
        """What a worker contributes to sums and gathers."""
        return self.codec.wire_bytes(max(1, round(size_bytes / ELEMENT_BYTES)), ELEMENT_BYTES)

    def seconds(self, size_bytes: float, workers: int) -> float:
        """Of encoding, and of decoding the payloads of all workers."""
        times = {
            count: constant + slope * size_bytes for count, (constant, slope) in self.lines.items()
        }
        fewest, most = min(times), max(times)
        growth = (times[most] - times[fewest]) / (most - fewest) if most > fewest else 0.0
        seconds = times[fewest] + max(0.0, growth) * (workers - fewest)
        return self.factor * max(0.0, seconds)


def codec_cost(
    options: Mapping[str, str],
    timings: Sequence[CodecTiming],
    random: np.random.Generator | None = None,
) -> CodecCost | None:
    """The cost of the codec of a strategy's options; None without one.

    With `random`, that of a bootstrap sample. MissingMeasurementError if it was not measured.
    """
    name = options.get("codec", "none")
    if name == "none":
        return None
    own = [each for each in timings if each.codec == name and len(each.points) > 1]
    if not own:
        raise MissingMeasurementError(
            f"the time of codec {name}", f"`paceline comm --codecs {name} --json FILE`"
        )
    lines = {each.workers: _line(each, random) for each in own}
    return CodecCost(_create(name, tuple(sorted(options.items()))), lines)


@cache
def _create(name: str, options: tuple[tuple[str, str], ...]) -> Codec:
    known = option_names(name)
    return create(name, {key: value for key, value in options if key in known})


def _line(timing: CodecTiming, random: np.random.Generator | None) -> tuple[float, float]:
    """Seconds of a call, and of each byte, by least squares of relative errors."""
    sizes = np.array([float(point.size_bytes) for point in timing.points])
    seconds = np.array([_median(point.seconds, random) for point in timing.points])
    slope, constant = np.polyfit(sizes, seconds, 1, w=1 / np.maximum(seconds, 1e-9))
    if constant < 0:
        return 0.0, float(np.median(seconds / sizes))
    return float(constant), max(0.0, float(slope))


def _median(samples: Sequence[float], random: np.random.Generator | None) -> float:
    values = np.asarray(samples)
    return float(np.median(values if random is None else random.choice(values, len(values))))
