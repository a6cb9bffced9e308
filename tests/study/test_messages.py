"""All errors of a study file are reported at once, each with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError, UsageError
from paceline.study import catalogue
from paceline.study.cells import check_parts, load
from tests.support.study_files import planned, write_study


def problems(folder: Path, text: str) -> list[str]:
    """The messages without the folder before the file's name."""
    with pytest.raises(ConfigError) as caught:
        check_parts(planned(folder, text))
    return [problem.removeprefix(f"{folder}/") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grid:\n  strategy:\n    - {label: x, stratgy: ddp}\n",
            "mine.yaml:3: grid.strategy: unknown setting 'stratgy': did you mean strategy?",
        ),
        (
            "base:\n  lr: 1\n  batchsize: 3\n",
            "mine.yaml:3: base: unknown setting 'batchsize': did you mean batch_size?",
        ),
        (
            "base:\n  out: here\n",
            "mine.yaml:2: base: 'out' is set by the study: omit it",
        ),
        (
            "base: {lr: 1}\ngird: {}\n",
            "mine.yaml:2: unknown key 'gird': did you mean grid?",
        ),
        (
            "base: {lr: 1}\nreport:\n  - verdict\n  - phase\n",
            "mine.yaml:4: report: unknown section 'phase': did you mean phases?",
        ),
        ("base:\n  lr: -1\n", "mine.yaml:2: base.lr: must be above 0 and at most 1e+09, got -1.0"),
        (
            "grid:\n  batch_size: [8, many]\n",
            "mine.yaml:2: grid.batch_size: must be a whole number, got 'many'",
        ),
        (
            "base:\n  seed: 1\n  epochs: 1\n  iterations: 1\n",
            "mine.yaml:3: base.epochs: epochs and iterations: use only one of them",
        ),
        (
            "base:\n  cluster: nodes=2,speed=3\n",
            "mine.yaml:2: base.cluster: must be made of nodes, cpus, bandwidth, latency and slow,"
            " not 'speed'",
        ),
        (
            "grid:\n  cluster.node: [1]\n",
            "mine.yaml:2: grid.cluster.node: unknown setting 'cluster.node':"
            " did you mean cluster.nodes?",
        ),
        (
            "base:\n  model: softmx\n",
            "mine.yaml:2: base.model: unknown model 'softmx': did you mean softmax?",
        ),
        (
            "base:\n  model: softmax\n  metrics: [acuracy, mine:f1]\n",
            "mine.yaml:3: base.metrics: unknown metric 'acuracy': did you mean accuracy?",
        ),
        (
            "base:\n  strategy: easgd\n  options:\n    tua: 3\n",
            "mine.yaml:4: base.options.tua: strategy easgd has no such option;"
            " it has tau, alpha, algorithm (did you mean tau?)",
        ),
        (
            "base:\n  model: vgg11\n  model_options.widht: 3\n",
            "mine.yaml:3: base.model_options.widht: model vgg11 has no such option;"
            " it has width (did you mean width?)",
        ),
        (
            "base:\n  model: vgg11\n  model_options: {width: -1}\n",
            "mine.yaml:3: base.model_options.width: must be above 0 and at most 64, got '-1'",
        ),
        (
            "parts:\n  one: {base: {seed: 1}, report: [phases]}\nanswer: [one.scaling]\n",
            "mine.yaml:3: answer: no part or section 'one.scaling': choose from one.phases, one",
        ),
        (
            "grid:\n  nproc_per_node: [1, 2, 3]\n  strategy: [ddp, single]\nexclude:\n"
            "  - {nproc_per_node: 3, strategy: single}\n",
            "mine.yaml:3: grid.strategy: strategy single: trains 1 worker, not 2:"
            " choose another with `paceline list strategies`",
        ),
        (
            "grid:\n  nproc_per_node: [2]\n",
            "mine.yaml:1: strategy single: trains 1 worker, not 2: choose another with"
            " `paceline list strategies` (as in nproc_per_node-2)",
        ),
        ("grid:\n  way: [a]\n", "mine.yaml:2: grid.way: the axis is not a setting:"
         " its values must be mappings with a label"),
        ("grid:\n  way:\n    - {seed: 1}\n", "mine.yaml:3: grid.way: needs a label"),
        ("grid:\n  seed:\n", "mine.yaml:2: grid.seed: must be a list of values"),
        ("parts:\n  one:\n  two: {}\n",
         "mine.yaml:2: parts.one: must be a grid, or {} for none"),
        ("grid:\n  seed: 3\n", "mine.yaml:2: grid.seed: must be a list of values"),
        (
            "grid: {seed: [1]}\nexclude:\n  - {sead: 1}\n",
            "mine.yaml:3: exclude: no axis 'sead' in this grid: did you mean seed?",
        ),
        (
            "grid: {seed: [1]}\nexclude:\n  - {seed: 2}\n",
            "mine.yaml:3: exclude: no value '2' on axis seed: choose from 1",
        ),
        ("base: {seed: 1}\nrepeats: 0\n",
         "mine.yaml:2: repeats: must be a number from 1 to 1000, got 0"),
        (
            "repeats: 3\nbase:\n  seed: 9223372036854775807\n",
            "mine.yaml:3: base.seed: must be at most 9223372036854775805 with 3 repeats,"
            " got 9223372036854775807",
        ),
        (
            "base:\n  iterations: " + "9" * 20 + "\n",
            "mine.yaml:2: base.iterations: must be at least 1 and at most 1000000000000,"
            " got " + "9" * 20,
        ),
        (
            "base: {seed: 1}\nrepeats: " + "9" * 20 + "\n",
            "mine.yaml:2: repeats: must be a number from 1 to 1000, got " + "9" * 20,
        ),
        (
            "base:\n  seed: " + "9" * 5000 + "\n",
            "mine.yaml:2: base.seed: must be a number of at most 19 digits,"
            " got '" + "9" * 40 + "'... (5,000 characters)",
        ),
        (
            "grid:\n  seed: [1, 0x" + "f" * 5000 + "]\n",
            "mine.yaml:2: grid.seed: must be a number of at most 19 digits,"
            " got '0x" + "f" * 38 + "'... (5,002 characters)",
        ),
        (
            "base: {seed: 1}\nrepeats: " + "9" * 5000 + "\n",
            "mine.yaml:2: repeats: must be a number of at most 19 digits,"
            " got '" + "9" * 40 + "'... (5,000 characters)",
        ),
        (
            "base:\n  options: {every: 0x" + "f" * 5000 + "}\n",
            "mine.yaml:2: base.options.every: must be a number of at most 19 digits,"
            " got '0x" + "f" * 38 + "'... (5,002 characters)",
        ),
        (
            'base:\n  "a\\nb": 1\n',
            "mine.yaml:2: base: unknown setting 'a\\nb': see docs/config.md",
        ),
        (
            "base:\n  " + "k" * 300 + ": 1\n",
            "mine.yaml:2: base: unknown setting '" + "k" * 40 + "'... (300 characters):"
            " see docs/config.md",
        ),
        ("base: {seed: 1}\norder: random\n",
         "mine.yaml:2: order: must be interleaved or sequential, got 'random'"),
        ("base:\n  seed: 1\n  seed: 2\n", "mine.yaml:3: base: 'seed' is a duplicate key"),
        (
            "scales:\n  quick:\n    base:\n      sead: 1\n",
            "mine.yaml:4: scales.quick.base: unknown setting 'sead': did you mean seed?",
        ),
        ("base: {seed: 1}\nscales:\n  big: {}\n",
         "mine.yaml:3: scales.big: unknown scale 'big': choose from quick, real, full"),
        ("base: {seed: 1}\nscales: [quick]\n",
         "mine.yaml:2: scales: must be a mapping with the keys quick, real, full"),
        ("title:\n  - a\nbase: {seed: 1}\n", "mine.yaml:1: title: must be text"),
        ("include:\n  - {label: [a], seed: 1}\n", "mine.yaml:2: include.label: must be text"),
        ("base:\n  seed: 2020-13-45\n",
         "mine.yaml:2: base.seed: is not a valid timestamp: '2020-13-45' (quote it if it is text)"),
        ("base: {seed: 1}\n? [a, b]\n: 1\n", "mine.yaml:2: a key must be a scalar"),
        ("base:\n  <<: 3\n", "mine.yaml:2: base: << must be a mapping or a list of mappings"),
        ("parts: {one: {}}\nexclude:\n  - {seed: 1}\n",
         "mine.yaml:2: exclude: belongs inside a part, because the study has parts"),
        ("grid: {seed: [1]}\nexclude: [{seed: 1}]\n",
         "mine.yaml:1: no cells remain: exclude fewer of them"),
        ("grid:\n  seed: [1, 1]\n", "mine.yaml:2: grid.seed: two values have the label '1'"),
        (
            "grid: {lr: [0.5]}\ninclude:\n  - {label: half, lr: 0.50}\n",
            "mine.yaml:3: include: half has the settings and seeds of lr-0.5:"
            " remove one of them",
        ),
        (
            "parts:\n  a: {base: {lr: 0.5}}\n  b:\n    grid: {lr: [0.5]}\n"
            "    include:\n      - {label: half, lr: 0.50}\n",
            "mine.yaml:6: parts.b.include: b.half has the settings and seeds of b.lr-0.5:"
            " remove one of them",
        ),
        (
            "repeats: 2\ngrid:\n  seed: [1, 2]\n",
            "mine.yaml:1: seed-2 has the settings and seeds of seed-1: remove one of them",
        ),
    ],
)  # fmt: skip
def test_a_problem_is_one_line_with_its_location(text: str, message: str, tmp_path: Path) -> None:
    assert problems(tmp_path, text) == [message]


def test_all_problems_are_reported_together_in_file_order(tmp_path: Path) -> None:
    text = """
        base:
          lr: fast
        grid:
          seed: [-1, 2]
          strategy: [dpp]
        repeats: many
    """
    assert [problem.split(": ")[0] for problem in problems(tmp_path, text)] == [
        "mine.yaml:2",
        "mine.yaml:4",
        "mine.yaml:5",
        "mine.yaml:6",
    ]


def test_problems_of_keys_axes_names_and_values_are_reported_together(tmp_path: Path) -> None:
    """None of them hides another, and what they leave unread is not reported as a duplicate."""
    text = """
        title: mine
        base:
          lr: -1
          modle: mlp
        grid:
          batch_size: [8, many]
          strateg: [ddp, single]
          model: [softmx, mlp]
        exclude:
          - {strateg: single, model: mlp}
        repeat: 3
        scales:
          big: {}
        order: random
        include:
          - {label: a, lr: 1}
          - {label: b, lr: 1.0}
    """
    output = problems(tmp_path, text)
    assert [problem.split(":")[1] for problem in output] == [
        "3",
        "4",
        "6",
        "7",
        "8",
        "11",
        "13",
        "14",
    ]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("base: {seed: 1\n", "mine.yaml:2: not YAML"),
        ("", "is empty"),
        ("base:\n  seed: \x01\n", "mine.yaml:2: not YAML: special characters are not allowed"),
        ("base:\n  lr: &a [*a]\n", "mine.yaml:2: too deeply nested"),
        ("base: !!python/object/apply:os.system [ls]\n", "mine.yaml:1"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: &c " + "[*b, *b]\n", "unknown key 'a'"),
    ],
)
def test_a_file_with_unsupported_yaml_is_rejected(text: str, output: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=output):
        planned(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "scale", "message"),
    [
        (
            b"# a comment\nbase:\n  model: soft\xffmax\n",
            None,
            "mine.yaml:3: not UTF-8 text: byte 0xff (invalid start byte)",
        ),
        (b"", None, "mine.yaml:1: the file is empty"),
        (
            b"# a comment\nbase: {seed: 1}\n",
            "quick",
            "mine.yaml:2: the study has no scales: omit --scale",
        ),
        (
            b"base: {seed: 1}\nscales:\n  full: {repeats: 2}\n",
            "quick",
            "mine.yaml:2: scales: no scale 'quick': omit --scale",
        ),
    ],
    ids=["not UTF-8", "empty", "no scales", "unknown scale"],
)
def test_a_problem_of_the_whole_file_has_a_line_number(
    content: bytes, scale: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(path, scale)
    assert str(caught.value) == f"{tmp_path}/{message}"


def test_aliases_cannot_make_a_small_file_large(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(UsageError, match="more than 20,000 values"):
        load(write_study(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    "text",
    [
        "grid:\n" + "".join(f"  axis{n}: [{{label: a}}, {{label: b}}]\n" for n in range(60)),
        "repeats: 1000\ninclude:\n" + "".join(f"  - {{label: a{n}}}\n" for n in range(11)),
        "repeats: 1000\nparts:\n" + "".join(f"  p{n}: {{}}\n" for n in range(11)),
    ],
    ids=["axes", "include", "parts"],
)
def test_too_many_cells_are_rejected_immediately(text: str, tmp_path: Path) -> None:
    assert problems(tmp_path, text) == ["mine.yaml:1: more than 10,000 cells"]


def test_an_unknown_study_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="unknown study 'four-wys': did you mean four-ways"):
        catalogue.find("four-wys")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.yaml: No such file"):
        load(tmp_path / "none.yaml")


def test_a_model_without_options_is_imported_only_by_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cell whose model needs more than this machine has must not stop the other cells.
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_parts(planned(tmp_path, "base: {model: 'needs_more:Network'}\ngrid: {lr: [0.1, 0.2]}"))
