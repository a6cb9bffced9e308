"""`paceline comm`: benchmark communication between workers."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.config_flags import add_config_flags, given_flags
from paceline.errors import RecordsError, UsageError, shown
from paceline.launch import environment
from paceline.launch.fork_server import ForkServer

if TYPE_CHECKING:
    from paceline.commbench.spec import BenchmarkSpec

SUMMARY = "measure collectives by size, algorithm and communicator"

DEFAULT_WORKERS = 2


def configure(parser: argparse.ArgumentParser) -> None:
    from paceline.commbench.spec import MACHINE_FIELDS

    parser.epilog = "Default: two workers on this machine."
    selection = parser.add_argument_group("Measurements")
    selection.add_argument(
        "--sizes", metavar="A,B", help="tensor sizes such as 4k,1m,37m (default: 1k to 256m)"
    )
    selection.add_argument("--max-size", metavar="N", help="largest of the default sizes")
    selection.add_argument(
        "--operations",
        metavar="A,B",
        default="all_reduce",
        help="any of all_reduce, reduce_scatter, all_gather, broadcast, gather, scatter,"
        " send_recv (default: all_reduce)",
    )
    selection.add_argument(
        "--algorithms",
        metavar="A,B",
        help="all_reduce algorithms (default: all of `paceline list algorithms`)",
    )
    selection.add_argument(
        "--communicators",
        metavar="A,B",
        help="torch (gloo, or NCCL between GPUs) or hierarchical (shared memory within a machine);"
        " default: both with several workers per machine",
    )
    selection.add_argument(
        "--codecs",
        metavar="A,B",
        help="also time encoding and decoding of these codecs of `paceline list codecs`",
    )
    selection.add_argument(
        "--link", metavar="RATE", help="link bandwidth to compare with, such as 1gbit"
    )
    effort = parser.add_argument_group("Effort")
    effort.add_argument(
        "--repeats",
        metavar="N",
        help="repeats of each measurement (default: what fits in --seconds)",
    )
    effort.add_argument(
        "--seconds",
        metavar="X",
        default="0.3",
        help="time for each size of each algorithm (default: 0.3)",
    )
    effort.add_argument(
        "--most-seconds",
        metavar="X",
        default="2",
        help="skip larger sizes once an operation takes longer (default: 2)",
    )
    effort.add_argument(
        "--pause",
        metavar="X",
        default="0",
        help="seconds before each operation, which is then timed alone, as after the computation of"
        " a step (default: 0)",
    )
    output = parser.add_argument_group("Output")
    output.add_argument("--json", metavar="FILE", help="write the record with all samples")
    output.add_argument("--figure", metavar="FILE", help="draw the results as an .svg file")
    output.add_argument("--quiet", action="store_true", help="show no progress, only the tables")
    add_config_flags(parser, MACHINE_FIELDS)


def run(arguments: argparse.Namespace) -> int:
    from paceline.commbench.spec import make_spec
    from paceline.config.conversion import convert

    machine_settings = given_flags(arguments)
    if not machine_settings.keys() & {"nproc_per_node", "nnodes", "hosts", "cluster"}:
        machine_settings["nproc_per_node"] = str(DEFAULT_WORKERS)

    def number(flag: str, kind: type, text: str | None) -> float | None:
        try:
            value: float | None = None if text is None else convert(kind, text)
        except ValueError as error:
            raise UsageError(f"{flag}: must be {error}, got {shown(text)}") from None
        return value

    repeats = number("--repeats", int, arguments.repeats)
    spec = make_spec(
        machine_settings,
        sizes=arguments.sizes,
        max_size=arguments.max_size,
        operations=arguments.operations,
        algorithms=arguments.algorithms,
        communicators=arguments.communicators,
        codecs=arguments.codecs,
        repeats=None if repeats is None else int(repeats),
        seconds=number("--seconds", float, arguments.seconds) or 0.0,
        most_seconds=number("--most-seconds", float, arguments.most_seconds) or 0.0,
        link=arguments.link,
        pause=number("--pause", float, arguments.pause) or 0.0,
    )
    _check_files(arguments)
    with _fork_server(spec) or nullcontext() as fork_server:
        from paceline.commbench.launch import measure

        record = measure(spec, arguments.quiet, fork_server)
    if record is None:
        return 0
    from paceline.commbench.render import print_record

    print_record(record)
    if arguments.json:
        from paceline.records import write_json

        try:
            write_json(Path(arguments.json), record)
        except OSError as error:
            raise RecordsError(f"cannot write {arguments.json}: {error.strerror}") from None
    if arguments.figure:
        from paceline.report.comm_figure import draw_comm_figure

        try:
            Path(arguments.figure).write_text(draw_comm_figure(record), encoding="utf-8")
        except OSError as error:
            raise RecordsError(f"cannot write {arguments.figure}: {error.strerror}") from None
    return 0


def _fork_server(spec: BenchmarkSpec) -> ForkServer | None:
    """Imports torch once for all workers of this machine; None if there are none to start."""
    if environment.detect() is not None or spec.machines.hosts or spec.machines.launcher == "ray":
        return None
    import_module("paceline.commbench.runner")
    return ForkServer.fork()


def _check_files(arguments: argparse.Namespace) -> None:
    """Reject output paths that cannot be written before minutes of measuring."""
    for flag, name in (("--json", arguments.json), ("--figure", arguments.figure)):
        if name and not Path(name).absolute().parent.is_dir():
            raise RecordsError(f"{flag}: no such folder: {Path(name).parent}")
        if name and Path(name).is_dir():
            raise RecordsError(f"{flag}: {name} is a folder: name a file in it")
    if arguments.figure and Path(arguments.figure).suffix.lower() != ".svg":
        raise UsageError(
            f"--figure: figures are SVG: must end in .svg, got {shown(arguments.figure)}"
        )
