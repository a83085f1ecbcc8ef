"""Runs seeds until one fails.

python -m tests.helpers.simulation FIRST NUMBER
"""

import logging
import sys

import torch

from tests.helpers.simulation.training import Simulation


def main() -> None:
    first, number = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    for seed in range(first, first + number):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except AssertionError as error:
            sys.exit(f"seed {seed}: {simulation.faults}: {error}")
    print(f"{number} seeds")


if __name__ == "__main__":
    main()
