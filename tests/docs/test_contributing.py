"""The examples in CONTRIBUTING.md work when they are added as described."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paceline
from paceline.comm import in_process
from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.communicator import Communicator
from paceline.compression import CODECS
from paceline.compression import create as create_codec
from paceline.compression.testing import exchange_all_ranks
from paceline.data import DATASETS
from paceline.models import MODELS
from paceline.report import sections
from paceline.report.build import write_report
from paceline.strategies import STRATEGIES
from paceline.strategies.strategy import SingleProcess
from tests.support import toy_replicas as toy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
KINDS = re.findall(r"^### (.+)$", PAGE[PAGE.index("## Adding a part") :], flags=re.M)

Add = Callable[[str], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Add the example below a heading: new files as modules, changes in existing modules."""
    for registry in (STRATEGIES, ALGORITHMS, CODECS, MODELS, DATASETS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registered = dict(sections.SECTIONS)
    for module in (sections, sections.common):
        monkeypatch.setattr(module, "SECTIONS", registered)

    def add_part(heading: str) -> None:
        body = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", PAGE, flags=re.M | re.S)
        assert body is not None
        for path, code in re.findall(r"```python\n# src/(\S+)\.py\n(.*?)```", body[1], flags=re.S):
            name = path.replace("/", ".").removesuffix(".__init__")
            if (ROOT / "src" / f"{path}.py").exists():
                exec(code, dict(vars(importlib.import_module(name))))
                continue
            file = tmp_path / f"{Path(path).name}.py"
            file.write_text(code)
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)

    return add_part


def test_every_kind_of_part_has_an_example() -> None:
    assert KINDS == [
        "A strategy",
        "An all-reduce algorithm",
        "A codec",
        "A model",
        "A dataset",
        "A report section",
    ]


def test_the_example_strategy_computes_what_one_worker_computes(add: Add) -> None:
    add("A strategy")
    alone = toy.trained(1, SingleProcess, 3, toy.sgd())[0]
    for weights in toy.trained(3, STRATEGIES.load("sum_gradients"), 3, toy.sgd()):
        assert torch.allclose(weights, alone, atol=1e-6)


def test_the_example_algorithm_sums_and_sends_the_bytes_of_its_formula(add: Add) -> None:
    add("An all-reduce algorithm")
    algorithm = ALGORITHMS.load("chain")()

    def work(communicator: Communicator) -> tuple[list[float], int]:
        tensor = torch.full((5,), float(communicator.rank + 1))
        algorithm.all_reduce(communicator, tensor, "gradients")
        return tensor.tolist(), communicator.traffic.counts["gradients"].bytes_sent

    results = in_process.run(3, work)
    assert results == [([6.0] * 5, algorithm.bytes_sent(rank, 3, 5, 4)) for rank in range(3)]


def test_the_example_codec_halves_the_bytes_of_double_precision(add: Add) -> None:
    add("A codec")
    codecs = [create_codec("fp32", {}) for _ in range(2)]
    given = [torch.tensor([1.5, -3.0]).double(), torch.tensor([2.0, 1.0]).double()]
    outcome = exchange_all_ranks(codecs, "layer", given)
    assert torch.equal(outcome.results[0], torch.tensor([3.5, -2.0]).double())
    assert outcome.wire_bytes == codecs[0].wire_bytes(2, 8)


def test_the_example_model_learns_the_example_dataset(add: Add, tmp_path: Path) -> None:
    add("A model")
    add("A dataset")
    result = paceline.train(
        model="two_layer", data="stripes", epochs=2, out=str(tmp_path), tensorboard=False
    )
    assert result["status"] == "finished"
    assert result["final"]["test_accuracy"] == 1.0


def test_the_example_section_is_in_the_report(add: Add, tmp_path: Path) -> None:
    add("A report section")
    folder = tmp_path / "run"
    shutil.copytree(ROOT / "tests" / "training" / "recorded_runs" / "single", folder)
    (folder / "uninterrupted.json").rename(folder / "result.json")
    result = json.loads((folder / "result.json").read_text())
    page = write_report(folder).page
    text = page.with_suffix(".md").read_text()
    section = text[text.index("## Samples per step") :]
    assert f"{result['samples'] / result['iterations']:,.0f} |" in section
