"""`allstep verify --machines`: whether the workers' machines give the same bits."""

import argparse
from collections import defaultdict

import torch

from allstep.cli.workers import num_workers_to_start, run_on_workers
from allstep.comm import Communicator
from allstep.doctor import compare_machines


def run_machines(arguments: list[str]) -> int:
    """Compares the workers of a launcher or of this command; 0 if all give the same bits."""
    parser = argparse.ArgumentParser(
        prog="allstep verify",
        usage="allstep verify --machines [--workers N]",
        description="Says whether the workers' machines compute alike, to the last bit: hashes a"
        " fixed set of products and convolutions. Start it on all hosts with torchrun, srun or"
        " mpirun.",
        allow_abbrev=False,
    )
    parser.add_argument("--machines", action="store_true", required=True)
    parser.add_argument("--workers", metavar="N", type=int, help="workers to start on this machine")
    known = parser.parse_args(arguments)
    return run_on_workers(num_workers_to_start(known.workers), machines_worker)


def machines_worker(comm: Communicator) -> int:
    """Compares as one of the workers; rank 0 prints the result."""
    found = compare_machines(comm)
    threads = comm.all_gather_object(torch.get_num_threads())
    unlike = {name: hashes for name, hashes in found.items() if len(set(hashes)) > 1}
    if comm.rank == 0:
        for name, hashes in found.items():
            ranks = defaultdict(list)
            for rank, value in enumerate(hashes):
                ranks[value].append(str(rank))
            told = "; ".join(f"{value} on {', '.join(who)}" for value, who in ranks.items())
            print(f"{name}: {'the same on all' if len(ranks) == 1 else told}")
        print(_conclusion(comm.size, list(unlike), threads))
    return 1 if unlike else 0


def _conclusion(size: int, unlike: list[str], threads: list[int]) -> str:
    """>>> _conclusion(2, [], [1, 1])
    '2 workers compute alike, with 1 thread each.'
    """
    if not unlike:
        plural = "s" if threads[0] > 1 else ""
        workers = "1 worker computes" if size == 1 else f"{size} workers compute"
        return f"{workers} alike, with {threads[0]} thread{plural} each."
    cause = "processors or libraries do"
    if len(set(threads)) > 1:
        cause = f"their numbers of threads do ({', '.join(map(str, threads))}): set OMP_NUM_THREADS"
    return (
        f"The workers don't compute alike: {', '.join(unlike)} differ, as {cause}. A training on"
        " them is right, but not the same to the last bit on another number of workers."
    )
