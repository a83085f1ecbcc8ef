"""Recipes: complete trainings, frozen dataclasses whose fields are flags of `allstep train`."""

from allstep.recipes.base import DividedRecipe, Recipe
from allstep.recipes.bert_files import load_bert as load_bert
from allstep.recipes.bert_files import save_bert as save_bert
from allstep.recipes.large_batch import apply_large_batch as apply_large_batch
from allstep.recipes.large_batch import describe_changes as describe_changes
from allstep.recipes.registry import RECIPE_FILE as RECIPE_FILE
from allstep.recipes.registry import REGISTRY, AnyRecipe
from allstep.recipes.registry import find_recipe as find_recipe
from allstep.recipes.registry import read_recipe_file as read_recipe_file
from allstep.recipes.registry import recipe_from_plain as recipe_from_plain
from allstep.recipes.registry import recipe_to_plain as recipe_to_plain

__all__ = ["REGISTRY", "AnyRecipe", "DividedRecipe", "Recipe", "load_bert", "save_bert"]
