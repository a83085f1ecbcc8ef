"""The recipes by name, and recipes as plain data, as stored in a run's folder."""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import allstep
from allstep import UsageError
from allstep.files import from_plain, read_json
from allstep.recipes.base import DividedRecipe, Recipe

RECIPE_FILE = "recipe.json"
"""Name of the file with the recipe in a run's folder."""

_DAMAGED = (LookupError, TypeError, AttributeError, RecursionError)  # from JSON of another form

AnyRecipe = Recipe | DividedRecipe
"""A recipe that `allstep train` can run."""


class _Registry(UserDict[str, Any]):
    """Recipes by name; the module of a recipe is imported on first access."""

    def __getitem__(self, name: str) -> type[AnyRecipe]:
        module, recipe = self.data[name]
        found: type[AnyRecipe] = getattr(import_module(module), recipe)
        return found


REGISTRY: Mapping[str, type[AnyRecipe]] = _Registry(
    {
        "bert": ("allstep.recipes.bert", "Bert"),
        "cots": ("allstep.recipes.cots", "Cots"),
        "digits": ("allstep.recipes.digits", "Digits"),
        "fashion": ("allstep.recipes.fashion", "Fashion"),
        "finetune": ("allstep.recipes.finetune", "FineTune"),
        "gru": ("allstep.recipes.gru", "Gru"),
        "images": ("allstep.recipes.images", "Images"),
        "text": ("allstep.recipes.text", "Text"),
    }
)
"""The recipes that come with allstep, by name."""


def find_recipe(name: str) -> type[AnyRecipe]:
    """The recipe of this name.

    Raises:
        UsageError: if there is none; the message suggests the nearest names.
    """
    if name not in REGISTRY:
        raise UsageError(
            f"There is no recipe `{name}`; {allstep.errors.nearest_names(name, REGISTRY)}"
        )
    return REGISTRY[name]


def recipe_to_plain(recipe: AnyRecipe) -> dict[str, Any]:
    """The name and all fields of a recipe as plain data."""
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    plain = {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
    return {"recipe": recipe.name, "allstep": allstep.__version__, "fields": plain}


def recipe_from_plain(plain: dict[str, Any]) -> AnyRecipe:
    """The inverse of `recipe_to_plain`.

    Raises:
        UsageError: if the recipe or one of its fields doesn't exist (any more).
    """
    recipe_class = find_recipe(plain["recipe"])
    unknown = sorted(set(plain["fields"]) - {field.name for field in fields(recipe_class)})
    if unknown:
        raise UsageError(
            f"`{unknown[0]}` is no field of recipe `{recipe_class.name}`;"
            f" the run was made by allstep {plain['allstep']}, this is {allstep.__version__}."
        )
    recipe: AnyRecipe = from_plain(recipe_class, plain["fields"])
    return recipe


def read_recipe_file(path: Path) -> AnyRecipe:
    """Reads the recipe of a run from its `RECIPE_FILE`.

    Raises:
        FileNotFoundError: if there is no such file.
        UsageError: if it doesn't hold a recipe, or one that doesn't exist (any more).
    """
    try:
        return recipe_from_plain(read_json(path))
    except (JSONDecodeError, UnicodeDecodeError, *_DAMAGED):
        raise UsageError(f"{path} is damaged: it doesn't hold a recipe.") from None
