"""Names, near misses, and a user's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UnknownNameError, UserCodeError
from paceline.registry import Registry


@pytest.fixture
def animals() -> Registry[type]:
    registry: Registry[type] = Registry("animal")
    registry.register("lion", "builtins:int", "a cat")
    registry.register("zebra", "builtins:str", "a horse")
    return registry


def test_a_taken_name_is_refused(animals: Registry[type]) -> None:
    with pytest.raises(ValueError, match="lion"):
        animals.register("lion", "builtins:float", "another")


def test_a_near_miss_is_offered(animals: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match="unknown animal 'lin': did you mean lion"):
        animals.load("lin")


def test_a_far_miss_lists_what_exists(animals: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match="choose from lion, zebra"):
        animals.load("quagga!")


def test_a_name_gives_its_object(animals: Registry[type]) -> None:
    assert animals.load("lion") is int


def test_a_users_own_object_is_found_in_the_current_folder(
    animals: Registry[type], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_animals_1.py").write_text("class Okapi: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert animals.load("my_animals_1:Okapi").__name__ == "Okapi"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import no_such_module_here", "does not import: ModuleNotFoundError"),
        ("def broken(:", "does not import: SyntaxError"),
        ("1 / 0", "does not import: ZeroDivisionError"),
        ("import math\nmath.nothing", "does not import: AttributeError"),
        ("", "has no Okapi"),
        ("Okapi = 3", "must be a class or a function"),
    ],
)
def test_a_users_module_that_fails_is_one_line(
    animals: Registry[type],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    told: str,
) -> None:
    name = f"my_animals_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserCodeError, match=told) as caught:
        animals.load(f"{name}:Okapi")
    assert "\n" not in str(caught.value)
