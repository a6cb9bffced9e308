"""Gradient compression: the codec registry. Each entry is a `Codec` class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.config.conversion import option_types
from paceline.registry import Registry

if TYPE_CHECKING:
    from paceline.compression.codec import Codec

CODECS: Registry[type[Codec]] = Registry("codec")
for _name, _path, _summary in (
    ("none", "casts:Uncompressed", "no compression; exact"),
    ("bf16", "casts:BFloat16", "half the bytes: 8 bits of precision, range of fp32"),
    (
        "fp16",
        "casts:Float16",
        "half the bytes: 11 bits of precision, one scale shared by all workers",
    ),
    (
        "int8",
        "int8:Int8",
        "a quarter of the bytes: 8-bit integers with a scale per chunk",
    ),
    ("topk", "topk:TopK", "only the largest entries and their indices, with error feedback"),
    (
        "powersgd",
        "powersgd:PowerSGD",
        "low-rank approximation of weight matrices, with error feedback",
    ),
):
    CODECS.register(_name, f"paceline.compression.{_path}", _summary)


def create(name: str, options: Mapping[str, str]) -> Codec:
    """Create a codec from options given as text; all invalid options are reported at once."""
    return CODECS.create(name, _class_of(name), options)


def option_names(name: str) -> tuple[str, ...]:
    """Return the option names that `create` accepts for this codec."""
    return tuple(option_types(_class_of(name)))


def _class_of(name: str) -> type[Codec]:
    from paceline.compression.codec import Codec

    return CODECS.load_class(name, Codec, "paceline.compression.codec.Codec")  # type: ignore[type-abstract]
