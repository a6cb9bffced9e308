"""One worker: the yardstick that every other strategy is compared with."""

from __future__ import annotations

from typing import ClassVar

from paceline.comm.cost import Cost, Network
from paceline.sync.strategy import ModelShape, Strategy


class Single(Strategy):
    most_workers: ClassVar[int | None] = 1

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        return Cost(seconds=0.0, bytes_sent=0, messages=0)
