"""What a run shows about batch sizes: its gradient noise scale, its steps and its learning rate.

With batch size B, training to the loss of the run takes steps x (1 + N / B) / (1 + N / batch of the
run) steps (analysis/noise_scale.py), if the learning rate changes by the same factor
(measure/noise_scale.py). Time to the loss is these steps times the predicted step time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.analysis.noise_scale import steps_to_loss, whole_run
from paceline.analysis.run import Run
from paceline.measure.noise_scale import learning_rate_factor, read_noise_samples


@dataclass(frozen=True, slots=True)
class Learning:
    noise_scale: float
    """Of the whole run, in samples."""
    batch_size: int
    """Global batch size of the run."""
    low: float | None = None
    high: float | None = None
    """95% confidence interval of the noise scale; `high` is None if it has no upper end, and both
    if there were too few measurements."""
    steps: int | None = None
    """Of the run; None if unknown."""
    loss: float | None = None
    """Test loss that the run reached."""
    learning_rate: float | None = None
    """None if the schedule has several rates, or if unknown."""
    optimizer: str | None = "sgd"
    """None if unknown, as that of a script."""
    source: str = ""
    """Folder of the run."""

    @property
    def interval(self) -> tuple[float, float]:
        """Noise scales to consider, of a run with enough measurements."""
        return self.low or 0.0, math.inf if self.high is None else self.high

    def relative_steps(self, batch: float, noise_scale: float | None = None) -> float:
        """Steps to the loss of the run, relative to those of the run."""
        scale = self.noise_scale if noise_scale is None else noise_scale
        if math.isinf(scale):
            return self.batch_size / batch
        return steps_to_loss(1.0, self.batch_size, batch, scale)

    def rate_factor(self, batch: float) -> float:
        optimizer = self.optimizer or "sgd"
        return learning_rate_factor(batch, self.batch_size, self.noise_scale, optimizer)

    def scaled_rate(self, batch: float) -> float | None:
        return None if self.learning_rate is None else self.learning_rate * self.rate_factor(batch)

    @property
    def rate_rule(self) -> str:
        factor = f"(1 + N / {self.batch_size:,}) / (1 + N / batch)"
        if self.optimizer is None:
            return f"{factor} with SGD, the square root of that with Adam"
        return factor if self.optimizer == "sgd" else f"the square root of {factor}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def learning_of(runs: Sequence[Run]) -> Learning | None:
    """Of the run that measured the noise scale in the most steps; None if none did."""
    scales = [(whole_run(read_noise_samples(run.folder.events_file(0))), run) for run in runs]
    known = [(scale, run) for scale, run in scales if scale is not None and scale.value]
    if not known:
        return None
    scale, run = max(known, key=lambda one: one[0].measurements)
    assert scale.value is not None, "checked above"
    config = run.settings.config if run.settings.kind == "train" else None
    rate = None
    if config is not None and config.schedule != "steps":
        rate = config.lr * config.learning_rate_scale
    return Learning(
        scale.value,
        # The last step of an epoch may be smaller.
        run.settings.global_batch_size or round(scale.batch),
        scale.low,
        scale.high,
        run.iterations,
        run.final("test_loss"),
        rate,
        None if config is None else config.optimizer,
        str(run.folder.path),
    )
