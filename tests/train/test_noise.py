"""The noise scale of a run: right, the same on any number of workers, and harmless."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Stage, Task, TrainOptions
from allstep.errors import UsageError
from allstep.train import RunReport
from allstep.train.metrics import read_metrics
from tests.helpers.ranks import run_ranks

DIM = 50
NUM_SAMPLES = 4096
MICRO_BATCH = 8
GLOBAL_BATCH = 64
NOISE, SIGNAL = 4.0 * DIM, 5.0  # tr(Sigma) and |G|^2


class Quadratic(nn.Module):
    """|w - x|^2 / 2: its gradient at sample x is w - x, with mean and variance as in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().sum(1) / 2


def make_task(num_samples: int = NUM_SAMPLES, lr: float = 0.0) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, DIM, generator=generator, dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0, correction=0)  # exactly tr(Sigma) and |G|^2
    x = x * (NOISE / DIM) ** 0.5 + (SIGNAL / DIM) ** 0.5
    return Task(
        model=Quadratic(),
        train_set=TensorDataset(x),
        test_set=TensorDataset(x[:8]),
        loss=lambda model, data: model(data[0]).mean(),
        metrics=lambda model, data: {"loss": (model(data[0]).sum(), len(data[0]))},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
    )


def fit(
    comm: Communicator, run_dir: Path, task: Task | None = None, **changes: Any
) -> tuple[RunReport, Task]:
    arguments: dict[str, Any] = {
        "epochs": 1,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "precision": "float64",
        "noise_scale_every_steps": 1,
        "evaluate_every_epochs": 100,
    }
    task = task or make_task()
    resume = changes.pop("resume", False)
    options = TrainOptions(**arguments | changes)
    return allstep.fit(task, options, comm, run_dir, resume=resume), task


@pytest.mark.parametrize("wire", ["fp32", "exact"])
def test_noise_scale_of_a_quadratic_with_known_noise_and_signal(wire: str, tmp_path: Path) -> None:
    report, _ = fit(Communicator.single_process(), tmp_path, epochs=3, compression=wire)
    assert report.noise_scale == pytest.approx(NOISE / SIGNAL, rel=0.1)
    assert report.useful_batch is not None
    assert report.useful_batch.startswith("useful up to about B = ")
    assert report.useful_batch.endswith(" workers of 8")


def test_mean_noise_scale_weighs_the_whole_run_alike(tmp_path: Path) -> None:
    """A signal that fades: of late there is more noise in it than there was on the whole."""
    report, _ = fit(Communicator.single_process(), tmp_path, make_task(lr=0.005), epochs=5)
    assert report.noise_scale is not None and report.mean_noise_scale is not None
    signals = [
        SIGNAL * (1 - 0.005) ** (2 * step) for step in range(5 * NUM_SAMPLES // GLOBAL_BATCH)
    ]
    expected = NOISE / (sum(signals) / len(signals))
    assert report.mean_noise_scale == pytest.approx(expected, rel=0.15)
    assert report.noise_scale > 2 * report.mean_noise_scale


def test_noise_scale_is_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    """With short last batches, too: of one micro-batch and a part, and of less than one."""
    for num_samples in (5 * GLOBAL_BATCH + 11, 5 * GLOBAL_BATCH + 3):
        found: dict[int, list[float | None]] = {}
        for size in (1, 2, 4, 8):  # on 8 workers, micro-batch 0 is also its worker's last

            def train(comm: Communicator, num_samples: int = num_samples) -> list[float | None]:
                run_dir = tmp_path / f"{num_samples}-{comm.size}"
                report, _ = fit(comm, run_dir, make_task(num_samples, lr=0.1), log_every_steps=2)
                return [report.noise_scale, *(r.get("noise_scale") for r in read_metrics(run_dir))]

            results = run_ranks(size, train)
            assert all(result == results[0] for result in results)
            found[size] = [value for value in results[0] if value is not None]
        assert len(found[1]) == 4  # in the report, and at steps 2, 4 and 6
        for size in (2, 4, 8):
            assert found[size] == pytest.approx(found[1], rel=1e-10)


def test_noise_scale_control_mean_of_workers_first_micro_batches_differs() -> None:
    """The control: an average over the workers' own first micro-batches depends on them."""
    x = make_task(GLOBAL_BATCH).train_set.tensors[0]
    micro = [part.mean(0).square().sum() for part in x.split(MICRO_BATCH)]
    by_workers = {
        size: torch.stack(micro[:: len(micro) // size]).mean().item() for size in (1, 2, 4)
    }
    assert len({round(value, 6) for value in by_workers.values()}) == 3


def test_noise_scale_changes_neither_model_nor_number_of_collectives(tmp_path: Path) -> None:
    def train(comm: Communicator) -> tuple[Tensor, int, Tensor, int]:
        found: list[Any] = []
        for every in (0, 1):
            num_calls, reduce = 0, comm.all_reduce

            def counted(*args: Any, reduce: Any = reduce, **kwargs: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                return reduce(*args, **kwargs)

            comm.all_reduce = counted  # type: ignore[method-assign]
            report, task = fit(
                comm,
                tmp_path / str(every),
                make_task(4 * GLOBAL_BATCH, lr=0.1),
                noise_scale_every_steps=every,
                log_every_steps=2,
            )
            comm.all_reduce = reduce  # type: ignore[method-assign]
            assert (report.noise_scale is None) == (report.useful_batch is None) == (every == 0)
            found += [task.model.w.detach(), num_calls]
        return tuple(found)

    for plain, plain_calls, measured, calls in run_ranks(2, train):
        assert torch.equal(plain, measured)
        assert calls == plain_calls


def test_noise_scale_of_a_resumed_run(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    whole, _ = fit(comm, tmp_path / "whole", make_task(300, lr=0.1), epochs=2)
    fit(comm, tmp_path / "parts", make_task(300, lr=0.1), epochs=1)
    resumed, _ = fit(comm, tmp_path / "parts", make_task(300, lr=0.1), epochs=2, resume=True)
    assert whole.noise_scale is not None
    assert resumed.noise_scale == whole.noise_scale
    assert resumed.mean_noise_scale == whole.mean_noise_scale


def test_noise_scale_every_few_steps(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    task = make_task(4 * GLOBAL_BATCH)
    report, _ = fit(comm, tmp_path, task, noise_scale_every_steps=4, log_every_steps=1)
    records = [r["noise_scale"] for r in read_metrics(tmp_path) if "noise_scale" in r]
    assert records == [report.noise_scale] * 4  # measured once, at the first step


class Still(torch.optim.SGD):
    """Leaves the parameters alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_noise_scale_leaves_out_nonfinite_gradients(tmp_path: Path) -> None:
    def run(name: str, bad_sample: float) -> list[float | None]:
        task = make_task(4 * GLOBAL_BATCH)
        task.train_set.tensors[0][7] = bad_sample
        task = dataclasses.replace(task, optimizer=lambda model: Still(model.parameters()))
        options = {"log_every_steps": 1, "nonfinite": "propagate"}
        fit(Communicator.single_process(), tmp_path / name, task, **options)
        return [record.get("noise_scale") for record in read_metrics(tmp_path / name)][:4]

    good, bad = run("good", 0.0), run("bad", float("nan"))
    # The bad step alone is missing: where it comes, the number stays as it was.
    (step,) = (i for i in range(4) if bad[i] == (bad[i - 1] if i else None))
    assert bad[:step] == good[:step]
    assert all(value is not None for value in bad[step + 1 :])


def test_noise_scale_does_not_depend_on_the_gradient_scaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while its scale grows, with which steps would weigh more and more."""

    class Growing(torch.amp.GradScaler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, init_scale=8.0, growth_interval=1, **options)

    monkeypatch.setattr(torch.amp, "GradScaler", Growing)
    found = []
    for precision in ("float32", "float16"):
        report, _ = fit(
            Communicator.single_process(), tmp_path / precision, make_task(256), precision=precision
        )
        found.append(report.noise_scale)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_noise_scale_in_a_stage_with_other_micro_batches(tmp_path: Path) -> None:
    task = make_task()
    stage = Stage(
        first_epoch=1,
        train_set=task.train_set,
        test_set=task.test_set,
        global_batch=GLOBAL_BATCH,
        micro_batch=2 * MICRO_BATCH,
    )
    task = dataclasses.replace(task, later_stages=[stage])
    report, _ = fit(Communicator.single_process(), tmp_path, task, epochs=2)
    assert report.mean_noise_scale == pytest.approx(NOISE / SIGNAL, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_scale_every_steps": -1}, r"`noise_scale_every_steps` \(=-1\) must be at least 0"),
        ({"staleness": 1}, r"of the same step, which `staleness` \(=1\) does not give"),
        ({"sync_every": 4}, r"of the same step, which `sync_every` \(=4\) does not give"),
        ({"micro_batch": 128}, r"`micro_batch` \(=128\) is all of it"),
        (
            {"compression": "topk"},
            r"the whole global gradient, of which `compression` \(='topk'\) sends a part",
        ),
        ({"compression": "powersgd"}, r"of which `compression` \(='powersgd'\) sends a part"),
    ],
)
def test_noise_scale_refuses_options_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainOptions(**{"noise_scale_every_steps": 10} | changes)
