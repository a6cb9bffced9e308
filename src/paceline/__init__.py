"""Data-parallel PyTorch training that measures itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.compression.codec import Codec as Codec
    from paceline.launch.join import join as join
    from paceline.profiler.program import profile as profile
    from paceline.profiler.program import step as step
    from paceline.strategies.strategy import Strategy as Strategy
    from paceline.training.generation import generate as generate

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "Strategy",
    "__version__",
    "generate",
    "join",
    "load_ipython_extension",
    "profile",
    "step",
    "train",
    "unload_ipython_extension",
]


def train(**settings: Any) -> dict[str, Any]:
    """Train a model; the arguments are the settings of docs/config.md.

    Returns the contents of result.json, with the outcome in "status". Invalid values raise a
    `paceline.errors.ConfigError` with all problems; other errors that the caller can fix raise
    another `paceline.errors.UsageError`.
    """
    from paceline.config import from_mapping
    from paceline.errors import UsageError

    try:
        config = from_mapping(settings)
        from paceline.launch import launcher

        return launcher.train(config, quiet=True).result or {}
    except UsageError as error:
        # The error is in the caller's code: frames inside paceline would hide it.
        raise error.with_traceback(None) from error.__cause__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext paceline`: measure the training in the cells that follow."""
    from paceline.cli import notebook

    notebook.start(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext paceline`: end the measurement, print its summary and write the report."""
    from paceline.cli import notebook

    notebook.stop()


def __getattr__(name: str) -> Any:
    # Loaded on first use, because they import torch.
    if name == "generate":
        from paceline.training.generation import generate

        return generate
    if name == "join":
        from paceline.launch.join import join

        return join
    if name in ("profile", "step"):
        from paceline.profiler import program

        return getattr(program, name)
    if name == "Strategy":
        from paceline.strategies.strategy import Strategy

        return Strategy
    if name == "Codec":
        from paceline.compression.codec import Codec

        return Codec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
