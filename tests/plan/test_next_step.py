from dataclasses import replace

import pytest

from allstep.plan.next_step import RunNumbers, next_step

WELL = RunNumbers(
    workers=2,
    num_copies=2,
    samples_per_s=1800.0,
    num_timed_steps=60,
    single_worker_samples_per_s=1000.0,
    data_share=0.01,
    exchange_share=0.05,
    mfu=0.5,
    global_batch=128,
    micro_batch=32,
    loader_workers=0,
    num_cores=2,
    num_gpus=0,
)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "2 workers give 1.8x; scaling pays."),
        (
            {"workers": 1, "single_worker_samples_per_s": None},
            "nothing stands out: train longer, or on more machines.",
        ),
        (
            {"resume_command": "allstep train --resume runs/a"},
            "the run was interrupted; continue it with `allstep train --resume runs/a`.",
        ),
        (
            {"samples_per_s": 0.0, "num_timed_steps": 0},
            "the run is done; too few steps were left in this part of it to judge its speed by.",
        ),
        (
            {"samples_per_s": 600.0},
            "2 workers are slower than 1 here (0.6x): don't; use `--workers 1`.",
        ),
        (
            {"samples_per_s": 980.0},
            "2 workers are slower than 1 here (0.98x): don't; use `--workers 1`.",
        ),
        (
            {"data_share": 0.35},
            "35% of a step is spent waiting for data: try `--loader-workers 1`.",
        ),
        (
            {"data_share": 0.35, "loader_workers": 2, "num_cores": 16},
            "35% of a step is spent waiting for data: try `--loader-workers 4`.",
        ),
        (
            {"data_share": 0.35, "loader_workers": 1},
            "35% of a step is spent waiting for data and every core has a loader already:"
            " make samples cheaper to read (smaller files, faster disk).",
        ),
        (
            {"workers": 3, "num_cores": 4, "samples_per_s": 2000.0},
            "a step has 4 micro-batches for 3 workers, which idle 33% of it:"
            " try `--global-batch 192` or a smaller `--micro-batch`.",
        ),
        (
            {"workers": 6, "num_copies": 2, "global_batch": 96, "samples_per_s": 5000.0},
            "a step has 3 micro-batches for 2 copies of the model, which idle 25% of it:"
            " try `--global-batch 128` or a smaller `--micro-batch`.",
        ),
        (
            {"workers": 6, "num_copies": 2, "num_cores": 6, "samples_per_s": 5000.0},
            "6 workers give 5.0x; scaling pays.",
        ),
        (
            {"workers": 3, "num_copies": 1, "num_cores": 11, "samples_per_s": 2900.0},
            "3 workers give 2.9x and cores are left: try `--workers 6`.",
        ),
        (
            {"exchange_share": 0.45},
            "45% of a step is spent waiting for the exchange:"
            " try `--global-batch 256` (more compute for each exchange) or fewer workers.",
        ),
        ({"num_gpus": 8, "num_cores": 64}, "6 GPUs idle: try `--workers 8`."),
        (
            {"workers": 3, "num_copies": 1, "num_gpus": 8, "samples_per_s": 2900.0},
            "5 GPUs idle: try `--workers 6`.",
        ),
        (
            {"workers": 6, "num_copies": 2, "num_gpus": 8, "samples_per_s": 5000.0},
            "6 workers give 5.0x; scaling pays.",
        ),
        (
            {"workers": 1, "single_worker_samples_per_s": None, "mfu": 0.12},
            "1 worker reaches only 12% of the machine's peak: try `--workers 2`.",
        ),
        ({"num_cores": 8}, "2 workers give 1.8x and cores are left: try `--workers 4`."),
        (
            {"samples_per_s": 1100.0},
            "2 workers give only 1.1x: try `--workers 1`, which may do nearly as much.",
        ),
        (
            {"mfu": 0.2},
            "the model reaches 20% of the machine's peak: try `--compile`,"
            " or a larger `--micro-batch`.",
        ),
        (
            {"mfu": 0.2, "num_gpus": 2},
            "the model reaches 20% of the machine's peak: try `--precision bfloat16` or"
            " `--compile`, or a larger `--micro-batch`.",
        ),
    ],
)
def test_next_step_of_each_case(changes, advice):
    numbers = {"num_copies": changes.get("workers", WELL.workers), **changes}
    assert next_step(replace(WELL, **numbers)) == advice


def test_next_step_takes_the_costliest_case_first():
    bad = replace(WELL, samples_per_s=600.0, data_share=0.5, exchange_share=0.5, mfu=0.1)
    assert "slower than 1" in next_step(bad)
    assert "waiting for data" in next_step(replace(bad, samples_per_s=1800.0))
    assert "exchange" in next_step(replace(bad, samples_per_s=1800.0, data_share=0.0))


@pytest.mark.parametrize("share", ["data_share", "exchange_share"])
def test_next_step_ignores_a_share_at_its_threshold(share):
    threshold = {"data_share": 0.20, "exchange_share": 0.30}[share]
    assert next_step(replace(WELL, **{share: threshold})) == next_step(WELL)
    assert next_step(replace(WELL, **{share: threshold + 0.01})) != next_step(WELL)


def test_next_step_never_proposes_more_workers_than_micro_batches():
    numbers = replace(WELL, num_cores=64, global_batch=64)  # 2 micro-batches
    assert "scaling pays" in next_step(numbers)
