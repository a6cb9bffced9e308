"""Sample text from a trained language model."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.config import RunConfig, flag_of
from paceline.config.conversion import LARGEST_INTEGER, Limits, convert
from paceline.config.run_config import DEFAULT_CONTEXT
from paceline.data import DATASETS, TEXT_DATASETS
from paceline.data.loading import load_dataset
from paceline.data.text import VOCABULARY
from paceline.errors import CheckpointError, ConfigError, DataError, UserCodeError, shown
from paceline.models.build import build_model
from paceline.records import RunFolder
from paceline.training.checkpoint import newest_checkpoint
from paceline.training.run_state import check_fits

_KINDS: dict[str, Any] = {
    "tokens": Annotated[int, Limits(minimum=1)],
    "temperature": Annotated[float, Limits(minimum=0)],
    "top_k": Annotated[int, Limits(minimum=1)] | None,
    "seed": Annotated[int, Limits(minimum=0, maximum=LARGEST_INTEGER)],
}

_log = logging.getLogger("paceline")


def generate(
    run: str | Path,
    prompt: str = "\n",
    tokens: int | str = 200,
    *,
    temperature: float | str = 1.0,
    top_k: int | str | None = None,
    seed: int | str = 0,
) -> Iterator[str]:
    """Continue a prompt with the newest checkpoint of a run; yields text as it is generated.

    Each token is drawn from the `top_k` most probable ones, or from all. A temperature below 1
    prefers probable tokens; 0 always takes the most probable one. The same seed gives the same
    text. If tokens are not bytes of text, the prompt and the generated text are token numbers,
    separated by spaces.
    """
    sampling = _convert(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    folder = RunFolder.open(run)
    config = folder.read_config()
    language = _language(run, config)
    encoded = language.encoding.encode(prompt)
    _check_prompt(encoded, language.vocabulary)
    checkpoint = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            f"{run} has no checkpoint: train for at least one epoch with --checkpoint-every epoch,"
            " or with a number of steps that divides --iterations"
        )
    for text in checkpoint.warnings:
        _log.warning(text)
    model = build_model(
        config.model,
        (language.context,),
        language.vocabulary,
        config.seed,
        options=config.model_options,
        has_tokens=True,
    )
    check_fits(checkpoint.state, config, model)
    context = getattr(model, "context", language.context)
    drawn = sample_tokens(ModelScores(config.model, model), encoded, context=context, **sampling)
    return language.encoding.decode(drawn)


def _convert(**values: Any) -> dict[str, Any]:
    problems, converted = [], {}
    for name, value in values.items():
        try:
            converted[name] = convert(_KINDS[name], value)
        except ValueError as error:
            problems.append(f"{flag_of(name)}: must be {error}, got {shown(value)}")
    if problems:
        raise ConfigError(problems)
    return converted


class Scores(Protocol):
    """A model as `sample_tokens` uses it."""

    def __call__(self, tokens: list[int]) -> Tensor:
        """Return the logits of the token after these."""


def sample_tokens(
    scores: Scores,
    prompt: list[int],
    tokens: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield tokens that continue a prompt; the model sees at most the last `context` ones.

    Once it has seen that many, the oldest eighth is dropped at once, because a model then computes
    the others again.
    """
    dropped = max(1, context // 8)
    generator = torch.Generator().manual_seed(seed)
    seen = prompt[-context:]
    for _ in range(tokens):
        logits = scores(seen).double()
        if top_k is not None:
            logits, kept = logits.topk(min(top_k, len(logits)))
        else:
            kept = torch.arange(len(logits))
        if temperature == 0:
            choice = logits.argmax()
        else:
            # Divided after the largest is subtracted, so that a low temperature does not overflow.
            probabilities = ((logits - logits.max()) / temperature).softmax(0)
            choice = torch.multinomial(probabilities, 1, generator=generator)[0]
        token = int(kept[choice])
        seen = [*seen, token]
        if len(seen) > context:
            seen = seen[dropped:]
        yield token


@runtime_checkable
class CachingModel(Protocol):
    """A model whose second argument is a cache: it then needs only the tokens that follow."""

    def new_cache(self) -> Any:
        """Return an empty cache. It gets any number of tokens at first, then one at a time."""


class ModelScores:
    """The logits of a model; those of a `CachingModel` are computed token by token."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self._name, self._model = name, model.eval()
        self._cache: Any = None
        self._seen: list[int] = []
        """Tokens that the cache has."""

    def __call__(self, tokens: list[int]) -> Tensor:
        new, arguments = tokens, []
        if isinstance(self._model, CachingModel):
            if self._cache is not None and self._seen == tokens[:-1]:
                new = tokens[-1:]
            else:
                self._cache = self._model.new_cache()
            arguments, self._seen = [self._cache], tokens
        with torch.inference_mode():
            outputs = self._model(torch.tensor([new]), *arguments)
        # A model that also computes its loss returns None for it here, and may return the logits
        # of the last position only.
        if isinstance(outputs, tuple | list):
            outputs = next((one for one in outputs if one is not None), None)
        elif isinstance(outputs, Mapping):
            outputs = outputs.get("logits", outputs.get("outputs"))
        is_logits = isinstance(outputs, Tensor) and outputs.dim() == 3 and len(outputs) == 1
        if not is_logits or outputs.shape[1] not in (1, len(new)):
            raise UserCodeError(
                f"model {self._name!r} must return logits of shape (samples, length, vocabulary)"
                " to generate text"
            )
        last: Tensor = outputs[0, -1]
        return last


class Encoding(Protocol):
    """Text as tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> Iterator[str]: ...


class Utf8:
    """Tokens are the bytes of text."""

    def encode(self, text: str) -> list[int]:
        # Arguments of a command may contain bytes that are not UTF-8.
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield each character when its last byte is known."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            if character := decoder.decode(bytes([token])):
                yield character
        if rest := decoder.decode(b"", final=True):
            yield rest


class Numbers:
    """Tokens are written as numbers, because their text is unknown."""

    def encode(self, text: str) -> list[int]:
        with suppress(ValueError):
            if tokens := [int(word) for word in text.split()]:
                return tokens
        got = f", got {shown(text)}" if text.strip() else ", such as --prompt 0"
        raise ConfigError(
            [
                "--prompt: must be token numbers separated by spaces, because the data of the run"
                f" is not text{got}"
            ]
        )

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        for token in tokens:
            yield f" {token}"


@dataclass(frozen=True, slots=True)
class Language:
    """What a run was trained on."""

    vocabulary: int
    context: int
    encoding: Encoding


def _language(run: str | Path, config: RunConfig) -> Language:
    """Return the language of a run's data. Text is not read: it may have been moved since."""
    entry, _ = DATASETS.split(config.data)
    if entry and entry.name in TEXT_DATASETS:
        return Language(VOCABULARY, config.context or DEFAULT_CONTEXT, Utf8())
    if entry is None:
        dataset = load_dataset(config)
        inputs, targets = dataset.train.inputs, dataset.train.targets
        if dataset.has_tokens and inputs.dim() == 2 and targets.shape == inputs.shape:
            return Language(dataset.classes, dataset.sample_shape[-1], Numbers())
    raise DataError(f"{run} is not a language model: its data is {config.data}, not text or tokens")


def _check_prompt(tokens: list[int], vocabulary: int) -> None:
    unknown = [token for token in tokens if not 0 <= token < vocabulary]
    if unknown:
        raise ConfigError(
            [f"--prompt: token {unknown[0]} is not in the vocabulary of {vocabulary} tokens"]
        )
    if not tokens:
        raise ConfigError(["--prompt: must contain at least one token"])
