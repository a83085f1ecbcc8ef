"""The parts of `verify`: sketches, records, what is rounding, constants, the watchdog."""

import contextlib
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, Dataset

import allstep
from allstep.doctor.verify import (
    Recorder,
    RunRecord,
    StepRecord,
    WorkerRecord,
    diagnose,
    watchdog,
)
from allstep.doctor.verify.ablation import Ablation
from allstep.doctor.verify.compare import (
    _noise_tensors,
    find_divergence,
    limit_of,
    nonfinite_step,
)
from allstep.doctor.verify.constants import ConstantRandomNumbers
from allstep.doctor.verify.record import Failure, read_worker, write_worker
from allstep.doctor.verify.signatures import gradient_causes, option_causes
from allstep.doctor.verify.sketch import Sketcher
from allstep.doctor.verify.watchdog import Watchdog


def train_once(model: nn.Module, x: torch.Tensor, optimizer=None, **forward) -> WorkerRecord:
    recorder = Recorder(0, 1, lambda: None)
    exchange = allstep.attach(model, allstep.Communicator.single_process())
    recorder.watch(exchange)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model(x, **forward).square().mean().backward()
    optimizer.step()
    recorder.close()
    exchange.detach()
    return recorder.record


# -- sketches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 100, 1 << 14, 50_000, (1 << 15) + 1])
def test_a_sketch_is_linear_and_holds_the_norm(num):
    sketch = Sketcher()
    x, y = torch.randn(2, num, dtype=torch.float64)
    assert sketch(x).norm == pytest.approx(float(x.norm()))
    mixed = 0.3 * np.array(sketch(x).products) + 0.7 * np.array(sketch(y).products)
    assert sketch(0.3 * x + 0.7 * y).products == pytest.approx(mixed.tolist(), rel=1e-6)


def test_products_estimate_a_norm():
    sketch = Sketcher()
    ratios = []
    for seed in range(40):
        x = torch.randn(40_000, generator=torch.Generator().manual_seed(seed))
        ratios.append(np.mean(np.square(sketch(x).products)) / float(x.square().sum()))
    assert np.mean(ratios) == pytest.approx(1, abs=0.15)


def test_sparse_and_complex_tensors_have_sketches():
    sketch = Sketcher()
    sparse = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    assert sketch(sparse).norm == 2
    assert sketch(torch.tensor([3 + 4j])).norm == pytest.approx(5)


# -- records -------------------------------------------------------------------------------------


def test_a_record_survives_its_file(tmp_path):
    record = train_once(nn.Linear(3, 2), torch.randn(4, 3))
    record.failure = Failure("error", "text", True, 1.5)
    write_worker(tmp_path / "a.json", record)
    assert read_worker(tmp_path / "a.json") == record
    assert len(record.steps) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_samples_are_told_apart_also_by_a_second_tensor():
    model = nn.Bilinear(3, 3, 2)
    x, y = torch.ones(4, 3), torch.ones(4, 3)
    y[2] = 7
    recorder = Recorder(0, 1, lambda: None)
    recorder.watch(allstep.attach(model, allstep.Communicator.single_process()))
    optimizer = torch.optim.SGD(model.parameters())
    with torch.no_grad():
        model(x, y)  # no training: not recorded
    model.eval()
    model(x, y)
    model.train()
    model(x, input2=y).sum().backward()
    optimizer.step()
    recorder.close()
    (step,) = recorder.record.steps
    assert [step.samples.count(s) for s in step.samples] == [3, 3, 1, 3]


def test_other_optimizers_are_not_steps():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    record = train_once(model, torch.ones(1, 2), torch.optim.SGD(other.parameters()))
    assert record.steps == []


def test_models_of_several_are_told_apart():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    recorder = Recorder(0, 2, lambda: None)
    for model in models:
        recorder.watch(allstep.attach(model, allstep.Communicator.single_process()))
    for model in models:
        model(torch.ones(3, 2)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    recorder.close()
    names = [list(step.gradients) for step in recorder.record.steps]
    assert names == [[f"model {i}: weight", f"model {i}: bias"] for i in range(2)]
    assert len(recorder.record.initial_parameters) == 4


def test_hooks_go_away():
    model = nn.Linear(2, 2)
    record = train_once(model, torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    assert len(record.steps) == 1
    assert not model._forward_pre_hooks


# -- what is rounding ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "autocast", "epsilon"),
    [
        (torch.float32, False, 2.0**-23),
        (torch.float64, False, 2.0**-52),
        (torch.float32, True, 2.0**-7),
    ],
)
def test_the_coarsest_format_says_what_is_rounding(dtype, autocast, epsilon):
    model = nn.Linear(2, 2).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        record = train_once(model, torch.ones(1, 2, dtype=dtype))
    run = RunRecord([record])
    assert limit_of(run, run) == pytest.approx(epsilon**0.5)


class AutocastInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


def test_autocast_inside_of_a_forward_is_seen():
    run = RunRecord([train_once(AutocastInside(), torch.ones(1, 2))])
    assert limit_of(run, run) == pytest.approx(2.0**-3.5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_only_the_biases_of_keys_are_left_out():
    """Their gradient is rounding, beside those of queries and values in one tensor."""
    torch.manual_seed(0)
    model = Attention()
    nn.init.normal_(model.attention.in_proj_bias)
    run = RunRecord([train_once(model, torch.randn(8, 5, 24))])
    left_out = _noise_tensors(run, 0, limit_of(run, run))
    assert left_out == {"attention.in_proj_bias[24:36]", "attention.in_proj_bias[36:48]"}
    assert "attention.in_proj_bias[60:72]" in run.first.steps[0].parameters


def runs_with(x: torch.Tensor, y: torch.Tensor, *, gradient: bool) -> tuple[RunRecord, RunRecord]:
    """Two runs, of one step, whose gradients (or else parameters) are x and y."""
    sketch = Sketcher()

    def run(value: torch.Tensor) -> RunRecord:
        record = WorkerRecord(rank=0)
        named = {name: sketch(part) for name, part in zip("ab", value, strict=True)}
        same = {"a": sketch(torch.ones(1)), "b": sketch(torch.ones(1))}
        step = StepRecord(
            options=[{}],
            samples=[],
            local_gradients={},
            gradients=named if gradient else same,
            parameters=same if gradient else named,
            checksum=0,
        )
        record.steps.append(step)
        return RunRecord([record])

    return run(x), run(y)


def test_only_more_than_rounding_is_a_divergence():
    x = torch.randn(2, 1000)
    for scale, diverges in ((1e-6, False), (1e-5, False), (1e-2, True), (1.0, True)):
        for gradient in (True, False):
            one, other = runs_with(x, x * (1 + scale * torch.randn(2, 1000)), gradient=gradient)
            assert (find_divergence(one, other) is not None) == diverges


def test_divergence_names_the_first_tensor():
    x = torch.randn(2, 1000)
    y = x.clone()
    y[1] *= 1.1
    divergence = find_divergence(*runs_with(x, y, gradient=True))
    assert (divergence.step, divergence.quantity, divergence.name) == (0, "gradient", "b")
    assert divergence.difference == pytest.approx(0.1 / 1.1, rel=0.5)


def test_a_gradient_that_is_only_rounding_is_no_divergence():
    x, y = torch.randn(2, 1000), torch.randn(2, 1000)
    y[0] = x[0]
    x[1] *= 1e-8
    y[1] *= 1e-8
    assert find_divergence(*runs_with(x, y, gradient=True)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gradient", [True, False])
def test_finite_in_only_one_run_is_a_divergence(bad, gradient):
    x = torch.ones(2, 3)
    y = x.clone()
    y[1, 1] = bad
    for runs in (runs_with(x, y, gradient=gradient), runs_with(y, x, gradient=gradient)):
        divergence = find_divergence(*runs)
        assert (divergence.name, divergence.difference) == ("b", math.inf)
        assert nonfinite_step(*runs) is None


def test_a_gradient_that_overflows_in_both_runs_is_no_divergence():
    """As with a gradient scaler, which then leaves the step out."""
    x = torch.tensor([[1.0, 2.0], [math.inf, math.nan]])
    runs = runs_with(x, x, gradient=True)
    assert nonfinite_step(*runs) is None
    assert find_divergence(*runs) is None
    y = x.clone()
    y[0] = 3.0  # the other tensor is compared all the same
    assert find_divergence(*runs_with(x, y, gradient=True)).name == "a"


def steps_with(scales: list[float], *, samples: int = 1, rate: float = 0.1) -> RunRecord:
    """A run whose gradients and parameters are ones times a scale in each step."""
    sketch = Sketcher()
    record = WorkerRecord(rank=0)
    for scale in scales:
        named = {"a": sketch(torch.ones(3) * scale)}
        record.steps.append(
            StepRecord(
                options=[{"lr": rate}],
                samples=[*range(samples)],
                local_gradients=named,
                gradients=named,
                parameters=named,
                checksum=0,
            )
        )
    return RunRecord([record])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_runs_that_stop_being_finite_are_compared_up_to_there(bad):
    def refuse(factors, steps):
        raise AssertionError("nothing is left to find")

    same = diagnose(steps_with([1, 2, bad, bad]), steps_with([1, 2, bad, bad, bad]), refuse)
    assert same.is_same
    assert (same.nonfinite_at, same.divergence) == (2, None)
    # A rate that is no number is the same in both, too.
    rates = [steps_with([1, bad], rate=math.nan) for _ in range(2)]
    assert diagnose(*rates, refuse).is_same


def test_divergence_before_both_runs_stop_being_finite():
    def rerun(factors, steps):
        return steps_with([1] * steps), steps_with([2] * steps)

    bad = math.nan
    found = diagnose(steps_with([1, 2, bad]), steps_with([1, 3, bad]), rerun)
    assert (found.is_same, found.divergence.step, found.nonfinite_at) == (False, 1, 2)
    # One of them stops being finite earlier: that is where they diverge.
    found = diagnose(steps_with([1, bad, bad]), steps_with([1, 2, bad]), rerun)
    assert (found.divergence.step, found.divergence.difference) == (1, math.inf)


def test_ablated_runs_that_are_not_finite_name_no_cause():
    """They agree on nothing but infinity."""

    def rerun(factors, steps):
        return steps_with([math.inf] * steps), steps_with([math.inf] * steps)

    one, other = steps_with([1, 1]), steps_with([2, 2])
    other.first.policies.append("fp16")
    assert diagnose(one, other, rerun).causes == []
    right = diagnose(one, other, lambda factors, steps: (one, one))
    assert [cause.name for cause in right.causes] == ["exchange policy"]


def options(rates: list[float], size: int) -> RunRecord:
    workers = []
    for rank in range(size):
        record = WorkerRecord(rank=rank)
        record.steps = [
            StepRecord(
                options=[{"lr": rate}],
                samples=[],
                local_gradients={},
                gradients={},
                parameters={},
                checksum=0,
            )
            for rate in rates
        ]
        workers.append(record)
    return RunRecord(workers)


@pytest.mark.parametrize(
    ("few", "many", "causes"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2], ["learning rate scaled"]),
        ([1, 1, 1, 1, 1], [1.4142, 1.4142, 1.4142], ["learning rate scaled"]),
        ([16, 8, 4, 2, 1], [16, 4, 1], ["scheduler"]),
        ([16, 8, 4, 2, 1], [32, 8, 2], ["learning rate scaled", "scheduler"]),
        # A warm-up from zero, twice as fast or twice as high: it could be either.
        ([0, 1, 2, 3, 4], [0, 2, 4], ["learning rate scaled", "scheduler"]),
        ([1, 2, 3, 4, 5], [1, 3, 3.5], []),
        ([0, 0, 0], [1, 1, 1], []),
        ([3, 2, 1], [3, 2, 1], []),
    ],
)
def test_rates_are_recognised(few, many, causes):
    found = option_causes(options(few, 1), options(many, 2))
    assert [cause.name for cause in found] == causes


def test_each_optimizer_has_a_rate_of_its_own():
    """Steps of two take turns; the second's rate is scaled."""

    def run(size, factor):
        steps = options([1.0, 8.0 * factor, 0.5, 4.0 * factor], size)
        for worker in steps.workers:
            turns = [replace(step, optimizer=i % 2) for i, step in enumerate(worker.steps)]
            worker.steps[:] = turns
        return steps

    assert option_causes(run(1, 1), run(2, 1)) == []
    (cause,) = option_causes(run(1, 1), run(2, 2))
    assert cause.name == "learning rate scaled"


def inputs(shapes: list[list[int]], gradients: list[float]) -> RunRecord:
    """A step whose workers have inputs of these shapes and gradients that are one number."""
    workers = []
    for rank, (shape, value) in enumerate(zip(shapes, gradients, strict=True)):
        record = WorkerRecord(rank=rank)
        step = steps_with([value]).first.steps[0]
        rows = [hash((rank, tuple(shape), i)) for i in range(shape[0])]
        record.steps = [replace(step, samples=rows, input_shapes=[shape])]
        workers.append(record)
    return RunRecord(workers)


@pytest.mark.parametrize(
    ("shapes", "gradients", "causes"),
    [
        ([[7, 8, 3], [7, 8, 3]], [0.5, 0.5], ["loss summed"]),
        ([[7, 12, 3], [7, 4, 3]], [4 / 3, 0.0], ["unequal shards"]),
        ([[7, 16, 3], [7, 16, 3]], [1.0, 1.0], ["global batch"]),
        ([[7, 8, 3], [7, 24, 3]], [1.0, 1.0], ["global batch"]),
        ([[7, 8, 3], [7, 8, 3]], [3.0, 0.0], []),
    ],
)
def test_samples_may_lie_along_the_second_dimension(shapes, gradients, causes):
    """As `nn.LSTM` takes them: seven steps of time, sixteen samples."""
    found = gradient_causes(inputs([[7, 16, 3]], [1.0]), inputs(shapes, gradients), 0)
    assert [cause.name for cause in found] == causes


# -- constants -----------------------------------------------------------------------------------


class Noisy(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index + torch.rand(3)


def test_constants_for_random_numbers():
    x = torch.ones(2, 3)
    with ConstantRandomNumbers():
        assert torch.equal(dropout(x, 0.5), 2 * x)
        assert torch.equal(torch.native_dropout(x, 0.5, True)[0], x)
        for drawn in (torch.rand(3), torch.randn_like(x), torch.empty(3).uniform_()):
            assert drawn.unique().tolist() == [0.5]
        assert torch.randint(3, 9, (1,)).item() == 0
        assert torch.randint(0, 1 << 30, (9,)).unique().numel() > 1
        assert torch.randperm(100).unique().numel() == 100
        assert random.random() == random.uniform(2, 3) == np.random.rand() == 0.5
        assert np.random.normal(size=(2, 2)).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert random.random() != random.random()
    assert np.random.rand() != np.random.rand()
    assert torch.rand(2).unique().numel() == 2


@pytest.mark.process
def test_data_of_a_loaders_processes_lose_their_random_changes():
    made_before = torch.rand(2)
    ablation = Ablation(["random loader"], WorkerRecord(rank=0))
    with contextlib.closing(ablation):
        exchange = allstep.attach(nn.Linear(1, 1), allstep.Communicator.single_process())
        ablation.apply(exchange)
        assert torch.rand(2).unique().numel() == made_before.numel()  # data made after attach
        loader = DataLoader(Noisy(), batch_size=4, num_workers=1, multiprocessing_context="fork")
        (batch,) = loader
        assert batch.tolist() == [[i + 0.5] * 3 for i in range(4)]
    (batch,) = DataLoader(Noisy(), batch_size=4)
    assert batch.unique().numel() == 12


# -- the watchdog --------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch):
    """What the watchdog would have ended this process with."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    return codes


def wait_for(codes: list[int]) -> int:
    deadline_s = time.monotonic() + 30
    while not codes and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return codes[0]


def test_no_progress_ends_the_worker_and_says_where(ends):
    places = []
    dog = Watchdog(lambda: 0, 0.3, places.append)
    dog.start()
    assert wait_for(ends) == 1
    assert "wait_for" in {frame.name for frame in places[0]}


def test_progress_and_a_stop_leave_it_alone(ends):
    start_s = time.monotonic()
    dog = Watchdog(lambda: int(100 * (time.monotonic() - start_s)), 0.5, lambda place: None)
    dog.start()
    time.sleep(0.8)
    dog.stop()
    assert ends == []


def test_what_comes_after_the_record_is_cut_short(ends, monkeypatch):
    monkeypatch.setattr(watchdog, "_END_S", 0.1)
    dog = Watchdog(lambda: 0, 1000.0, lambda place: None)
    dog.expect_end()
    dog.start()
    assert wait_for(ends) == 0


def test_a_worker_ends_with_its_launcher(ends, monkeypatch):
    dog = Watchdog(lambda: 0, 1000.0, lambda place: None)
    monkeypatch.setattr(watchdog.os, "getppid", lambda: -1)
    dog.start()
    assert wait_for(ends) == 1
