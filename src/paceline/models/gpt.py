"""GPT: a decoder of token sequences that predicts the next token at every position.

Pre-norm blocks with RMSNorm, rotary position embeddings, causal attention and SwiGLU; no biases.
The sizes are those of minGPT with the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute_in_backward

from paceline.config.conversion import Limits
from paceline.errors import ConfigError
from paceline.models.attention import KeysAndValues, causal_attention, rotate, rotation_of
from paceline.models.determinism import fix_order_of_sums

Layers = Annotated[int, Limits(minimum=1, maximum=1024)]
Width = Annotated[int, Limits(minimum=2, maximum=65536)]
Heads = Annotated[int, Limits(minimum=1, maximum=1024)]
Context = Annotated[int, Limits(minimum=1, maximum=2**20)]

NORM_EPSILON = 1e-5
HIDDEN_MULTIPLE = 32
"""The hidden units of SwiGLU are a multiple of this, which suits vector units."""


def gpt_nano(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    layers: Layers = 3,
    width: Width = 48,
    heads: Heads = 3,
    context: Context | None = None,
    checkpoint: bool = False,
) -> nn.Module:
    return _gpt("gpt-nano", sample_shape, classes, layers, width, heads, context, checkpoint)


def gpt_micro(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    layers: Layers = 4,
    width: Width = 128,
    heads: Heads = 4,
    context: Context | None = None,
    checkpoint: bool = False,
) -> nn.Module:
    return _gpt("gpt-micro", sample_shape, classes, layers, width, heads, context, checkpoint)


def gpt_mini(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    layers: Layers = 6,
    width: Width = 192,
    heads: Heads = 6,
    context: Context | None = None,
    checkpoint: bool = False,
) -> nn.Module:
    return _gpt("gpt-mini", sample_shape, classes, layers, width, heads, context, checkpoint)


def _gpt(
    name: str,
    sample_shape: tuple[int, ...],
    vocabulary: int,
    layers: int,
    width: int,
    heads: int,
    context: int | None,
    checkpoint: bool,
) -> nn.Module:
    """Check the options against each other and the data; `context` is at least a window of it."""
    problems = []
    if len(sample_shape) != 1:
        problems.append(
            f"--model: {name} needs sequences of tokens, but samples have shape {sample_shape}"
        )
    elif context is not None and context < sample_shape[0]:
        problems.append(
            f"--model-options context: must be at least {sample_shape[0]}, the length of the"
            f" samples of --data, got {context}"
        )
    if width % (2 * heads):
        problems.append(
            "--model-options heads: must divide width into an even number of units per head,"
            f" got {heads} heads for a width of {width}"
        )
    if problems:
        raise ConfigError(problems)
    return GPT(vocabulary, layers, width, heads, context or sample_shape[0], checkpoint)


class GPT(nn.Module):
    """Maps tokens (samples, length) to logits (samples, length, vocabulary)."""

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        context: int,
        checkpoint: bool = False,
    ) -> None:
        """`context` is the longest sequence; `checkpoint` recomputes activations in backward."""
        super().__init__()
        self.context = context
        self._head_width = width // heads
        # Also the matrix of the head. It is not part of a layer, because fsdp frees the weights of
        # a layer between its uses.
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.blocks = nn.ModuleList(Block(width, heads, checkpoint) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        # The standard deviation of GPT-2, 0.02, for a width of 625.
        deviation = 0.5 / math.sqrt(width)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=deviation)
        for block in self.blocks:
            assert isinstance(block, Block)
            # Each block adds two outputs to the residual stream.
            for layer in (block.project, block.shrink):
                nn.init.normal_(layer.weight, std=deviation / math.sqrt(2 * layers))

    def undecayed_weights(self) -> Iterable[nn.Parameter]:
        yield self.embedding
        yield from (weight for weight in self.parameters() if weight.dim() == 1)

    def new_cache(self) -> list[KeysAndValues]:
        """Return an empty cache for `forward`, one entry per block."""
        return [KeysAndValues() for _ in self.blocks]

    def forward(self, tokens: Tensor, cache: Sequence[KeysAndValues] | None = None) -> Tensor:
        """With a cache, `tokens` follow those of earlier calls: any number at first, then one."""
        hidden = F.embedding(tokens, self.embedding)
        if hidden.is_cuda:
            fix_order_of_sums(hidden)
        first = cache[0].length if cache else 0
        # Not a buffer: strategies would communicate it.
        rotation = rotation_of(first, tokens.shape[1], self._head_width, hidden)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, rotation, cache[index] if cache else None)
        return F.linear(self.norm(hidden), self.embedding)


class Block(nn.Module):
    """Attention, then SwiGLU; each is added to the residual stream."""

    def __init__(self, width: int, heads: int, checkpoint: bool) -> None:
        super().__init__()
        self._heads, self._checkpoint = heads, checkpoint
        # Two thirds of four times the width, because SwiGLU has three matrices instead of two.
        hidden = math.ceil(8 / 3 * width / HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.gate_and_expand = nn.Linear(width, 2 * hidden, bias=False)
        self.shrink = nn.Linear(hidden, width, bias=False)

    def forward(
        self, hidden: Tensor, rotation: Tensor, seen: KeysAndValues | None = None
    ) -> Tensor:
        if self._checkpoint and torch.is_grad_enabled():
            # Nothing in a block is random.
            output: Tensor = recompute_in_backward(
                self._forward, hidden, rotation, seen, use_reentrant=False, preserve_rng_state=False
            )
            return output
        return self._forward(hidden, rotation, seen)

    def _forward(self, hidden: Tensor, rotation: Tensor, seen: KeysAndValues | None) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), rotation, seen)
        gate, expanded = self.gate_and_expand(self.norm(hidden)).chunk(2, dim=-1)
        output: Tensor = hidden + self.shrink(F.silu(gate) * expanded)
        return output

    def _attend(self, hidden: Tensor, rotation: Tensor, seen: KeysAndValues | None) -> Tensor:
        # (samples, length, 3 * width) -> three times (samples, heads, length, head width)
        parts = self.queries_keys_values(hidden).unflatten(-1, (3, self._heads, -1))
        rotated, (values,) = parts.permute(2, 0, 3, 1, 4).split([2, 1])
        queries, keys = rotate(rotated, rotation)
        if seen is not None:
            keys, values = seen.extend(keys, values)
        attended = causal_attention(queries, keys, values)
        projected: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return projected
