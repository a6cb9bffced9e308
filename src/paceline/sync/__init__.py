"""Strategies by name: the ways of keeping replicas in step. An entry is a `Strategy` class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.sync.strategy import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry("strategy")
STRATEGIES.register("single", "paceline.sync.single:Single", "one worker, nothing to keep in step")
