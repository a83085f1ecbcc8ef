"""Runs seeds until one fails.

python -m tests.helpers.simulation training|checkpoints FIRST NUMBER
"""

import logging
import sys

import torch

from tests.helpers.simulation.seeds import CHECKS


def main() -> None:
    check, first, number = CHECKS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for seed in range(first, first + number):
        try:
            check(seed)
        except AssertionError as error:
            sys.exit(str(error))
    print(f"{number} seeds")


if __name__ == "__main__":
    main()
