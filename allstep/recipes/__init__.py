"""Trainings ready to run; each is a frozen dataclass whose fields are flags of `allstep train`."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from allstep.recipes.base import DividedRecipe, Recipe
from allstep.recipes.bert_files import load_bert as load_bert
from allstep.recipes.bert_files import save_bert as save_bert
from allstep.recipes.large_batch import apply_large_batch as apply_large_batch
from allstep.recipes.large_batch import describe_changes as describe_changes

__all__ = ["REGISTRY", "AnyRecipe", "DividedRecipe", "Recipe", "load_bert", "save_bert"]

AnyRecipe = Recipe | DividedRecipe
"""What `allstep train` can run."""


class _Registry(Mapping[str, type[AnyRecipe]]):
    """Recipes by name; a recipe's module is imported when it is asked for."""

    def __init__(self, places: Mapping[str, tuple[str, str]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[AnyRecipe]:
        module, recipe = self._places[name]
        found: type[AnyRecipe] = getattr(import_module(module), recipe)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
