"""`allstep evaluate`: evaluates the newest or best checkpoint on each test sample once."""

import argparse
from contextlib import closing
from pathlib import Path

from allstep.cli import run_folder
from allstep.cli.workers import num_workers_to_start, run_on_workers
from allstep.comm import Communicator
from allstep.train import Checkpoints, MeasuredRun, Run


def run(arguments: list[str]) -> int:
    """Evaluates a run, on any number of workers."""
    parser = argparse.ArgumentParser(
        prog="allstep evaluate",
        description="Evaluates a run's newest checkpoint, or its best.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--workers", metavar="N", type=int, help="workers to start on this machine")
    parser.add_argument(
        "--checkpoint",
        choices=("newest", "best"),
        default="newest",
        help="which one: the newest, or the best by the run's `best_metric`",
    )
    known = parser.parse_args(arguments)
    best = known.checkpoint == "best"
    recipe = run_folder.data_parallel(run_folder.read_recipe(known.run, argument="run"))
    if not best:  # which may be there before the first of the others
        run_folder.check_has_checkpoint(known.run)
    recipe.check()
    num_workers = num_workers_to_start(known.workers)
    return run_on_workers(num_workers, evaluate_worker, folder=str(known.run), best=best)


def evaluate_worker(comm: Communicator, folder: str, best: bool) -> None:
    """Evaluates as one of the workers; rank 0 prints the metrics and their sums."""
    shared, run_dir = run_folder.share_run(comm, folder)
    recipe = run_folder.data_parallel(run_folder.with_fitting_shares(shared, comm))
    with closing(Run(recipe.task(comm), recipe, comm)) as trained:
        Checkpoints(run_dir / "checkpoints", comm).restore(MeasuredRun(trained), best=best)
        metrics = trained.evaluate()
        totals = trained.totals
        step = trained.step
    if comm.rank == 0:
        print(f"{run_dir}, step {step}")
        for name, value in metrics.items():
            total, count = totals[name]
            print(f"{name}  {value:.6g}  ({total:.10g} of {count:.10g})")
