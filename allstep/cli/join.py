"""`allstep join`: adds workers to a run or a script that was started with `--elastic`."""

import argparse
from pathlib import Path

from allstep.cli import launch_elastic, run_folder
from allstep.cli.exits import read_store
from allstep.cli.train import train_worker
from allstep.cli.workers import ask_workers
from allstep.errors import check_integer


def run(arguments: list[str]) -> int:
    """Starts workers that join at the next step, and waits for their end."""
    parser = argparse.ArgumentParser(
        prog="allstep join",
        description="Brings workers to a run that is being trained with --elastic.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--workers", metavar="N", type=int, default=1, help="how many; 1")
    known = parser.parse_args(arguments)
    check_integer("workers", known.workers)
    if launch_elastic.is_of_script(known.run):
        return launch_elastic.join(known.run, known.workers)
    recipe = run_folder.read_recipe(known.run, argument="run")
    store = read_store(known.run)
    recipe.check()
    return ask_workers(
        known.workers,
        train_worker,
        min_workers=store.min_workers,
        joins=store.reachable_address(),
        folder=str(known.run),
        resume=False,
    )[0]
