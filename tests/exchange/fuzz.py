"""`python -m tests.exchange.fuzz MINUTES`: random programs until time is up, or one is wrong."""

import logging
import sys
import time

import torch
from hypothesis import settings

from tests.exchange.test_state_machine import Training, run


def main(minutes: float) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    logging.getLogger("allstep").setLevel(logging.WARNING)
    settings.register_profile("fuzz", deadline=None, derandomize=False, database=None)
    settings.load_profile("fuzz")
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s:
        run(50)
        print(f"{Training.num_run:,} programs, none wrong", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
