"""Runs seeds until the time is over, or one fails.

python -m tests.helpers.nemesis MINUTES [SEED]; each seed disturbs each workload.
"""

import itertools
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.helpers.nemesis.faults import Schedule
from tests.helpers.nemesis.fit import Fit
from tests.helpers.nemesis.own_loop import OwnLoop
from tests.helpers.nemesis.trial import nemesis
from tests.helpers.processes import start_forkserver


def main(minutes: float, first_seed: int = 0) -> None:
    torch.set_num_threads(1)
    logging.getLogger("allstep").setLevel(logging.WARNING)
    start_forkserver()
    end_s = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder, nemesis(Path(folder)) as nemesis_here:
        for seed in itertools.count(first_seed):
            schedule = Schedule.draw(seed)
            for workload in (Fit(), OwnLoop()):
                start_s, words = time.monotonic(), f"seed {seed}, {workload.name}"
                try:
                    nemesis_here.run(schedule, workload)
                except Exception as error:
                    print(f"{words}: {schedule}\n{error}", file=sys.stderr)
                    sys.exit(f"again: make nemesis MINUTES=0 SEED={seed}")
                print(f"{words}: {time.monotonic() - start_s:.1f} s {schedule}", flush=True)
            if time.monotonic() > end_s:
                break
    print(f"{seed - first_seed + 1} seeds, none failed")


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
