"""What the recorder writes down of an attached model's steps."""

import pytest
import torch
from torch import nn

import allstep
from allstep import Communicator
from allstep.doctor import Failure, RunRecord, limit_of, read_worker
from allstep.doctor.verify.record import write_worker
from allstep.doctor.verify.recorder import Recorder
from allstep.nn import MixtureOfExperts
from tests.doctor.trainings import train_once


def test_worker_record_survives_its_file(tmp_path):
    record = train_once(nn.Linear(3, 2), torch.randn(4, 3))
    record.failure = Failure("error", "text", True, 1.5)
    write_worker(tmp_path / "a.json", record)
    assert read_worker(tmp_path / "a.json") == record
    assert len(record.steps) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_recorder_tells_samples_apart_by_a_second_tensor():
    model = nn.Bilinear(3, 3, 2)
    x, y = torch.ones(4, 3), torch.ones(4, 3)
    y[2] = 7
    recorder = Recorder(0, 1, lambda: None)
    recorder.attach(allstep.attach, model, Communicator.single_process())
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


def noncontiguous(kind: str) -> torch.Tensor:
    x = torch.arange(12.0).view(3, 4)
    return {
        "transposed": x.t(),
        "strided": x.repeat(1, 2)[:, ::2].t(),
        "expanded": x[:, :1].t().expand(4, 3),
        "flipped": x.flip(0).t(),
    }[kind]


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded", "flipped"])
def test_recorder_takes_inputs_that_are_not_contiguous(kind):
    x = noncontiguous(kind)
    (step,) = train_once(nn.Linear(3, 2), x).steps
    (same,) = train_once(nn.Linear(3, 2), x.contiguous()).steps
    assert step.samples == same.samples
    assert len(set(step.samples)) == len(x.unique(dim=0))


def test_recorder_takes_conjugated_inputs():
    x = torch.randn(3, 2, dtype=torch.complex64)
    model = nn.Linear(2, 1, dtype=torch.complex64)
    (step,) = train_once(nn.Sequential(model, Magnitude()), x.conj()).steps
    (same,) = train_once(nn.Sequential(model, Magnitude()), x.conj().resolve_conj()).steps
    assert step.samples == same.samples


class Experts(nn.Module):
    """A layer whose experts are on one worker each, if there are several."""

    def __init__(self):
        super().__init__()
        self.moe = MixtureOfExperts(
            lambda: nn.Linear(3, 3), Communicator.single_process(), 3, num_experts=2, seed=0
        )

    def forward(self, x):
        y, balance_loss = self.moe(x)
        return y.sum() + balance_loss


def test_recorder_has_no_own_gradients_of_experts():
    """They are of all workers' samples; on one worker, too, which is compared with several."""
    record = train_once(Experts(), torch.randn(4, 3))
    (step,) = record.steps
    names = {f"moe.experts.{i}.{of}" for i in range(2) for of in ("weight", "bias")}
    assert set(step.parameters) == {"moe.router.weight", *names}
    assert list(step.local_gradients) == ["moe.router.weight"]


class Constant(nn.Module):
    """Takes anything."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.weight


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch's, about formats in beta
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_recorder_takes_nested_inputs(layout, tmp_path):
    rows = [torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3)]
    record = train_once(Constant(), torch.nested.nested_tensor(rows, layout=layout))
    (step,) = record.steps
    first, other, again = step.samples
    assert first == again != other
    assert step.input_shapes == [[3]]
    write_worker(tmp_path / "a.json", record)
    assert read_worker(tmp_path / "a.json") == record


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("format", ["sparse", "sparse_csr", "sparse_csc", "sparse_bsr"])
def test_recorder_takes_sparse_inputs(format):
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    sparse = x.to_sparse_bsr((1, 1)) if format == "sparse_bsr" else getattr(x, f"to_{format}")()
    (step,) = train_once(Constant(), sparse).steps
    assert step.samples == train_once(Constant(), x).steps[0].samples


class Magnitude(nn.Module):
    def forward(self, x):
        return x.abs()


def test_recorder_leaves_out_steps_of_other_optimizers():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    record = train_once(model, torch.ones(1, 2), torch.optim.SGD(other.parameters()))
    assert record.steps == []


def test_recorder_tells_several_models_apart():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    recorder = Recorder(0, 2, lambda: None)
    for model in models:
        recorder.attach(allstep.attach, model, Communicator.single_process())
    for model in models:
        model(torch.ones(3, 2)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    recorder.close()
    names = [list(step.gradients) for step in recorder.record.steps]
    assert names == [[f"model {i}: weight", f"model {i}: bias"] for i in range(2)]
    assert len(recorder.record.initial_parameters) == 4


def test_recorder_leaves_no_hooks():
    model = nn.Linear(2, 2)
    record = train_once(model, torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    assert len(record.steps) == 1
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("dtype", "autocast", "epsilon"),
    [
        (torch.float32, False, 2.0**-23),
        (torch.float64, False, 2.0**-52),
        (torch.float32, True, 2.0**-7),
    ],
)
def test_limit_of_the_coarsest_format(dtype, autocast, epsilon):
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


def test_limit_of_autocast_inside_of_a_forward():
    run = RunRecord([train_once(AutocastInside(), torch.ones(1, 2))])
    assert limit_of(run, run) == pytest.approx(2.0**-3.5)
