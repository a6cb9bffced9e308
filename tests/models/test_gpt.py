"""GPT: causality, positions, options, parameter groups, recomputed activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.config import from_mapping
from paceline.errors import ConfigError
from paceline.models.build import GroupedModel, build_model
from paceline.models.gpt import GPT
from paceline.training.loss import cross_entropy
from paceline.training.optimizer import build_optimizer

LENGTH, VOCABULARY = 24, 50


def build(name: str = "gpt-nano", **options: str) -> GPT:
    model = build_model(name, (LENGTH,), VOCABULARY, seed=0, options=options, has_tokens=True)
    assert isinstance(model, GPT)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    cross_entropy(model(tokens()), tokens().roll(1)).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize(
    ("name", "layers", "width", "hidden"),
    [("gpt-nano", 3, 48, 128), ("gpt-micro", 4, 128, 352), ("gpt-mini", 6, 192, 512)],
)
def test_number_of_parameters(name: str, layers: int, width: int, hidden: int) -> None:
    """The head adds none: it is the embedding."""
    block = 4 * width * width + 3 * width * hidden + 2 * width
    count = sum(weight.numel() for weight in build(name).parameters())
    assert count == VOCABULARY * width + layers * block + width


def test_output_has_one_score_per_token_and_position() -> None:
    assert build()(tokens()).shape == (2, LENGTH, VOCABULARY)


def test_a_position_sees_only_itself_and_earlier_ones() -> None:
    model, whole = build(), tokens()
    changed = whole.clone()
    changed[:, 10] = (changed[:, 10] + 1) % VOCABULARY
    before, after = model(whole), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert bool((before[:, 10:] != after[:, 10:]).any(-1).all())


def test_a_prefix_has_the_scores_of_the_whole() -> None:
    model, whole = build(), tokens()
    torch.testing.assert_close(model(whole[:, :7]), model(whole)[:, :7])


def test_order_of_earlier_tokens_matters() -> None:
    model, whole = build(), tokens()
    swapped = whole.clone()
    swapped[:, [2, 3]] = swapped[:, [3, 2]]
    assert not torch.allclose(model(whole)[:, -1], model(swapped)[:, -1], atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 5])
def test_scores_with_a_cache_equal_those_without(prompt: int) -> None:
    model, whole = build().double(), tokens()
    cache = model.new_cache()
    parts = [model(whole[:, :prompt], cache)]
    parts += [model(whole[:, at : at + 1], cache) for at in range(prompt, LENGTH)]
    torch.testing.assert_close(torch.cat(parts, 1), model(whole), rtol=0, atol=1e-12)


def test_model_compiles_into_one_graph() -> None:
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens()), model(tokens()))


def test_options_change_the_model() -> None:
    model = build(layers="2", width="32", heads="4", context="100")
    assert len(model.blocks) == 2
    assert model.embedding.shape == (VOCABULARY, 32)
    assert model.context == 100
    assert build().context == LENGTH


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain, recomputed = build(), build(checkpoint="true")
    assert all(map(torch.equal, gradients(plain), gradients(recomputed)))


def test_recomputed_activations_are_not_kept() -> None:
    def saved_bytes(model: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
            return tensor

        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens())
        return sum(sizes.values())

    assert saved_bytes(build(checkpoint="true")) < 0.5 * saved_bytes(build())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"heads": "5"}, "--model-options heads: must divide width into an even number of units per"
         " head, got 5 heads for a width of 48"),
        ({"heads": "16"}, "--model-options heads: must divide width into an even number of units"
         " per head, got 16 heads for a width of 48"),
        ({"context": "23"}, "--model-options context: must be at least 24, the length of the"
         " samples of --data, got 23"),
        ({"layers": "0"}, "--model-options layers: must be at least 1 and at most 1024, got '0'"),
        ({"checkpoint": "perhaps"}, "--model-options checkpoint: must be true or false,"
         " got 'perhaps'"),
    ],
)  # fmt: skip
def test_an_invalid_option_is_one_line(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as failure:
        build(**options)
    assert failure.value.problems == (problem,)


def test_samples_must_be_sequences() -> None:
    with pytest.raises(ConfigError, match=r"gpt-nano needs sequences of tokens, .* shape \(3, 4\)"):
        build_model("gpt-nano", (3, 4), VOCABULARY, seed=0, has_tokens=True)


def test_norms_and_embedding_are_not_decayed() -> None:
    model = build()
    assert isinstance(model, GroupedModel)
    names = {id(weight): name for name, weight in model.named_parameters()}
    config = from_mapping({"optimizer": "adamw", "weight_decay": 0.1})
    optimizer = build_optimizer(config, model.parameters(), model.undecayed_weights())
    decayed, others = (
        {names[id(weight)] for weight in group["params"]} for group in optimizer.param_groups
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert "embedding" in others
    assert all(name.endswith("norm.weight") for name in others - {"embedding"})
    assert len(others) == 2 * 3 + 2
    assert decayed | others == set(names.values())
    assert not any("norm" in name for name in decayed)


def test_muon_leaves_the_embedding_to_adamw() -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1}
    muon_model, adamw_model = build(), build()
    for name, model in (("muon", muon_model), ("adamw", adamw_model)):
        config = from_mapping({"optimizer": name, **settings})
        optimizer = build_optimizer(config, model.parameters(), model.undecayed_weights())
        gradients(model)
        optimizer.step()
    others = dict(adamw_model.named_parameters())
    for name, weight in muon_model.named_parameters():
        is_elementwise = weight.dim() == 1 or name == "embedding"
        assert torch.equal(weight, others[name]) == is_elementwise, name
