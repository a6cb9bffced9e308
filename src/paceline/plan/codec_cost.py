"""Cost of a codec: the time of encoding and decoding, and the bytes that it sends.

The time is linear in the size of the gradient, and in the number of workers whose payloads are
decoded, as measured by `paceline comm --codecs`. A codec that compresses each matrix by itself
takes the measured time for each of them. The bytes are those that the codec itself states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from paceline.compression import CODECS, create, option_names
from paceline.errors import MissingMeasurementError
from paceline.plan.calibration import CodecTiming, Gradient

if TYPE_CHECKING:
    from paceline.compression.codec import Codec, WireBytes

ELEMENT_BYTES = 4
CODEC_OPTIONS = ("codec", "chunk", "ratio", "rank")
PLANNED_CODECS = tuple(name for name in CODECS.names() if name != "none")


def without_codec(options: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in options.items() if key not in CODEC_OPTIONS}


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Of one codec; sizes are those of float32 gradients."""

    codec: Codec
    lines: Mapping[int, tuple[float, float]]
    """By number of workers: seconds of an exchange, and of each byte of it."""
    factor: float = 1.0
    """On all times."""

    def wire_bytes(self, gradients: Sequence[Gradient]) -> WireBytes:
        """What a worker contributes to sums and gathers, for gradients in one exchange.

        MissingMeasurementError if it depends on their shapes, which are not known.
        """
        total = sum(each.size_bytes for each in gradients)
        shapes = []
        if self.codec.compresses_matrices:
            for each in gradients:
                if each.shape is None:
                    raise MissingMeasurementError(
                        "the shapes of the model's tensors", "a run of this version"
                    )
                shapes.append(each.shape)
        return self.codec.wire_bytes(max(1, round(total / ELEMENT_BYTES)), ELEMENT_BYTES, shapes)

    def seconds(self, gradients: Sequence[Gradient], workers: int) -> float:
        """Of encoding, and of decoding the payloads of all workers."""
        encoded, calls = gradients, 1
        if self.codec.compresses_matrices:
            encoded = [each for each in gradients if self._is_compressed(each)]
            calls = len(encoded)
        size_bytes = sum(each.size_bytes for each in encoded)
        times = {
            count: calls * constant + slope * size_bytes
            for count, (constant, slope) in self.lines.items()
        }
        fewest, most = min(times), max(times)
        growth = (times[most] - times[fewest]) / (most - fewest) if most > fewest else 0.0
        seconds = times[fewest] + max(0.0, growth) * (workers - fewest)
        return self.factor * max(0.0, seconds)

    def _is_compressed(self, gradient: Gradient) -> bool:
        return sum(self.wire_bytes([gradient]).sums) < gradient.size_bytes


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
    codec = _create(name, tuple(sorted(options.items())))
    own = [
        each
        for each in timings
        if each.codec == name
        and len(each.points) > 1
        and each.has_matrices >= codec.compresses_matrices
    ]
    if not own:
        raise MissingMeasurementError(
            f"the time of codec {name}", f"`paceline comm --codecs {name} --json FILE`"
        )
    lines = {each.workers: _line(each, random) for each in own}
    return CodecCost(codec, lines)


def plannable_codecs(
    timings: Sequence[CodecTiming], gradients: Sequence[Gradient]
) -> dict[str, None]:
    """Names of the codecs whose cost for these gradients is known, in order."""
    found: dict[str, None] = {}
    for name in dict.fromkeys(timing.codec for timing in timings):
        if name in PLANNED_CODECS:
            with suppress(MissingMeasurementError):
                cost = codec_cost({"codec": name}, timings)
                if cost is not None and cost.wire_bytes(gradients):
                    found[name] = None
    return found


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
