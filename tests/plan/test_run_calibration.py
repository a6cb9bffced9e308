"""Calibrations from records, and the plans that `paceline plan` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.plan.calibration import Calibration
from paceline.plan.links import Link
from paceline.plan.run_calibration import calibrate
from paceline.records import SCHEMA, write_json
from tests.support.records import FakeRun, write_run

SIZES = [4_000_000, 400_000]
CLUSTER = "nodes={},cpus=0.5,bandwidth=1gbit,latency=200us"


def phases(samples: int, **more: float) -> dict[str, float]:
    """10 ms and 1 ms per sample."""
    seconds = 0.010 + 0.001 * samples
    return {
        "forward": 0.3 * seconds,
        "backward": 0.6 * seconds,
        "update": 0.1 * seconds,
        **more,
    }


def write(root: Path, name: str, workers: int, batch: int, **settings: Any) -> Path:
    """A run on the emulated cluster; several workers spend 50 ms in the exchange."""
    exchange = {"exchange": 0.05} if workers > 1 else {}
    run = FakeRun(
        name,
        {
            "model": "lenet",
            "batch_size": batch,
            "nproc_per_node": 1,
            "nnodes": workers,
            "cluster": CLUSTER.format(workers),
            **settings,
        },
        [phases(batch // workers, **exchange)] * workers,
        nodes=workers,
    )
    path = write_run(root, run)
    result = json.loads((path / "result.json").read_text())
    result["workers"][0]["tensor_bytes"] = SIZES
    (path / "result.json").write_text(json.dumps(result))
    return path


def comm_record(path: Path, workers: int = 2, nodes: int = 2) -> Path:
    """A ring that takes 1 ms and 10 ns per byte."""
    measurements = [
        {
            "operation": "all_reduce", "communicator": "torch", "algorithm": algorithm,
            "bytes": size, "samples_seconds": [1e-3 + 1e-8 * size] * 5,
        }
        for algorithm in ("ring", "library")
        for size in (1024, 2**20, 2**22, 2**24, 2**26)
    ]  # fmt: skip
    asked = {"nodes": nodes, "bandwidth_bits_per_second": 1e9, "latency_seconds": 2e-4}
    record = {
        "schema": SCHEMA, "kind": "comm", "workers": workers, "nodes": nodes,
        "cluster": {"asked": asked, "got": []}, "measurements": measurements, "plan": {},
    }  # fmt: skip
    write_json(path, record)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    write(root, "one-16", 1, 16)
    write(root, "one-64", 1, 64)
    write(root, "two-ring", 2, 64, strategy="ring")
    comm_record(root / "comm.json")
    return root


def test_runs_and_comm_records_make_a_calibration(root: Path) -> None:
    found = calibrate([str(root)])
    assert found.model == "lenet"
    assert [each.size_bytes for each in found.gradients] == SIZES
    assert [each.ready for each in found.gradients] == [1.0, 0.5]
    assert not found.has_ready_times
    # The run with two workers adds its local batch.
    assert [point.samples for point in found.compute] == [16, 32, 64]
    for point in found.compute:
        assert point.seconds == pytest.approx(0.010 + 0.001 * point.samples)
    (run,) = found.runs
    assert (run.strategy, run.workers, run.hosts, run.samples) == ("ring", 2, 2, 32)
    assert run.link == Link(1e9, 2e-4)
    assert run.step_seconds == pytest.approx(0.042 + 0.05)
    assert {each.algorithm for each in found.collectives} == {"ring", "library"}
    assert {each.link for each in found.collectives} == {Link(1e9, 2e-4)}
    assert found.optimizer_state_bytes == sum(SIZES)
    assert len(found.residuals) == 2


def test_shapes_count_if_they_fit_the_sizes_of_the_tensors(root: Path) -> None:
    path = root / "two-ring" / "result.json"
    result = json.loads(path.read_text())
    for shapes, expected in (
        ([[1000, 1000], [100_000]], [(1000, 1000), (100_000,)]),
        ([[1000, 1001], [100_000]], [None, None]),
        ([[1000, 1000]], [None, None]),
        ([[1000, "a"], []], [None, None]),
    ):
        result["workers"][0]["tensor_shapes"] = shapes
        path.write_text(json.dumps(result))
        found = calibrate([str(root)])
        assert [each.shape for each in found.gradients] == expected
        assert Calibration.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_calibration_keeps_the_settings_of_the_job(tmp_path: Path) -> None:
    write(tmp_path, "run", 1, 64, data="mnist", optimizer="adamw", seed=3)
    found = calibrate([str(tmp_path)])
    assert found.settings == {"data": "mnist", "optimizer": "adamw"}
    found.write(tmp_path / "calibration.json")
    assert calibrate([str(tmp_path / "calibration.json")]) == found


def test_ready_times_come_from_runs_that_measured_them(root: Path) -> None:
    path = write(root, "two-overlap", 2, 64, strategy="overlap") / "result.json"
    result = json.loads(path.read_text())
    result["workers"][0]["buckets"] = {
        "count": 2, "bucket_mib": 2.0, "reason": "measured",
        "measurements": {
            "backward_seconds": 0.1, "latency_seconds": 0.0, "seconds_per_byte": 0.0,
            "overlapped_seconds_per_byte": 0.0, "ready_seconds": [0.02, 0.09],
        },
    }  # fmt: skip
    path.write_text(json.dumps(result))
    found = calibrate([str(root)])
    assert found.has_ready_times
    # The last tensor of the model is ready first.
    assert [each.ready for each in found.gradients] == pytest.approx([0.9, 0.2])
    # Damaged measurements do not count; all gradients stay.
    result["workers"][0]["buckets"]["measurements"]["ready_seconds"] = [0.02, None]
    path.write_text(json.dumps(result))
    damaged = calibrate([str(root)])
    assert len(damaged.gradients) == 2
    assert not damaged.has_ready_times


def test_the_command_predicts_and_writes_the_contract(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    arguments = ["plan", str(root), "--workers", "1,4,8", "--strategy", "ring,ddp,parameter_server"]
    assert main([*arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "lenet, batch 64, link 1gbit,200us" in printed
    record = json.loads(out.read_text())
    assert [(each["workers"], each["strategy"]) for each in record["predictions"]] == [
        (1, "single"),
        *((workers, name) for workers in (4, 8) for name in ("ring", "ddp", "parameter_server")),
    ]
    for each in record["predictions"]:
        assert each["link"] == "1gbit,200us"
        assert isinstance(each["extrapolated"], bool)
        for figure in ("step_seconds", "throughput", "efficiency", "exposed_communication"):
            assert each[figure]["low"] <= each[figure]["median"] <= each[figure]["high"]
        throughput = 64 / each["step_seconds"]["median"]
        assert each["throughput"]["median"] == pytest.approx(throughput, rel=1e-2)
    one, ring = record["predictions"][:2]
    assert one["step_seconds"]["median"] == pytest.approx(0.074, rel=0.02)
    # The run measured 50 ms for what two workers should exchange in 1 ms + 44 ms.
    rounds = 6 * (0.5e-3 + 1e-8 * sum(SIZES) / 4)
    assert ring["step_seconds"]["median"] == pytest.approx(0.026 + rounds * 50 / 45, rel=0.03)


def test_options_apply_to_the_strategies_that_have_them(root: Path, tmp_path: Path) -> None:
    write(root, "two-ring-again", 2, 64, strategy="ring", options={"algorithm": "ring"})

    def step_of_ring(*more: str) -> float:
        out = tmp_path / "plan.json"
        arguments = ["--workers", "4", "--strategy", "ring,ddp", "--json", str(out)]
        assert main(["plan", str(root), *arguments, *more]) == 0
        ring, _ = json.loads(out.read_text())["predictions"]
        return float(ring["step_seconds"]["median"])

    plain = step_of_ring()
    # The correction by the runs stays, also if an option has its default.
    assert step_of_ring("-o", "find_unused=true") == plain
    assert step_of_ring("-o", "flat=true") == plain
    assert step_of_ring("-o", "flat=false") > plain


def test_large_clusters_have_racks_and_failures(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(*more: str) -> dict[str, Any]:
        out = tmp_path / "plan.json"
        arguments = ["--workers", "64,1000", "--strategy", "halving_doubling", "--json", str(out)]
        assert main(["plan", str(root), *arguments, *more]) == 0
        record: dict[str, Any] = json.loads(out.read_text())
        return record

    flat, racks = plan(), plan("--racks", "16:8", "--mtbf-hours", "1000")
    printed = capsys.readouterr().out
    assert "racks of 16, oversubscribed 8:1" in printed
    assert max(map(len, printed.splitlines())) <= 80
    for before, after in zip(flat["predictions"], racks["predictions"], strict=True):
        assert after["step_seconds"]["median"] > 1.2 * before["step_seconds"]["median"]
        exposed = before["exposed_communication"]["median"]
        assert after["exposed_communication"]["median"] > exposed
    few, many = racks["days"]
    assert (few["workers"], many["workers"]) == (64, 1000)
    assert many["failures"] > few["failures"]
    assert many["goodput"] < few["goodput"] < 1
    assert flat["days"] == []


@pytest.mark.parametrize(
    ("arguments", "planned", "note"),
    [
        (["--strategy", "single", "--workers", "1,2"], ["single"], "--strategy single: no plan"),
        (
            ["--strategy", "ring,local_sgd", "--racks", "2:2", "--workers", "4"],
            ["ring"],
            "--racks: no plan for strategy local_sgd",
        ),
    ],
)
def test_strategies_that_cannot_be_planned_are_skipped_with_a_note(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    planned: list[str],
    note: str,
) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(root), *arguments, "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [each["strategy"] for each in record["predictions"]] == planned
    (skipped,) = record["skipped"]
    assert skipped.startswith(note)
    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}", "--workers", "0"], "--workers: must be a number from 1 to 10000, got '0'"),
        (["{root}", "--workers", ","], "--workers: must be a list of numbers such as 4,16,64"),
        (["{root}", "--workers", "four"], "--workers: must be"),
        (["{root}", "--link", "fast"], "--link: must be a bandwidth and a round trip"),
        (["{root}", "--strategy", "rings"], "--strategy: no plan for 'rings': did you mean ring?"),
        (["{root}", "--strategy", "shared"], "strategy shared on several hosts is not known"),
        (["{root}", "-o", "bucket_mib"], "-o: must be KEY=VALUE, got 'bucket_mib'"),
        (
            ["{root}", "--strategy", "ddp", "-o", "bucket_mib=big"],
            "-o bucket_mib: must be a number",
        ),
        (["{root}", "-o", "flat=maybe"], "-o flat: must be true or false, got 'maybe'"),
        (
            ["{root}", "--strategy", "ddp,local_sgd", "-o", "evry=4"],
            "-o evry: none of the strategies has this option: did you mean every?",
        ),
        *(
            (["{root}", "--strategy", strategy, "-o", option], f"-o {option.split('=')[0]}: ")
            for strategy, option in [
                ("local_sgd", "every=abc"),
                ("local_sgd", "every=0"),
                ("parameter_server", "servers=0"),
                ("parameter_server", "place=moon"),
                ("ddp", "bucket_mib=nan"),
                ("ddp,ring", "bucket_mib=-1"),
                ("overlap", "algorithm=json:loads"),
            ]
        ),
        (["{root}", "-o", "codec=zip"], "-o codec: no plan for 'zip': choose from bf16,"),
        (["{root}", "-o", "codec=int8"], "the time of codec int8 is not known: add `paceline comm"),
        (["{root}", "-o", "algorithm=foo"], "-o algorithm: no plan for 'foo': choose from root,"),
        (["{root}", "--batch-size", "-3"], "--batch-size: must be a number from 1 to"),
        (["{root}", "--slowdown", "0.5"], "--slowdown: must be a number from 1 to 1000"),
        (["{root}", "--racks", "wide"], "--racks: must be the hosts of a rack and a ratio such as"),
        (["{root}", "--racks", "0:4"], "--racks: must be a number from 1 to 10000"),
        (["{root}", "--racks", "4:0.5"], "--racks: must be a number from 1 to 1000"),
        (["{root}", "--mtbf-hours", "nan"], "--mtbf-hours: must be a number from 0.001"),
        (
            ["{root}", "--strategy", "local_sgd", "--racks", "2:2"],
            "--racks: no plan for strategy local_sgd: choose from gather_scatter,",
        ),
        (["{root}", "--strategy", "single", "--workers", "2"], "no plan for several workers"),
        (["{root}", "--model", "vgg11"], "--model vgg11: there are runs of lenet only"),
        (["{root}", "--json", "no/such/plan.json"], "--json: no such folder: no/such"),
        (["{root}", "--html", "no/such/plan.html"], "--html: no such folder: no/such"),
        (["{root}", "--against", "{root}/missing"], "missing does not exist: give a run"),
        (
            ["{root}", "--workers", "128"],
            "a batch of 64 has no sample for some of 128 workers: choose fewer --workers",
        ),
        (["{root}/missing"], "missing does not exist: give a run"),
        (["{root}/one-16"], "compute time with other batches than 16 samples per worker is not"),
        (["{root}/comm.json"], "cannot plan: there is no run: add one with one worker"),
        (["{root}/one-16/result.json"], "is not a record of `paceline comm`: give runs and"),
        (
            ["{root}", "--hosts", "2", "--workers", "3"],
            "3 workers cannot share 2 hosts equally: choose other --workers or --hosts",
        ),
        (
            ["{root}", "--racks", "4:2", "--hosts", "1", "--workers", "4"],
            "--racks: all workers are on one host: add --link or --hosts",
        ),
        (
            ["{root}", "--racks", "4:2", "--workers", "4", "-o", "codec=bf16"],
            "--racks: no plan with codecs: omit one of them",
        ),
    ],
)
def test_invalid_requests_are_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", *(each.format(root=root) for each in arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_records_that_cannot_be_combined_are_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(name: str) -> str:
        assert main(["plan", str(root), str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    write(tmp_path / "models", "other", 1, 32, model="vgg11")
    assert "different models: lenet and vgg11: give --model NAME" in error_of("models")
    write(tmp_path / "quotas", "other", 1, 32, cluster="nodes=1,cpus=1,bandwidth=1gbit")
    assert "different machines: " in error_of("quotas")
    write(tmp_path / "data", "other", 1, 32, data="mnist")
    assert "different data: digits and mnist: give runs of one dataset" in error_of("data")
    write(tmp_path / "precisions", "other", 1, 32, precision="bf16")
    assert "different settings: --precision auto and --precision bf16: give" in error_of(
        "precisions"
    )


def test_held_out_runs_are_compared_with_their_predictions(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "larger", "four-ring", 4, 64, strategy="ring")
    out = tmp_path / "plan.json"
    arguments = ["plan", str(root), "--workers", "4", "--json", str(out), "--against"]
    assert main([*arguments, str(tmp_path / "larger")]) == 0
    own, held_out = json.loads(out.read_text())["validation"]
    assert (own["workers"], own["held_out"]) == (2, False)
    assert (held_out["workers"], held_out["held_out"]) == (4, True)
    assert held_out["measured_seconds"] == pytest.approx(0.026 + 0.05)
    predicted = held_out["predicted_seconds"]["median"]
    assert held_out["error"] == pytest.approx(predicted / 0.076 - 1)
    assert "1 held-out run: median error" in capsys.readouterr().out
    write(tmp_path / "models", "other", 2, 64, strategy="ring", model="vgg11")
    assert main([*arguments, str(tmp_path / "models")]) == 2
    assert "give --against runs of the same model" in capsys.readouterr().err


def test_runs_of_the_plan_are_not_held_out(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(root), "--workers=2", "--against", str(root)]) == 2
    message = "--against: the plan is made from all of these runs: give others"
    assert message in capsys.readouterr().err
    planned = tmp_path / "planned"
    planned.mkdir()
    for name in ("one-16", "one-64", "two-ring"):
        (root / name).rename(planned / name)
    (root / "comm.json").rename(planned / "comm.json")
    write(planned.parent / "more", "four-ring", 4, 64, strategy="ring")
    both = [f"--against={planned}", f"--against={planned.parent / 'more'}"]
    assert main(["plan", str(planned), "--workers=2", *both]) == 0
    assert "1 held-out run: median error" in " ".join(capsys.readouterr().out.split())


def test_runs_that_are_left_out_are_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(root, "two-ddp", 2, 64, strategy="ddp") / "result.json"
    path.write_text(path.read_text()[:500])
    write(root, "slow", 2, 64, strategy="ring", slow=["1=3"])
    out = tmp_path / "plan.json"
    assert main(["plan", str(root), "--workers=2", f"--json={out}"]) == 0
    skipped = json.loads(out.read_text())["skipped"]
    assert any(text.startswith("two-ddp: ") for text in skipped)
    assert any(text.startswith("slow is left out: its workers were slowed") for text in skipped)
    assert "slow is left out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag", ["--optimizer=adam", "--threads=2", "--data=mnist", "--cluster=nodes=2", "--out=foo"]
)
def test_settings_of_a_measurement_are_rejected_with_records(
    root: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main(["plan", str(root), flag]) == 2
    name = flag.partition("=")[0]
    assert f"{name}: only to measure a job, without PATH" in capsys.readouterr().err


def test_one_worker_beside_other_strategies_is_no_strategy_of_several(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(root), "--strategy=single,ring", "--workers=1,2"]) == 0
    out = capsys.readouterr().out
    assert "no plan for several workers" not in out
    assert "1 single" in out
    assert "2 ring" in out


def test_held_out_runs_with_other_settings_are_rejected(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(name: str, **settings: Any) -> str:
        write(tmp_path / name, "four", 4, 64, strategy="ring", **settings)
        assert main(["plan", str(root), "--against", str(tmp_path / name)]) == 2
        return capsys.readouterr().err

    expected = "the defaults: give --against runs with the same settings"
    assert f"different settings: --data mnist and {expected}" in error_of("data", data="mnist")
    assert f"--optimizer adam and {expected}" in error_of("optimizer", optimizer="adam")


def test_a_calibration_of_another_model_is_rejected(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "calibration.json"
    calibrate([str(root)]).write(file)
    assert main(["plan", str(file), "--model", "vgg11"]) == 2
    assert f"--model vgg11: {file} is a calibration of lenet" in capsys.readouterr().err
    assert main(["plan", str(file), "--model", "lenet"]) == 0


def test_comm_records_of_another_machine_are_rejected(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = json.loads((root / "one-16" / "result.json").read_text())["hardware"]["cpu"]
    path = root / "comm.json"
    for own, code in ((cpu, 0), ("another CPU", 2)):
        write_json(path, {**json.loads(path.read_text()), "hardware": {"cpu": own}})
        assert main(["plan", str(root)]) == code
    assert "cannot plan from different machines: " in capsys.readouterr().err


def test_several_records_of_the_same_collectives_count_together(root: Path) -> None:
    (before,) = (each for each in calibrate([str(root)]).collectives if each.algorithm == "ring")
    comm_record(root / "comm-again.json")
    (found,) = (each for each in calibrate([str(root)]).collectives if each.algorithm == "ring")
    assert [point.size_bytes for point in found.points] == [
        point.size_bytes for point in before.points
    ]
    assert {len(point.seconds) for point in found.points} == {10}
    # Those of another number of workers stay apart.
    comm_record(root / "comm-three.json", workers=3, nodes=3)
    rings = [each for each in calibrate([str(root)]).collectives if each.algorithm == "ring"]
    assert [each.workers for each in rings] == [2, 3]


def test_sizes_that_a_run_tuned_itself_are_not_repeated(root: Path, tmp_path: Path) -> None:
    write(root, "ready", 2, 64, strategy="overlap", options={"bucket_mib": "measured"})
    out = tmp_path / "plan.json"
    arguments = ["plan", str(root), "--workers=4", "--strategy=overlap", f"--json={out}"]
    assert main(arguments) == 0
    (overlap,) = json.loads(out.read_text())["predictions"]
    assert overlap["options"] == {}


def test_uneven_shares_count_by_their_batch(root: Path, tmp_path: Path) -> None:
    """Three workers of a batch of 100 have 34, 33 and 33 samples."""
    write(root, "three", 3, 100, strategy="ring")
    (found,) = (run for run in calibrate([str(root)]).runs if run.workers == 3)
    assert (found.samples, found.global_samples) == (34, 100)
    out = tmp_path / "plan.json"
    assert main(["plan", str(root), "--workers=2", f"--json={out}"]) == 0
    assert json.loads(out.read_text())["predictions"][0]["batch_size"] == 100


def test_the_threads_of_the_runs_are_repeated(tmp_path: Path) -> None:
    write(tmp_path, "run", 1, 64, threads=1)
    assert calibrate([str(tmp_path)]).settings == {"threads": 1}


def test_other_processes_during_the_runs_are_noted(root: Path) -> None:
    assert calibrate([str(root)]).other_processes_share is None
    path = root / "one-16" / "result.json"
    result = json.loads(path.read_text())
    result["hardware"]["cores_in_machine"] = 2
    for node in result["nodes"]:
        node |= {"machine_cpu_percent_mean": 90.0, "cpu_percent_mean": 100.0}
    path.write_text(json.dumps(result))
    assert calibrate([str(root)]).other_processes_share == pytest.approx(0.4)


def test_a_disturbed_calibration_is_noted_with_its_recommendation(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = write(tmp_path / "more", "four-ring", 4, 64, strategy="ring")
    for path, note in (
        (root / "one-16", "of the CPU during the runs: measure again"),
        (held_out, "of the CPU during the held-out runs: measure again"),
    ):
        result = json.loads((path / "result.json").read_text())
        result["hardware"]["cores_in_machine"] = 2
        for node in result["nodes"]:
            node |= {"machine_cpu_percent_mean": 90.0, "cpu_percent_mean": 20.0}
        (path / "result.json").write_text(json.dumps(result))
        assert main(["plan", str(root), "--advise", f"--against={tmp_path / 'more'}"]) == 0
        recommendation, *_ = capsys.readouterr().out.split("\nlenet, batch")
        assert note in " ".join(recommendation.split())


def test_runs_with_an_emulated_slow_worker_are_left_out(root: Path) -> None:
    plain = calibrate([str(root)])
    write(root, "slow", 2, 64, strategy="ring", slow=["1=3"])
    assert len(calibrate([str(root)]).runs) == len(plain.runs) == 1


@pytest.mark.parametrize("option", [{"codec": "int8"}, {"algorithm": "mine:Ring"}])
def test_runs_that_the_model_does_not_describe_correct_nothing(
    root: Path, tmp_path: Path, option: dict[str, str]
) -> None:
    def predictions() -> Any:
        out = tmp_path / "plan.json"
        assert main(["plan", str(root), "--strategy", "ring,tree", "--json", str(out)]) == 0
        return json.loads(out.read_text())["predictions"]

    plain = predictions()
    write(root, "two-other", 2, 64, strategy="ring", options=option)
    assert predictions() == plain


def test_runs_without_tensor_sizes_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, FakeRun("old", {"batch_size": 32}, [phases(32)]))
    assert main(["plan", str(tmp_path)]) == 2
    assert "recorded before tensor sizes were: run one of them again" in capsys.readouterr().err


def test_collectives_that_were_not_measured_are_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(root), "--hosts", "1", "--strategy", "ddp"]) == 2
    assert (
        "collectives on one host (gloo) is not known: add `paceline comm" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "is not a paceline record: it has no schema number"),
        ('{"loss": 1.0}', "is not a paceline record: it has no schema number"),
        ("loss 1.0", "is damaged: it is not JSON"),
        (f'{{"schema": {SCHEMA}, "kind": "plan"}}', "is not a record of `paceline comm`: give"),
    ],
)
def test_foreign_records_are_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = root.parent / "foreign.json"
    path.write_text(content)
    assert main(["plan", str(root), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"nodes": None}, "None is not of type int"),
        ({"workers": 1}, "collectives must have two or more workers"),
        ({"measurements": [{"operation": "all_reduce"}]}, "algorithm is missing"),
        ({"measurements": 5}, "a list is missing"),
        ({"cluster": {"asked": [1e9]}}, "an object is missing"),
        ({"hardware": "a CPU"}, "an object is missing"),
        ({"workers": 10**400}, "an integer is too large"),
        (
            {"cluster": {"asked": {"bandwidth_bits_per_second": 0.0}}},
            "links must have a bandwidth above 0",
        ),
        (
            {"cluster": {"asked": {"bandwidth_bits_per_second": 1e9, "latency_seconds": -1.0}}},
            "links must have a bandwidth above 0, and no latency below 0",
        ),
        ({"cluster": None, "plan": {"link_bits_per_second": -1.0}}, "links must have a bandwidth"),
        (
            {
                "measurements": [
                    {
                        "operation": "all_reduce",
                        "communicator": "torch",
                        "algorithm": "ring",
                        "bytes": -4,
                        "samples_seconds": [1.0],
                    }
                ]
            },
            "collectives must have sizes above 0",
        ),
        ({"codecs": [{"codec": "bf16", "workers": 2}]}, "bytes is missing"),
        (
            {"codecs": [{"codec": "bf16", "workers": 2, "bytes": 4, "samples_seconds": []}]},
            "codecs",
        ),
    ],
)
def test_damaged_comm_records_are_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], damage: dict[str, Any], message: str
) -> None:
    path = root / "comm.json"
    write_json(path, {**json.loads(path.read_text()), **damage})
    assert main(["plan", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline: error: {path} is damaged: {message}")
    assert line.endswith(": measure again with `paceline comm --json`")


def test_a_machine_without_a_number_of_cores_is_planned_from(root: Path) -> None:
    for name in ("one-16", "one-64", "two-ring"):
        path = root / name / "result.json"
        result = json.loads(path.read_text())
        result["hardware"]["cores"] = 0
        path.write_text(json.dumps(result))
    assert main(["plan", str(root)]) == 0
