"""Codecs by name: how a gradient is made smaller on the wire. An entry is a `Codec` class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.config.conversion import convert_options, option_types
from paceline.errors import UserCodeError
from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.compression.codec import Codec

CODECS: Registry[type[Codec]] = Registry("codec")
for _name, _path, _summary in (
    ("none", "casts:Uncompressed", "gradients as they are; exact"),
    ("bf16", "casts:BFloat16", "half the bytes: 8 bits of precision over the range of fp32"),
    (
        "fp16",
        "casts:Float16",
        "half the bytes: 11 bits of precision under a scale shared by all workers",
    ),
    (
        "int8",
        "int8:Int8",
        "a quarter of the bytes: whole numbers up to 127 with a scale for each chunk",
    ),
    ("topk", "topk:TopK", "only the largest entries and where they are; the rest waits its turn"),
    ("powersgd", "powersgd:PowerSGD", "each weight matrix as the product of two thin ones"),
):
    CODECS.register(_name, f"paceline.compression.{_path}", _summary)


def create(name: str, options: Mapping[str, str]) -> Codec:
    """A codec with its options given as text; every bad option is reported at once."""
    chosen = _class_of(name)
    return chosen(**convert_options(f"codec {name}", chosen, options))


def option_names(name: str) -> tuple[str, ...]:
    """The options that `create` takes for this codec."""
    return tuple(option_types(_class_of(name)))


def _class_of(name: str) -> type[Codec]:
    from paceline.compression.codec import Codec

    chosen = CODECS.load(name)
    if not (isinstance(chosen, type) and issubclass(chosen, Codec)):
        raise UserCodeError(
            f"codec {name!r}: must be a subclass of paceline.compression.codec.Codec"
        )
    return chosen
