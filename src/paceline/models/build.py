"""What a convolutional model asks of the shape of its samples.

From a model's name to a model with the weights that a seed gives it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from paceline.errors import ConfigError, PacelineError, UserCodeError, error_line
from paceline.models import MODELS


def image_shape(
    model: str, sample_shape: tuple[int, ...], smallest_side: int = 1
) -> tuple[int, int, int]:
    """`sample_shape` as channels, height and width; ConfigError if it is no image or too small."""
    if len(sample_shape) == 3:
        channels, height, width = sample_shape
        if channels >= 1 and min(height, width) >= smallest_side:
            return channels, height, width
    raise ConfigError(
        [
            f"--model: {model} needs images (channels, height, width) of at least "
            f"{smallest_side}x{smallest_side} pixels, but samples have the shape {sample_shape}; "
            "softmax and mlp take any shape"
        ]
    )


def build_model(name: str, sample_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A registered model, or a user's `package.module:name`, for these samples, on the CPU.

    The same seed gives the same initial weights, and the random state outside is left as it was. A
    user's class or function gets `sample_shape` and `classes` by name where it has parameters of
    these names, nothing if it needs nothing, and otherwise both by position.
    """
    factory = MODELS.load(name)
    if name in MODELS:
        with _seeded(seed):
            return factory(sample_shape, classes)
    return _build_users_model(name, factory, sample_shape, classes, seed)


def _build_users_model(
    name: str,
    factory: Callable[..., object],
    sample_shape: tuple[int, ...],
    classes: int,
    seed: int,
) -> nn.Module:
    """Whatever goes wrong inside the user's code becomes one line that names it and the cause."""
    if isinstance(factory, nn.Module):
        raise UserCodeError(
            f"model {name!r} is built already: give the class or function that builds it, "
            "so that its weights follow the seed"
        )
    try:
        arguments = _arguments_for(factory, sample_shape, classes)
        with _seeded(seed):
            model = factory(*arguments.args, **arguments.kwargs)
    except PacelineError:
        raise
    except Exception as error:
        cause = error_line(error)
        raise UserCodeError(f"model {name!r} could not be built: {cause}") from error
    if not isinstance(model, nn.Module):
        raise UserCodeError(
            f"model {name!r} gave a {type(model).__name__}: it must give a torch.nn.Module"
        )
    return model


def _arguments_for(
    factory: Callable[..., object], sample_shape: tuple[int, ...], classes: int
) -> inspect.BoundArguments:
    """By name first, so that a factory's own optional parameters are never filled by position."""
    signature = inspect.signature(factory)
    offered: dict[str, object] = {"sample_shape": sample_shape, "classes": classes}
    by_name = {key: value for key, value in offered.items() if key in signature.parameters}
    for arguments, keywords in (((), by_name), ((sample_shape, classes), {})):
        try:
            return signature.bind(*arguments, **keywords)
        except TypeError:
            continue
    raise TypeError("it must take (sample_shape, classes), or no arguments")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every generator that a model may draw its weights from, and restore them afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # A process that has not used CUDA yet must not start it here: its children could not fork.
    cuda_devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            torch.default_generator.manual_seed(seed)
            for device in cuda_devices:
                torch.cuda.default_generators[device].manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
