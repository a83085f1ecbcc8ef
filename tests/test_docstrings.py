"""Public functions say what they take and what they give back."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

ROOMS = ["comm", "data", "exchange", "nn", "nn.windows", "optim", "plan", "recipes", "train"]


def missing_sections(function: Callable[..., Any]) -> set[str]:
    lines = (inspect.getdoc(function) or "").splitlines()
    signature = inspect.signature(function)
    missing = set()
    if signature.parameters and "Args:" not in lines:
        missing.add("Args")
    if signature.return_annotation not in (None, "None") and not {"Returns:", "Yields:"} & {*lines}:
        missing.add("Returns")
    return missing


@pytest.mark.parametrize("name", ROOMS)
def test_public_functions_say_what_they_take_and_give(name: str) -> None:
    room = importlib.import_module(f"allstep.{name}")
    public = {each: getattr(room, each) for each in room.__all__}
    functions = {each: found for each, found in public.items() if inspect.isfunction(found)}
    assert {each: m for each, found in functions.items() if (m := missing_sections(found))} == {}


def test_what_is_missing_is_noticed() -> None:
    def bare(x: int) -> int:
        """The same number."""
        return x

    def silent(x: int) -> None:
        """Nothing.

        Args:
            x: a number.
        """

    assert missing_sections(bare) == {"Args", "Returns"}
    assert missing_sections(silent) == set()
