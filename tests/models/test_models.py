"""Models: output shapes, sizes, seeding, and the start of training."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError, UnknownNameError, UserCodeError
from paceline.models import MODELS, TOKEN_MODELS
from paceline.models.build import build_model, initialize_from_data
from paceline.models.resnet import ResidualBlock
from tests.models.golden.make import CASES, CIFAR_SHAPE, CLASSES, MNIST_SHAPE, Case, batch, build

SHAPES = [MNIST_SHAPE, CIFAR_SHAPE]
IMAGE_MODELS = [name for name in MODELS.names() if name not in TOKEN_MODELS]
FLAT = ["softmax", "mlp"]
CONVOLUTIONAL = [name for name in IMAGE_MODELS if name not in FLAT]
BATCH_NORMALIZED = [name for name in IMAGE_MODELS if name.startswith(("whitened", "vgg", "resnet"))]

GOLDEN = Path(__file__).parent / "golden"

FIRST_LOSS_TOLERANCE = 1e-5
"""Relative. The first loss is a continuous function of the weights: float32 gave it to within 1e-6
of float64 with AVX-512, AVX2 and plain SSE kernels, and with and without oneDNN."""

DESCENT_TOLERANCE = 0.01
"""Of the whole fall of a curve. A gradient jumps where rounding decides a ReLU or a maximum the
other way, and which ones it decides so differs between CPUs: one in a late layer moves the gradient
of a small batch by about 0.6 %. With the kernels named above float32 stayed within 2e-4 of the
fall; a momentum of 0.8 leaves every curve by 4e-2 or more, a rate 5 % higher by 2e-2 or more."""


def train(model: nn.Module, case: Case, momentum: float) -> list[float]:
    """Return the loss before each update, with the PyTorch loss and optimizer in float32."""
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=momentum)
    inputs, labels = batch(case)
    if case.vocabulary is None:
        inputs = inputs.float()
    losses = []
    for iteration in range(case.losses):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        losses.append(loss.item())
        if iteration < case.losses - 1:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


def golden_losses(name: str) -> list[float]:
    curve: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    losses: list[float] = curve["losses"]
    return losses


def follows(losses: list[float], golden: list[float]) -> bool:
    """Return whether a curve, or its beginning, matches the golden one within tolerances."""
    descent = golden[0] - golden[-1]
    allowed = [FIRST_LOSS_TOLERANCE * golden[0]] + [DESCENT_TOLERANCE * descent] * len(losses[1:])
    return all(
        abs(loss - wanted) <= most
        for loss, wanted, most in zip(losses, golden, allowed, strict=False)
    )


def first_loss(model: nn.Module, case: Case) -> list[float]:
    return train(model, case._replace(losses=1), case.momentum)


def drop_first(kind: type[nn.Module], model: nn.Module) -> nn.Module:
    layers = list(model.children())
    layers.remove(next(layer for layer in layers if isinstance(layer, kind)))
    return nn.Sequential(*layers)


def drop_shortcuts(model: nn.Module) -> nn.Module:
    for block in model.modules():
        if isinstance(block, ResidualBlock) and isinstance(block.shortcut, nn.Identity):
            block.shortcut.register_forward_hook(lambda _module, _args, output: 0 * output)
    return model


def initialize_with_pytorch_defaults(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return model


def shrink_norms(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            nn.init.constant_(module.weight, 0.9)
    return model


def weights_equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def outline(name: str, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model on the meta device, for tests of its structure."""
    with torch.device("meta"):
        return build_model(name, sample_shape, classes, seed=0)


def output_shape(model: nn.Module, *input_shape: int) -> tuple[int, ...]:
    """Return the output shape of a model on the meta device."""
    scores = model(torch.zeros(input_shape, device="meta"))
    return tuple(scores.shape)


def parameters_in(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


# Loss curves


@pytest.mark.parametrize("name", MODELS.names())
def test_first_updates_match_the_float64_reference(name: str) -> None:
    case = CASES[name]
    losses = train(build(name, case), case, case.momentum)
    golden = golden_losses(name)
    assert len(losses) == len(golden)
    assert follows(losses, golden), f"{losses} is not {golden}"


@pytest.mark.parametrize("name", ["softmax", "mlp", "lenet", "cnn", "gpt-nano"])
def test_different_momentum_changes_the_curve(name: str) -> None:
    case = CASES[name]
    losses = train(build(name, case), case, momentum=0.8)
    assert not follows(losses, golden_losses(name))


@pytest.mark.parametrize(
    "name", ["softmax", "mlp", "lenet", "cnn", "vgg11", "resnet18", "gpt-nano"]
)
def test_different_initial_weights_change_the_curve(name: str) -> None:
    case = CASES[name]
    model = build(name, case, seed=1)
    assert not follows(first_loss(model, case), golden_losses(name))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mlp", lambda model: drop_first(nn.ReLU, model)),
        ("lenet", lambda model: drop_first(nn.ReLU, model)),
        ("cnn", lambda model: drop_first(nn.ReLU, model)),
        ("vgg11", lambda model: drop_first(nn.BatchNorm2d, model)),
        ("resnet18", drop_shortcuts),
        ("resnet18", initialize_with_pytorch_defaults),
        ("gpt-nano", shrink_norms),
    ],
)
def test_changed_model_changes_the_curve(
    name: str, change: Callable[[nn.Module], nn.Module]
) -> None:
    case = CASES[name]
    with torch.random.fork_rng(devices=[]):
        changed = change(build(name, case))
    assert not follows(first_loss(changed, case), golden_losses(name))


def test_every_model_has_a_golden_curve() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(MODELS.names())


@pytest.mark.parametrize("name", MODELS.names())
def test_golden_files_match_the_settings_of_their_case(name: str) -> None:
    curve: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    case = CASES[name]
    assert curve.get("vocabulary") == case.vocabulary
    assert curve["lr"] == case.lr
    assert curve["momentum"] == case.momentum
    assert curve["batch"] == case.batch
    assert tuple(curve["sample_shape"]) == case.sample_shape
    assert len(curve["losses"]) == case.losses


# Shapes


@pytest.mark.parametrize("name", ["softmax", "mlp"])
def test_models_of_images_and_floats_reject_tokens(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--model: {name} needs images or floats"):
        build_model(name, (32,), 256, seed=0, has_tokens=True)


def test_models_of_tokens_reject_floats() -> None:
    with pytest.raises(ConfigError, match="--model: gpt-nano needs tokens"):
        build_model("gpt-nano", (32,), 256, seed=0)


@pytest.mark.parametrize("sample_shape", SHAPES, ids=["mnist", "cifar"])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_output_has_one_score_per_class(name: str, sample_shape: tuple[int, ...]) -> None:
    assert output_shape(outline(name, sample_shape, 7), 2, *sample_shape) == (2, 7)


@pytest.mark.parametrize("name", FLAT)
def test_flat_models_accept_vectors(name: str) -> None:
    assert output_shape(outline(name, (20,), 3), 2, 20) == (2, 3)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional_models_reject_vectors(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_model(name, (784,), 10, seed=0)
    message = str(refusal.value)
    assert name in message
    assert "(784,)" in message
    assert "softmax and mlp" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "smallest"), [("lenet", 16), ("cnn", 6), ("resnet18", 9), ("whitened_cnn", 17)]
)
def test_smallest_image_size_is_accepted(name: str, smallest: int) -> None:
    model = outline(name, (1, smallest, smallest), 3)
    assert output_shape(model, 1, 1, smallest, smallest) == (1, 3)
    with pytest.raises(ConfigError, match=f"at least {smallest}x{smallest} pixels"):
        build_model(name, (1, smallest, smallest - 1), 3, seed=0)


@pytest.mark.parametrize("sample_shape", [(1, 5, 40), (3, 33, 64)])
def test_vgg_accepts_any_image_size(sample_shape: tuple[int, ...]) -> None:
    assert output_shape(outline("vgg11", sample_shape, 3), 1, *sample_shape) == (1, 3)


def test_vgg_pads_28_pixel_images_to_32_pixels() -> None:
    image = torch.arange(2 * 28 * 28).reshape(2, 1, 28, 28) % 17 / 17
    framed = torch.zeros(2, 1, 32, 32)
    framed[:, :, 2:30, 2:30] = image
    small = build_model("vgg11", (1, 28, 28), CLASSES, seed=0).eval()
    large = build_model("vgg11", (1, 32, 32), CLASSES, seed=0).eval()
    with torch.inference_mode():
        torch.testing.assert_close(small(image), large(framed))


@pytest.mark.parametrize("name", BATCH_NORMALIZED)
def test_batch_norm_accepts_a_batch_of_one(name: str) -> None:
    model = outline(name, MNIST_SHAPE, CLASSES).train()
    assert output_shape(model, 1, *MNIST_SHAPE) == (1, CLASSES)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_no_model_has_dropout(name: str) -> None:
    dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    model = outline(name, CIFAR_SHAPE, CLASSES)
    assert not any(isinstance(module, dropout) for module in model.modules())


# Sizes


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def convolution(inputs: int, outputs: int, side: int) -> int:
    return inputs * outputs * side * side + outputs


@pytest.mark.parametrize(
    ("name", "sample_shape", "expected"),
    [
        ("softmax", MNIST_SHAPE, linear(784, 10)),
        (
            "mlp",
            CIFAR_SHAPE,
            linear(3072, 1024)
            + linear(1024, 512)
            + linear(512, 256)
            + linear(256, 128)
            + linear(128, 64)
            + linear(64, 32)
            + linear(32, 10),
        ),
        # 32 pixels: 28 after the first convolution, 14 pooled, 10 after the second, 5 pooled.
        (
            "lenet",
            CIFAR_SHAPE,
            convolution(3, 6, 5) + convolution(6, 16, 5) + linear(16 * 5 * 5, 64) + linear(64, 10),
        ),
        # 28 pixels: 26 and 24 after the convolutions, 12 pooled.
        (
            "cnn",
            MNIST_SHAPE,
            convolution(1, 32, 3)
            + convolution(32, 64, 3)
            + linear(64 * 144, 128)
            + linear(128, 10),
        ),
    ],
)
def test_small_models_have_the_expected_number_of_parameters(
    name: str, sample_shape: tuple[int, ...], expected: int
) -> None:
    assert parameters_in(outline(name, sample_shape, 10)) == expected


def vgg_parameters(widths: list[int]) -> int:
    """Weights, bias and two batch norm parameters per convolution; one linear layer."""
    pairs = zip([3, *widths], widths, strict=False)
    return sum(9 * before * after + 3 * after for before, after in pairs) + linear(512, 10)


@pytest.mark.parametrize(
    ("name", "widths", "published_millions"),
    [
        ("vgg11", [64, 128, *[256] * 2, *[512] * 4], 9.23),
        ("vgg13", [64, 64, 128, 128, *[256] * 2, *[512] * 4], 9.42),
        ("vgg16", [64, 64, 128, 128, *[256] * 3, *[512] * 6], 14.73),
        ("vgg19", [64, 64, 128, 128, *[256] * 4, *[512] * 8], 20.04),
    ],
)
def test_vgg_has_the_published_number_of_parameters(
    name: str, widths: list[int], published_millions: float
) -> None:
    parameters = parameters_in(outline(name, CIFAR_SHAPE, 10))
    assert parameters == vgg_parameters(widths)
    assert round(parameters / 1e6, 2) == published_millions


def resnet_parameters(blocks: list[int]) -> int:
    """Convolutions without bias, two batch norm parameters per channel, 1x1 shortcuts."""
    total, before = 9 * 3 * 64 + 2 * 64, 64
    for width, count in zip([64, 128, 256, 512], blocks, strict=True):
        total += 9 * before * width + 9 * width * width * (2 * count - 1) + 2 * width * 2 * count
        if before != width:
            total += before * width + 2 * width
        before = width
    return total + linear(512, 10)


@pytest.mark.parametrize(
    ("name", "blocks", "published_millions"),
    [("resnet18", [2, 2, 2, 2], 11.17), ("resnet34", [3, 4, 6, 3], 21.28)],
)
def test_resnet_has_the_published_number_of_parameters(
    name: str, blocks: list[int], published_millions: float
) -> None:
    parameters = parameters_in(outline(name, CIFAR_SHAPE, 10))
    assert parameters == resnet_parameters(blocks)
    assert round(parameters / 1e6, 2) == published_millions


# Initialization from data


def correlated_images(samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(samples, 3, 20, 20, generator=generator)
    return images + 2 * F.avg_pool2d(images, 3, stride=1, padding=1)


def test_whitened_cnn_decorrelates_patches() -> None:
    images = correlated_images(200)
    model = build_model("whitened_cnn", (3, 20, 20), CLASSES, seed=0)
    initialize_from_data("whitened_cnn", model, lambda samples: images[:samples], seed=0)
    whiten = model.get_submodule("whiten")
    outputs = whiten(images).detach().transpose(0, 1).flatten(1)
    # The filters of the other sign follow.
    torch.testing.assert_close(outputs[12:], -outputs[:12])
    covariance = outputs[:12] @ outputs[:12].T / outputs.shape[1]
    torch.testing.assert_close(covariance, torch.eye(12), atol=0.01, rtol=0)


def test_whitening_is_not_trained() -> None:
    model = build_model("whitened_cnn", (3, 20, 20), CLASSES, seed=0)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    norms = {
        f"blocks.{block}.{layer}_norm.weight" for block in range(3) for layer in ("first", "second")
    }
    assert frozen == {"whiten.weight", *norms}


def test_data_initialization_is_seeded() -> None:
    class Noisy(nn.Linear):
        init_samples = 7

        def initialize_from(self, inputs: torch.Tensor) -> None:
            nn.init.constant_(self.bias, float(len(inputs)))
            nn.init.normal_(self.weight)

    models = [Noisy(4, 3) for _ in range(2)]
    before = random_states()
    for model in models:
        initialize_from_data("noisy", model, lambda samples: torch.zeros(samples, 4), seed=2)
    assert weights_equal(*models)
    assert models[0].bias[0] == 7
    assert random_states() == before


def test_failing_data_initialization_is_one_line() -> None:
    class Broken(nn.Linear):
        init_samples = 7

        def initialize_from(self, inputs: torch.Tensor) -> None:
            raise RuntimeError("no such inputs\nand more")

    with pytest.raises(UserCodeError) as failure:
        initialize_from_data("mine:Broken", Broken(4, 3), torch.zeros, seed=0)
    assert "cannot initialize model 'mine:Broken' from data" in str(failure.value)
    assert "\n" not in str(failure.value)


# Seeds and names


@pytest.mark.parametrize("name", ["softmax", "lenet", "resnet18"])
def test_same_seed_gives_the_same_weights(name: str) -> None:
    models = [build_model(name, CIFAR_SHAPE, CLASSES, seed=5) for _ in range(2)]
    assert weights_equal(*models)


def test_different_seed_gives_different_weights() -> None:
    models = [build_model("lenet", CIFAR_SHAPE, CLASSES, seed=seed) for seed in (5, 6)]
    assert not weights_equal(*models)


def random_states() -> list[bytes]:
    numpy_state = np.random.get_state(legacy=False)
    return [
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        repr(numpy_state["state"]["pos"]).encode() + numpy_state["state"]["key"].tobytes(),
    ]


def test_global_random_state_is_preserved() -> None:
    before = random_states()
    build_model("lenet", CIFAR_SHAPE, CLASSES, seed=5)
    assert random_states() == before


def test_duplicate_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="'lenet' is already registered"):
        MODELS.register("lenet", "elsewhere:lenet", "another one")


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean resnet18"):
        build_model("resnet-18", CIFAR_SHAPE, CLASSES, seed=0)


def test_listing_models_does_not_import_torch() -> None:
    check = "import sys, paceline.models as m; m.MODELS.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# User-defined models

USER_MODULE = """
import random
import numpy as np
import torch
from torch import nn

class NoArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

class OwnOptions(nn.Module):
    def __init__(self, hidden=5, depth=2):
        super().__init__()
        self.layer = nn.Linear(4, hidden)

def by_position(shape, count):
    return nn.Linear(shape[0], count)

def by_name(*, width=9, classes):
    return nn.Linear(width, classes)

def from_any_generator():
    layer = nn.Linear(3, 1)
    layer.bias.data.fill_(random.random())
    layer.weight.data[0, 0] = np.random.rand()
    return layer

def three_arguments(shape, count, more):
    return nn.Linear(1, 1)

def fails():
    raise RuntimeError("no such layer\\nand more")

def not_a_module():
    return {}

built = nn.Linear(1, 1)
number = 7
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_models.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_models", raising=False)
    return "users_models"


@pytest.mark.parametrize(
    ("attribute", "weight_shape"),
    [
        ("NoArguments", (3, 4)),
        ("OwnOptions", (5, 4)),
        ("by_position", (8, 6)),
        ("by_name", (8, 9)),
    ],
)
def test_custom_factory_receives_the_arguments_it_accepts(
    users_module: str, attribute: str, weight_shape: tuple[int, int]
) -> None:
    model = build_model(f"{users_module}:{attribute}", (6,), 8, seed=0)
    assert next(model.parameters()).shape == weight_shape


def test_custom_model_is_seeded_for_every_random_generator(users_module: str) -> None:
    models = [build_model(f"{users_module}:from_any_generator", (6,), 8, seed=3) for _ in range(2)]
    assert weights_equal(*models)


@pytest.mark.parametrize(
    ("attribute", "line"),
    [
        ("three_arguments", "TypeError: must accept (sample_shape, classes)"),
        ("fails", "cannot build model 'users_models:fails': RuntimeError: no such layer"),
        ("not_a_module", "returned dict, expected a torch.nn.Module"),
        ("built", "is already an instance"),
        ("number", "must be a class or a function"),
        ("missing", "has no missing"),
    ],
)
def test_invalid_custom_model_is_a_one_line_error(
    users_module: str, attribute: str, line: str
) -> None:
    with pytest.raises(UserCodeError) as failure:
        build_model(f"{users_module}:{attribute}", (6,), 8, seed=0)
    message = str(failure.value)
    assert f"{users_module}:{attribute}" in message
    assert line in message
    assert "\n" not in message


def test_error_in_a_user_model_is_reported_completely_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def check(width):\n"
        "    if width < 8:\n"
        "        raise ValueError('first\\nsecond line')\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        check(4)\n"
        "class InTorch(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Conv2d(3, 4, 3, groups=2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError) as failure:
        build_model("mine:Net", (6,), 8, seed=0)
    assert str(failure.value) == (
        "cannot build model 'mine:Net': ValueError: first second line (mine.py:4)"
    )
    with pytest.raises(UserCodeError, match=r" \(mine\.py:12\)$"):
        build_model("mine:InTorch", (6,), 8, seed=0)


def test_import_error_of_a_custom_module_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_models.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError) as failure:
        build_model("broken_models:Net", (6,), 8, seed=0)
    message = str(failure.value)
    assert "cannot import broken_models" in message
    assert "no_such_package_at_all" in message
    assert "\n" not in message


def test_config_error_of_a_wrapped_model_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrapping_models.py").write_text("from paceline.models.lenet import lenet as own\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="lenet needs images"):
        build_model("wrapping_models:own", (6,), 8, seed=0)
