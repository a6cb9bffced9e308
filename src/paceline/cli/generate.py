"""`paceline generate`: sample text from a trained language model."""

from __future__ import annotations

import argparse
import sys
from itertools import chain

SUMMARY = "sample text from a language model"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="folder of a run with a checkpoint")
    parser.add_argument(
        "--prompt", metavar="TEXT", default="\n", help="text to continue (default: a line break)"
    )
    parser.add_argument(
        "--tokens", metavar="N", default=200, help="tokens to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        metavar="X",
        default=1.0,
        help="below 1: prefer probable tokens; 0: the most probable one (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k", metavar="K", help="draw from the K most probable tokens (default: all)"
    )
    parser.add_argument(
        "--seed", metavar="N", default=0, help="seed of the draws (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    from paceline.training.generation import generate

    pieces = generate(
        arguments.folder,
        arguments.prompt,
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    for piece in chain([arguments.prompt], pieces, ["\n"]):
        sys.stdout.write(_printable(piece))
        sys.stdout.flush()
    return 0


def _printable(text: str) -> str:
    """Replace characters that could control the terminal: a model may generate any."""
    return "".join(
        character
        if character.isprintable() or character in "\n\r\t"
        else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
