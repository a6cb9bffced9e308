"""`paceline comm` as users start it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from paceline.cli import main
from paceline.commbench.render import rate_text, seconds_text
from paceline.commbench.spec import OPERATIONS
from paceline.records import read_json
from tests.support.commands import (
    Command,
    Ended,
    are_gone,
    free_port,
    wait_until,
    workers_of,
)

SVG = "{http://www.w3.org/2000/svg}"
ENDLESS = ["--sizes", "1m", "--algorithms", "ring", "--seconds", "3600", "--repeats", "10000"]


def run(*words: str) -> Ended:
    with Command(["-m", "paceline", "comm", "--threads", "1", *words]) as command:
        return command.end()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """Two workers on this machine: everything there is, at two sizes."""
    folder = tmp_path_factory.mktemp("comm")
    ended = run(
        *("--sizes", "1k,100k", "--operations", ",".join(OPERATIONS), "--repeats", "2"),
        *("--json", str(folder / "comm.json"), "--figure", str(folder / "comm.svg")),
    )
    return ended, folder


def entries(measured: tuple[Ended, Path]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_json(measured[1] / "comm.json")["measurements"]
    return found


def test_every_operation_is_measured_at_every_size_through_both_communicators(
    measured: tuple[Ended, Path],
) -> None:
    assert (measured[0].code, measured[0].err) == (0, "")
    seen = {(each["operation"], each["communicator"], each["bytes"]) for each in entries(measured)}
    assert seen == {
        (operation, communicator, size)
        for operation in OPERATIONS
        for communicator in ("torch", "hierarchical")
        for size in (1024, 102400)
    }


def test_workers_of_one_machine_are_compared_with_its_memory(measured: tuple[Ended, Path]) -> None:
    memory = read_json(measured[1] / "comm.json")["limits"]["memory"]["bytes_per_second"]
    for each in entries(measured):
        assert each["share_of_limit"] == pytest.approx(each["bus_bytes_per_second"] / memory)


def test_the_tables_fit_80_columns_and_have_every_measurement(
    measured: tuple[Ended, Path],
) -> None:
    lines = measured[0].out.splitlines()
    assert max(map(len, lines)) <= 80
    rates = [line for line in lines if line.count("B/s ") == 2]
    assert len(rates) == len(entries(measured))


def test_a_fit_over_two_sizes_says_that_it_has_no_errors(measured: tuple[Ended, Path]) -> None:
    fits = read_json(measured[1] / "comm.json")["fits"]
    assert fits
    assert {each["latency_seconds_error"] for each in fits} == {None}
    assert "errors of the fit need at least three sizes" in measured[0].out


def test_the_figure_has_two_panels_for_each_operation_with_a_curve_for_each_case(
    measured: tuple[Ended, Path],
) -> None:
    root = ElementTree.parse(measured[1] / "comm.svg").getroot()
    labels = [panel.get("aria-label") for panel in root.iter(f"{SVG}svg")]
    for operation in OPERATIONS:
        for quantity in ("median time", "bus bandwidth"):
            assert f"{operation}: {quantity} against size" in labels
    curves = [group for group in root.iter(f"{SVG}g") if group.get("data-label")]
    cases = {(each["operation"], each["communicator"], each["algorithm"])
             for each in entries(measured)}  # fmt: skip
    guides = [group for group in curves if group.get("class") == "series guide"]
    assert len(curves) - len(guides) == 2 * len(cases)
    assert {group.get("data-label") for group in guides} == {"memory limit"}


def test_the_legend_of_the_figure_has_the_fits(measured: tuple[Ended, Path]) -> None:
    root = ElementTree.parse(measured[1] / "comm.svg").getroot()
    texts = {text.text for text in root.iter(f"{SVG}text")}
    for fit in read_json(measured[1] / "comm.json")["fits"]:
        assert seconds_text(fit["latency_seconds"]) in texts
        assert rate_text(fit["bus_bytes_per_second"]) in texts


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_missing_gpus_are_rejected_in_one_line() -> None:
    ended = run("--device", "cuda", "--sizes", "1k")
    assert (ended.code, ended.err) == (
        2, "paceline: error: --device: there is no CUDA device here; use cpu or auto\n"
    )  # fmt: skip


@pytest.mark.gpu
def test_tensors_on_gpus_are_summed_correctly_and_reported(tmp_path: Path) -> None:
    ended = run("--sizes", "1k,1m", "--operations", ",".join(OPERATIONS), "--repeats", "2",
                "--json", str(tmp_path / "comm.json"))  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    record = read_json(tmp_path / "comm.json")
    own = torch.cuda.device_count() > 1
    assert record["tensors"] == ("own GPUs" if own else "shared GPUs")
    assert f"all_reduce, {'NCCL' if own else 'gloo'} (torch), 2 workers" in ended.out
    assert record["limits"]["memory"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-node", "1"], "needs at least two workers: set --nproc-per-node 2"),
        (["--cluster", "nodes=1"], "needs at least two workers: set --nproc-per-node 2"),
        (["--sizes", "1x"], "--sizes: must be a size from 4 to 8g such as 4k, 1m or 256m"),
        (["--repeats", "some"], "--repeats: must be a whole number, got 'some'"),
        (["--operations", "sum"], "--operations: must be some of all_reduce"),
        (["--figure", "comm.png"], "--figure: figures are SVG: must end in .svg, got 'comm.png'"),
        (["--json", "nowhere/comm.json"], "--json: no such folder: nowhere"),
        (["--json", "."], "--json: . is a folder: name a file in it"),
        (["--cluster", "nodes=0"], "--cluster: must be given nodes=1"),
        (["--hosts", "a,b", "--cluster", "nodes=2"], "--hosts and --cluster: use only one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_benchmarks_are_rejected_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["comm", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("words", ["--help", "--sizes=1x"])
def test_help_and_usage_errors_do_not_import_torch(words: str) -> None:
    program = f"""
import sys, paceline.cli
try:
    paceline.cli.main(["comm", {words!r}])
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    with Command(["-c", program]) as command:
        assert command.end().code == 0


@pytest.mark.parametrize(
    ("victim", "number", "code", "message"),
    [
        ("worker", signal.SIGKILL, 1, "error: rank 1 was killed by SIGKILL"),
        ("command", signal.SIGINT, 130, "stopped by SIGINT"),
    ],
)
def test_a_killed_worker_or_a_stopped_command_leaves_no_process(
    victim: str, number: signal.Signals, code: int, message: str
) -> None:
    with Command(["-m", "paceline", "comm", *ENDLESS, "--threads", "1", "--quiet"]) as command:
        launcher = command.process.pid
        wait_until(lambda: len(workers_of(launcher)) == 2, "both workers are there")
        workers = workers_of(launcher)
        # Once they have loaded what they need, they are busy for hours.
        wait_until(lambda: workers[1].cpu_times().user > 1, "the workers are at work")
        os.kill(launcher if victim == "command" else workers[1].pid, number)
        ended = command.end()
        wait_until(lambda: are_gone(list(workers.values())), "no worker is left")
    assert (ended.code, ended.err) == (code, f"paceline: {message}\n")


def test_under_torchrun_the_first_worker_writes_the_record(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    words = [*torchrun, f"--master-port={free_port()}", "-m", "paceline", "comm", "--quiet"]
    few = ["--sizes", "1k", "--algorithms", "ring", "--communicators", "torch", "--repeats", "1"]
    with Command([*words, *few, "--json", str(tmp_path / "comm.json")]) as command:
        ended = command.end()
    assert ended.code == 0, ended.err
    record = read_json(tmp_path / "comm.json")
    assert (record["workers"], record["nodes"]) == (2, 1)
    assert ended.out.count("all_reduce, gloo") == 1, "only one of the workers shows the table"


@pytest.mark.root
@pytest.mark.iproute
def test_in_an_emulated_cluster_the_link_is_the_limit(tmp_path: Path) -> None:
    few = ["--sizes", "1k,64k", "--algorithms", "ring", "--repeats", "2"]
    file = tmp_path / "comm.json"
    ended = run("--cluster", "nodes=2,bandwidth=100mbit", *few, "--json", str(file))
    notice = "paceline: creating an emulated cluster of 2 nodes and calibrating it ...\n"
    assert (ended.code, ended.err) == (0, notice)
    record = read_json(file)
    assert (record["workers"], record["nodes"]) == (2, 2)
    assert record["limits"]["link"]["source"] == "calibrated, slowest link"
    assert record["limits"]["memory"] is None
    assert record["cluster"]["asked"]["bandwidth_bits_per_second"] == 1e8
    assert record["plan"]["machines"]["cluster"] == "nodes=2,bandwidth=100mbit"
    for each in record["measurements"]:
        of_link = each["bus_bytes_per_second"] / record["limits"]["link"]["bytes_per_second"]
        assert each["share_of_limit"] == pytest.approx(of_link)
