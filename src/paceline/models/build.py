"""Build a model by name, with initial weights that depend only on the seed and the training data.

`image_shape` is the check of the sample shape that the convolutional models share, `Width` their
option.
"""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config.conversion import Limits, convert_options
from paceline.errors import ConfigError, PacelineError, UserCodeError, error_line, whole_error_line
from paceline.models import MODELS, TOKEN_MODELS

DATA_PARAMETERS = ("sample_shape", "classes")
"""Parameters of a model that the dataset determines."""

Width = Annotated[float, Limits(above=0, maximum=64)]
"""Option of the registered models: factor of the channels or units of every hidden layer."""


def scaled(channels: int, width: float) -> int:
    """Return a number of channels or units times the width, at least one."""
    return max(1, round(channels * width))


def build_model(
    name: str,
    sample_shape: tuple[int, ...],
    classes: int,
    seed: int,
    *,
    options: Mapping[str, str] | None = None,
    has_tokens: bool = False,
) -> nn.Module:
    """Build a registered model or a user-defined `package.module:name` on the CPU.

    The same seed gives the same initial weights; global random states are preserved. A user-defined
    class or function receives `sample_shape` and `classes` as keyword arguments if it has
    parameters with these names, no arguments if it requires none, and otherwise both by position.
    `options` are further keyword arguments as text, converted by the annotations or defaults of the
    parameters. For token data, `sample_shape` is (length,) and `classes` the size of the
    vocabulary.
    """
    factory = MODELS.load(name)
    if name in MODELS:
        if has_tokens != (name in TOKEN_MODELS):
            needed, given = "images or floats", "tokens"
            if not has_tokens:
                needed, given = given, needed
            raise ConfigError(
                [f"--model: {name} needs {needed}, but the samples of --data are {given}"]
            )
        with seeded(seed):
            return factory(sample_shape, classes, **model_options(name, options or {}))
    return _build_custom_model(name, factory, sample_shape, classes, seed, options or {})


@runtime_checkable
class DataDependentModel(Protocol):
    """A model whose initial weights depend on training samples."""

    init_samples: int
    """How many samples `initialize_from` gets, at most."""

    def initialize_from(self, inputs: Tensor) -> None:
        """Set initial weights from the first training samples, as the model receives them."""


def initialize_from_data(
    name: str, model: nn.Module, first_inputs: Callable[[int], Tensor], seed: int
) -> None:
    """Initialize a `DataDependentModel`; `first_inputs(n)` returns n inputs, or fewer."""
    if not isinstance(model, DataDependentModel):
        return
    try:
        with seeded(seed):
            model.initialize_from(first_inputs(model.init_samples))
    except Exception as error:
        cause = f"{whole_error_line(error)}{location_in(type(model), error)}"
        raise UserCodeError(f"cannot initialize model {name!r} from data: {cause}") from error


@runtime_checkable
class GroupedModel(Protocol):
    """A model whose weights are not all updated in the same way."""

    def undecayed_weights(self) -> Iterable[nn.Parameter]:
        """Return the weights without weight decay: embeddings, scales of norms, biases.

        Muon leaves them to AdamW.
        """


def model_options(name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return `options` as keyword arguments of a model; a ConfigError has every invalid one."""
    if not options:
        return {}
    factory = MODELS.load(name)
    try:
        given = _data_parameters(factory)
        return convert_options(
            f"model {name}", factory, options, flag="--model-options", given=given
        )
    except (NameError, TypeError, ValueError) as error:
        # A user's annotation that cannot be evaluated, or a callable without a signature.
        raise UserCodeError(
            f"--model-options: cannot read the parameters of model {name!r}: {error_line(error)}"
        ) from error


def _data_parameters(factory: Callable[..., object]) -> tuple[str, ...]:
    """Return the parameters that receive the sample shape and the number of classes."""
    parameters = inspect.signature(factory).parameters
    if any(name in parameters for name in DATA_PARAMETERS):
        return DATA_PARAMETERS
    required = [name for name, item in parameters.items() if item.default is item.empty]
    return tuple(required[: len(DATA_PARAMETERS)])


def _build_custom_model(
    name: str,
    factory: Callable[..., object],
    sample_shape: tuple[int, ...],
    classes: int,
    seed: int,
    options: Mapping[str, str],
) -> nn.Module:
    """Build a user-defined model; any exception in its code becomes a one-line UserCodeError."""
    if isinstance(factory, nn.Module):
        raise UserCodeError(
            f"model {name!r} is already an instance: use the class or function that builds it, "
            "so that its weights depend on the seed"
        )
    try:
        arguments = _arguments_for(factory, sample_shape, classes, model_options(name, options))
        with seeded(seed):
            model = factory(*arguments.args, **arguments.kwargs)
    except PacelineError:
        raise
    except Exception as error:
        cause = f"{whole_error_line(error)}{location_in(factory, error)}"
        raise UserCodeError(f"cannot build model {name!r}: {cause}") from error
    if not isinstance(model, nn.Module):
        raise UserCodeError(
            f"model {name!r} returned {type(model).__name__}, expected a torch.nn.Module"
        )
    return model


def location_in(code: Callable[..., object], error: Exception) -> str:
    """Return the last line of a user's file in a traceback, such as " (mine.py:3)", or nothing."""
    module = sys.modules.get(getattr(code, "__module__", ""))
    file = getattr(module, "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if file and frame.filename == file]
    return f" ({Path(file).name}:{lines[-1]})" if file and lines else ""


def _arguments_for(
    factory: Callable[..., object],
    sample_shape: tuple[int, ...],
    classes: int,
    options: Mapping[str, Any],
) -> inspect.BoundArguments:
    """Bind by name first, so that other optional parameters are never filled by position."""
    signature = inspect.signature(factory)
    available = dict(zip(DATA_PARAMETERS, (sample_shape, classes), strict=True))
    by_name = {key: value for key, value in available.items() if key in signature.parameters}
    for arguments, keywords in (((), by_name), ((sample_shape, classes), {})):
        try:
            return signature.bind(*arguments, **keywords, **options)
        except TypeError:
            continue
    raise TypeError("must accept (sample_shape, classes) or no arguments")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every random generator that a model may use, and restore them afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # Do not initialize CUDA here: child processes could no longer be forked.
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


def image_shape(
    model: str, sample_shape: tuple[int, ...], min_side: int = 1
) -> tuple[int, int, int]:
    """Return (channels, height, width); raises ConfigError if not an image or too small."""
    if len(sample_shape) == 3:
        channels, height, width = sample_shape
        if channels >= 1 and min(height, width) >= min_side:
            return channels, height, width
    raise ConfigError(
        [
            f"--model: {model} needs images (channels, height, width) of at least "
            f"{min_side}x{min_side} pixels, but samples have shape {sample_shape}; "
            "softmax and mlp accept any shape"
        ]
    )
