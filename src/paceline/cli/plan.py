"""`paceline plan`: predict step times of other numbers of workers, links and strategies.

It plans from existing records, or measures a job in short runs first.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.cli.config_flags import add_config_flags, given_flags
from paceline.errors import UsageError, shown

if TYPE_CHECKING:
    from paceline.plan.cluster_simulation import Failures, Racks
    from paceline.plan.plan import Request

SUMMARY = "predict step times of more workers, other links and other strategies"

T = TypeVar("T")

MOST_WORKERS = 10_000
MEASURED_FIELDS = (
    "model_options", "data", "data_dir", "context", "augment", "optimizer", "momentum", "precision",
    "threads", "cluster",
)  # fmt: skip
"""Settings of a measured job; workers, batch and number of steps are those of the measurement."""
MEASURED_STRATEGIES = ("overlap", "ddp", "sharded", "local_sgd")
MEASURED_ON_ONE_HOST = ("shared",)
MEASURED_BATCH_SIZE = 64
PROGRESS_SECONDS = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    _add_measurements(parser)
    _add_predictions(parser.add_argument_group("What to predict"))
    _add_recommendation(parser.add_argument_group("Recommendation"))
    _add_clusters(parser.add_argument_group("Large clusters"))
    output = parser.add_argument_group("Output")
    output.add_argument(
        "--html", metavar="FILE", help="also write a page, with a recommendation and figures"
    )
    output.add_argument("--json", metavar="FILE", help="also write all figures")


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="*",
        help="runs, folders of runs, studies, or files of `paceline comm --json`"
        " (default: measure --model in short runs, for about a minute)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model to measure; with PATH, only the runs of it"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the short runs (default: plans/MODEL-TIME)"
    )
    parser.add_argument(
        "--against",
        metavar="PATH",
        action="append",
        default=[],
        help="runs to compare with their predictions, which are not planned from; may be repeated",
    )
    add_config_flags(parser, MEASURED_FIELDS)


def _add_predictions(wanted: argparse._ArgumentGroup) -> None:
    wanted.add_argument(
        "--workers", metavar="A,B", default="1,2,4,8,16", help="(default: 1,2,4,8,16)"
    )
    wanted.add_argument(
        "--hosts",
        metavar="N",
        help="hosts that the workers are on (default: one per worker with --link, else with as many"
        " workers each as in the runs)",
    )
    wanted.add_argument(
        "--link",
        metavar="LINK",
        action="append",
        help="bandwidth and round trip between hosts, such as 10gbit,100us; may be repeated"
        " (default: that of the runs)",
    )
    wanted.add_argument(
        "--strategy", metavar="A,B", help="strategies (default: those of the runs, else ddp)"
    )
    wanted.add_argument(
        "-o",
        metavar="KEY=VALUE",
        dest="options",
        action="append",
        default=[],
        help="option of the strategies, as in `paceline train`; may be repeated",
    )
    wanted.add_argument(
        "--batch-size", metavar="N", help="global batch size (default: that of the runs)"
    )
    wanted.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        default="strong",
        help="strong: the same global batch for every number of workers; weak: --batch-size"
        " samples for each worker (default: strong)",
    )
    wanted.add_argument(
        "--slowdown",
        metavar="X",
        default="1",
        help="compute time of one slow worker, relative to the others",
    )


def _add_recommendation(recommended: argparse._ArgumentGroup) -> None:
    recommended.add_argument(
        "--advise",
        action="store_true",
        help="recommend strategy, options, batch size and number of workers, by time",
    )
    recommended.add_argument(
        "--price-per-worker-hour", metavar="X", help="recommend by cost instead of by time"
    )


def _add_clusters(cluster: argparse._ArgumentGroup) -> None:
    cluster.add_argument(
        "--racks",
        metavar="SIZE:RATIO",
        help="hosts per rack, and their bandwidth relative to the uplink of the rack, such as 40:4",
    )
    cluster.add_argument(
        "--mtbf-hours", metavar="H", help="mean time between failures of a worker: simulate days"
    )
    cluster.add_argument(
        "--checkpoint-minutes", metavar="M", default="30", help="between checkpoints (default: 30)"
    )
    cluster.add_argument(
        "--checkpoint-seconds", metavar="S", default="10", help="of a checkpoint (default: 10)"
    )
    cluster.add_argument(
        "--restart-seconds", metavar="S", default="120", help="after a failure (default: 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    from paceline.plan.plan import make_plan
    from paceline.report.plan import print_plan

    request = _request(arguments)
    for flag, name in (("--json", arguments.json), ("--html", arguments.html)):
        _check_file(flag, name)
    if arguments.paths:
        _check_no_measurement(arguments)
    began = time.monotonic()
    paths = arguments.paths or [_measure(arguments, request)]
    seconds = None if arguments.paths else time.monotonic() - began
    if seconds is not None:
        sys.stderr.write(f"paceline: measured in {seconds:.0f} s\n")
    plan = replace(
        make_plan(paths, request, arguments.model, Progress()), calibration_seconds=seconds
    )
    print_plan(plan)
    if arguments.json:
        plan.write(arguments.json)
    if arguments.html:
        from paceline.report.plan_page import write_plan_page

        write_plan_page(plan, Path(arguments.html))
    return 0


class Progress:
    """Says on standard error what is being done, every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last > PROGRESS_SECONDS:
            sys.stderr.write(f"paceline: {text} ...\n")
            self._last = now


def _request(arguments: argparse.Namespace) -> Request:
    from paceline.plan.links import parse_link
    from paceline.plan.plan import Request

    workers = [_whole("--workers", each, MOST_WORKERS) for each in _split(arguments.workers)]
    if not workers:
        raise UsageError("--workers: must be a list of numbers such as 4,16,64")
    hosts, batch_size = arguments.hosts, arguments.batch_size
    price = arguments.price_per_worker_hour
    return Request(
        workers=sorted(set(workers)),
        strategies=_split(arguments.strategy or ""),
        options=dict(_option(each) for each in arguments.options),
        links=[_parsed("--link", parse_link, each) for each in arguments.link or ()],
        hosts=None if hosts is None else _whole("--hosts", hosts, MOST_WORKERS),
        batch_size=None if batch_size is None else _whole("--batch-size", batch_size, 2**31),
        scaling=arguments.scaling,
        slowdown=_number("--slowdown", arguments.slowdown, 1, 1000),
        racks=None if arguments.racks is None else _racks(arguments.racks),
        failures=_failures(arguments),
        is_advice_wanted=arguments.advise or price is not None or arguments.html is not None,
        price_per_worker_hour=None
        if price is None
        else _number("--price-per-worker-hour", price, 1e-9, 1e9),
        against=arguments.against,
    )


def _failures(arguments: argparse.Namespace) -> Failures | None:
    from paceline.plan.cluster_simulation import Failures

    if arguments.mtbf_hours is None:
        return None
    return Failures(
        _number("--mtbf-hours", arguments.mtbf_hours, 1e-3, 1e9),
        60 * _number("--checkpoint-minutes", arguments.checkpoint_minutes, 1e-3, 1e6),
        _number("--checkpoint-seconds", arguments.checkpoint_seconds, 0, 1e6),
        _number("--restart-seconds", arguments.restart_seconds, 0, 1e6),
    )


def _check_no_measurement(arguments: argparse.Namespace) -> None:
    """Plans from records have the settings of the runs."""
    given = given_flags(arguments)
    ignored = [name for name in MEASURED_FIELDS if name in given]
    ignored += ["out"] if arguments.out else []
    if ignored:
        flag = ignored[0].replace("_", "-")
        raise UsageError(
            f"--{flag}: only to measure a job, without PATH: plans from records have the settings"
            " of the runs"
        )


def _measure(arguments: argparse.Namespace, request: Request) -> str:
    """Measure the job in short runs, and return their folder."""
    from paceline.config import cluster_spec, from_mapping
    from paceline.plan.strategy_options import check_options

    if arguments.model is None:
        raise UsageError("plan: give records, or --model NAME to measure it in short runs")
    strategies = [*(request.strategies or MEASURED_STRATEGIES)]
    check_options(strategies, request.options)
    given = given_flags(arguments)
    job = {"model": arguments.model} | {key: given[key] for key in MEASURED_FIELDS if key in given}
    # Validate before importing torch, which takes two seconds.
    cluster = from_mapping(job).cluster
    if cluster is not None and cluster_spec.parse(cluster).nodes != 2:
        raise UsageError(f"--cluster: must have two nodes to measure a job, got {shown(cluster)}")
    batch_size = request.batch_size or MEASURED_BATCH_SIZE
    if batch_size < 2:
        raise UsageError("--batch-size: must be at least 2, because two workers are measured")
    out = Path(arguments.out or time.strftime(f"plans/{arguments.model}-%Y%m%d-%H%M%S"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out: {out} is not empty: plan from it, or choose another folder")
    from paceline.plan.measurement import measure_job

    measure_job(
        job,
        batch_size,
        max(request.workers),
        strategies,
        out,
        _measured_codecs(request),
        () if request.strategies else MEASURED_ON_ONE_HOST,
    )
    return str(out)


def _measured_codecs(request: Request) -> tuple[str, ...]:
    """The codec that was asked for; for a recommendation without one, all of them."""
    from paceline.plan.codec_cost import PLANNED_CODECS

    if (codec := request.options.get("codec", "none")) != "none":
        return (codec,)
    return PLANNED_CODECS if request.is_advice_wanted else ()


def _parsed(flag: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{flag}: must be {error}") from None


def _whole(flag: str, text: str, most: int) -> int:
    value = int(text) if text.strip().isdecimal() and len(text) < 20 else 0
    if not 1 <= value <= most:
        raise UsageError(f"{flag}: must be a number from 1 to {most}, got {shown(text)}")
    return value


def _number(flag: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise UsageError(f"{flag}: must be a number from {least:g} to {most:g}, got {shown(text)}")
    return value


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"-o: must be KEY=VALUE, got {shown(text)}")
    return key, value


def _racks(text: str) -> Racks:
    from paceline.plan.cluster_simulation import Racks

    size, _, ratio = text.partition(":")
    if not size.strip().lstrip("-").isdecimal():
        raise UsageError(
            f"--racks: must be the hosts of a rack and a ratio such as 40:4, got {shown(text)}"
        )
    return Racks(_whole("--racks", size, MOST_WORKERS), _number("--racks", ratio or "1", 1, 1000))


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _check_file(flag: str, name: str | None) -> None:
    """Reject an output path that cannot be written before the work."""
    if name and not Path(name).absolute().parent.is_dir():
        raise UsageError(f"{flag}: no such folder: {Path(name).parent}")
    if name and Path(name).is_dir():
        raise UsageError(f"{flag}: {name} is a folder: name a file in it")
