"""Registered names, suggestions, and user-defined objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.compression.codec import Codec
from paceline.errors import UnknownNameError, UserCodeError
from paceline.registry import Registry
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy


@pytest.fixture
def animals() -> Registry[type]:
    registry: Registry[type] = Registry("animal")
    registry.register("lion", "builtins:int", "a cat")
    registry.register("zebra", "builtins:str", "a horse")
    return registry


def test_duplicate_name_is_rejected(animals: Registry[type]) -> None:
    with pytest.raises(ValueError, match="lion"):
        animals.register("lion", "builtins:float", "another")


def test_argument_follows_a_name_and_a_colon(animals: Registry[type]) -> None:
    animals.register("horse", "builtins:float", "of a color", argument="COLOR")
    entry, color = animals.split("horse:a:b")
    assert entry is not None
    assert (entry.usage, color) == ("horse:COLOR", "a:b")
    assert animals.load("horse:red") is float
    for incomplete in ("horse", "horse:"):
        with pytest.raises(UnknownNameError, match="use horse:COLOR"):
            animals.load(incomplete)


def test_name_without_an_argument_leaves_the_colon_to_user_defined_objects(
    animals: Registry[type],
) -> None:
    assert animals.split("lion:red") == (None, "")


def test_similar_name_is_suggested(animals: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match="unknown animal 'lin': did you mean lion"):
        animals.load("lin")


def test_unknown_name_lists_all_entries(animals: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match="choose from lion, zebra"):
        animals.load("quagga!")


def test_load_returns_the_registered_object(animals: Registry[type]) -> None:
    assert animals.load("lion") is int


def test_user_object_is_found_in_the_current_folder(
    animals: Registry[type], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_animals_1.py").write_text("class Okapi: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert animals.load("my_animals_1:Okapi").__name__ == "Okapi"


def test_a_missing_user_module_says_where_to_run_the_command(animals: Registry[type]) -> None:
    with pytest.raises(UserCodeError) as caught:
        animals.load("my_absent_animals:Okapi")
    assert str(caught.value).endswith(
        "cannot import my_absent_animals: there is no such module in this folder: run the command"
        " in the folder that has my_absent_animals, or add that folder to PYTHONPATH"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_here", r"cannot import my_animals_\d+: ModuleNotFoundError"),
        ("def broken(:", r"cannot import my_animals_\d+: SyntaxError"),
        ("1 / 0", r"cannot import my_animals_\d+: ZeroDivisionError"),
        ("import math\nmath.nothing", r"cannot import my_animals_\d+: AttributeError"),
        ("", "has no Okapi"),
        ("Okapi = 3", "must be a class or a function"),
    ],
)
def test_failing_user_module_is_a_one_line_error(
    animals: Registry[type],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    message: str,
) -> None:
    name = f"my_animals_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserCodeError, match=message) as caught:
        animals.load(f"{name}:Okapi")
    assert "\n" not in str(caught.value)


class FormerNames(Strategy):
    def attach(self, replica: Replica) -> None:
        """The former name of `setup`."""

    def model_state(self) -> dict[str, Any]:
        return {}


def test_former_method_names_of_a_strategy_are_rejected_with_the_new_names() -> None:
    renames = "rename attach to setup, model_state to checkpoint.model_state_dict$"
    with pytest.raises(UserCodeError, match=f": {renames}"):
        create_strategy(f"{__name__}:FormerNames", {})


class ServesWithoutBase(Strategy):
    def serve(self) -> None:
        """Not part of this contract."""


class AsynchronousWithoutBase(Strategy):
    synchronous = False


@pytest.mark.parametrize("strategy", [ServesWithoutBase, AsynchronousWithoutBase])
def test_servers_and_asynchronous_training_need_a_server_strategy(strategy: type) -> None:
    with pytest.raises(UserCodeError, match=r"need a subclass of .*ServerStrategy$"):
        create_strategy(f"{__name__}:{strategy.__name__}", {})


def test_the_extension_points_are_exported() -> None:
    assert paceline.Strategy is Strategy
    assert paceline.Codec is Codec
