"""`allstep recipes`: lists the recipes, or shows one with all its fields."""

import argparse
import contextlib

from rich.console import Console
from rich.table import Table

from allstep.cli.flags import read_flags
from allstep.recipes import REGISTRY, find_recipe


def run(arguments: list[str]) -> int:
    """Prints a line for each recipe, or the fields, defaults and help of one."""
    parser = argparse.ArgumentParser(
        prog="allstep recipes", description="Lists the recipes, or shows one.", allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show this recipe's fields")
    name = parser.parse_args(arguments).name
    if name is None:
        table = Table.grid(padding=(0, 2))
        for each, recipe_class in REGISTRY.items():
            table.add_row(f"[bold]{each}", recipe_class.summary)
        Console(highlight=False).print(table)
        return 0
    recipe_class = find_recipe(name)
    with contextlib.suppress(SystemExit):  # which follows the help
        read_flags(
            recipe_class, ["--help"], prog=f"allstep train {name}", description=recipe_class.summary
        )
    return 0
