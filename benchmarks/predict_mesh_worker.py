"""Steps of a transformer on 2 x 1 and on 1 x 2 workers, and what predicts them.

python benchmarks/predict_mesh_worker.py FILE REPEATS WIDTH...   # as a rank, by bench_predict_mesh
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import interleave, run_worker
from mesh_worker import (
    MICRO_BATCH,
    STEPS_PER_EPOCH,
    TOKENS,
    VOCAB,
    allstep_loop,
    bare_loop,
    loss_of,
    make_model,
)
from torch import Tensor

from allstep import Communicator
from allstep.comm.algorithms import default_algorithm
from allstep.doctor import Training, forward_share, measure, measure_workload

NUM_MICRO_BATCHES = 2  # of each worker along `data`


def measure_width(comm: Communicator, width: int, repeats: int) -> dict[str, Any]:
    """A micro-batch's step, and steps on both meshes and of a whole model, by turns.

    Each step is a pair: seconds, and seconds of this process on a core.
    """
    batches, model = make_batches(comm.rank), make_model(width)
    optimizer = torch.optim.AdamW(model.parameters())
    training = Training(model, lambda model: loss_of(model, batches[0][0]), optimizer)
    workload = measure_workload(comm, training, num_samples=MICRO_BATCH)
    halves = [half for b in model.blocks for half in (b.attention, b.mlp)]
    shares = [forward_share(training, layers) for layers in (halves, [model.logits])]
    one_copy = comm.mesh(data=1, tensor=2)
    loops = {
        "2x1": allstep_loop(comm.mesh(data=2, tensor=1), width, batches, True),
        "1x2": allstep_loop(one_copy, width, make_batches(0), True),
        "whole": bare_loop(one_copy, width, batches, True, is_divided=False),
    }
    steps = {name: loop.__next__ for name, loop in loops.items()}
    seconds: Any = interleave(steps, repeats, warmups=6, clock=both_clocks)
    return {
        "workload": asdict(workload),
        "divided_share": shares[0],
        "logits_share": shares[1],
        "steps": {name: [pair.tolist() for pair in pairs] for name, pairs in seconds.items()},
    }


def both_clocks() -> Any:
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def make_batches(seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(VOCAB, (MICRO_BATCH, TOKENS), generator=generator)
            for _ in range(NUM_MICRO_BATCHES)
        ]
        for _ in range(STEPS_PER_EPOCH)
    ]


def main() -> None:
    file, repeats, *widths = sys.argv[1:]
    run_worker(
        lambda comm: {
            "measurements": asdict(measure(comm)),
            "algorithm": default_algorithm(comm, torch.float32),
            "widths": {width: measure_width(comm, int(width), int(repeats)) for width in widths},
        },
        Path(file),
    )


if __name__ == "__main__":
    main()
