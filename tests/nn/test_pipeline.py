"""A model in stages on several workers, through torch's schedules, against one process."""

import copy
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.nn import Pipeline
from allstep.nn.chain import seeded
from allstep.nn.replicated import seed_at
from allstep.train import Batch
from tests.helpers.divided import misfit, save_whole
from tests.helpers.messages import check_messages
from tests.helpers.processes import RemoteError, run_processes

Maker = Callable[[], nn.Module]
State = dict[str, Tensor]


class Trained(NamedTuple):
    """Parameters that this worker has, mean losses, and exchanges with a second message."""

    state: State
    losses: list[float]
    num_completed: int


GLOBAL_BATCH, MICRO_BATCH = 20, 4


class Block(nn.Module):
    """Takes features and how often each counts, and hands both on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6, dtype=torch.float64), nn.Dropout(0.3)

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.dropout(self.linear(x).tanh() * counts), counts


class Head(Block):
    """Returns the features alone."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return super().forward(x, counts)[0]


# Older ones of torch's pipelines send no whole numbers.
COUNT_DTYPE = torch.int64 if torch.__version__ >= "2.13" else torch.float64
MAKERS: Sequence[Maker] = (Block, Block, Block, Head)


def makers(is_frozen: bool = False) -> Sequence[Maker]:
    return (lambda: Block().requires_grad_(not is_frozen), *MAKERS[1:])


def inputs_of(data: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return data[0], data[1]


def error_of(y: Tensor, data: Sequence[Tensor]) -> Tensor:
    return (y - data[2]).square()


def mean_error(y: Tensor, data: Sequence[Tensor]) -> Tensor:
    return error_of(y, data).mean()


def counted_error(y: Tensor, data: Sequence[Tensor]) -> Tensor:
    return (error_of(y, data) * data[1]).sum()


def counts_of(data: Sequence[Tensor]) -> Tensor:
    return data[1].sum()


def samples(num: int) -> TensorDataset:
    torch.manual_seed(1)
    x, y = (torch.randn(num, 6, dtype=torch.float64) for _ in range(2))
    return TensorDataset(x, torch.randint(1, 4, (num, 6)).to(COUNT_DTYPE), y)


def train(
    model: nn.Module,
    comm: Communicator,
    run: Callable[[Batch], None],
    num: int = 46,
    policy: allstep.ExchangePolicy | None = None,
    clip_norm: float | None = None,
    global_batch: int = GLOBAL_BATCH,
    micro_batch: int = MICRO_BATCH,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Trained:
    """Twenty steps at least; an epoch's last global batch is short."""
    optimizer = kind(model.parameters(), lr=0.01)
    exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
    losses = []
    loader = allstep.data.loader(
        samples(num), comm, global_batch=global_batch, micro_batch=micro_batch
    )
    with loader:
        while loader.step < 20:
            for batch in allstep.steps(loader, exchange):
                run(batch)
                if clip_norm is not None:
                    exchange.clip_grad_norm_(clip_norm)
                losses.append(batch.global_loss())
                if exchange.has_gradients:
                    optimizer.step()
                optimizer.zero_grad()
    exchange.detach()
    state = {name: p.detach() for name, p in model.named_parameters()}
    return Trained(state, losses, exchange.stats().num_completed)


# -- the oracle: a plain loop of one process -----------------------------------------------------


def plainly(
    *,
    stages: Sequence[Maker] = MAKERS,
    weighed: bool = False,
    spoilt: str = "",
    num: int = 46,
    policy: allstep.ExchangePolicy | None = None,
    clip_norm: float | None = None,
    **options: Any,
) -> Trained:
    """`batch.backward` for each micro-batch, and draws by micro-batch and stage."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    first = int(torch.randint(2**62, ()).item())
    model = nn.ModuleDict({"stages": nn.ModuleList()})
    for number, make in enumerate(stages):
        with seeded(seed_at(first, number), device):
            model["stages"].append(make())

    def run(batch: Batch) -> None:
        for data in batch:
            seed, values = int(torch.randint(2**62, ()).item()), inputs_of(data)
            for number, stage in enumerate(model["stages"]):
                with seeded(seed_at(seed, 0 if spoilt == "seeds" else number), device):
                    values = stage(*values)
            if spoilt == "weights":  # as the mean over micro-batches, which torch's schedules take
                size = options.get("micro_batch", MICRO_BATCH)
                batch.backward(mean_error(values, data) * size / len(data[0]))
            elif weighed:
                batch.backward(counted_error(values, data), weight=counts_of(data))
            else:
                batch.backward(mean_error(values, data))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)

    return train(model, Communicator.single_process(), run, num, policy, **options)


def pipeline(comm: Communicator, num_data: int, **options: Any) -> tuple[Pipeline, Communicator]:
    mesh = comm.mesh(data=num_data, pipeline=comm.size // num_data)
    torch.manual_seed(0)
    given: dict[str, Any] = {"stages": MAKERS, "loss": mean_error, "inputs": inputs_of, **options}
    return Pipeline(**{"mesh": mesh, **given}), mesh["data"]


def pipelined(
    comm: Communicator,
    num_data: int,
    schedule: str = "1f1b",
    *,
    is_frozen: bool = False,
    stages: Sequence[Maker] | None = None,
    weighed: bool = False,
    num: int = 46,
    policy: allstep.ExchangePolicy | None = None,
    **options: Any,
) -> Trained:
    """The same through a pipeline."""
    of_loss = {"loss": counted_error, "weight": counts_of} if weighed else {}
    stages = stages or makers(is_frozen)
    model, data = pipeline(comm, num_data, stages=stages, schedule=schedule, **of_loss)
    return train(model, data, lambda batch: batch.run(model), num, policy, **options)


def assert_same(found: Trained, expected: Trained) -> None:
    for name, value in found.state.items():
        torch.testing.assert_close(value, expected.state[name], rtol=0, atol=1e-10)
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)


def assert_same_bits(found: Trained, expected: Trained) -> None:
    assert all(torch.equal(value, expected.state[name]) for name, value in found.state.items())
    assert found.losses == expected.losses and found.num_completed == expected.num_completed


def assert_other(spoilt: Trained, expected: Trained) -> None:
    assert any((spoilt.state[n] - p).abs().max() > 1e-4 for n, p in expected.state.items())


# -- the same model on any layout ----------------------------------------------------------------


def variants(comm: Communicator, num_data: int) -> dict[str, Trained]:
    """What is trained on each layout, in one start of its processes."""
    return {
        "means": pipelined(comm, num_data, "1f1b"),
        "sums": pipelined(comm, num_data, "interleaved", weighed=True),
        # Its last global batches have one micro-batch each, and a stage has nothing to train.
        "frozen": pipelined(comm, num_data, "gpipe", is_frozen=True, num=42),
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, Trained]:
    return {
        "means": plainly(),
        "sums": plainly(weighed=True),
        "frozen": plainly(stages=makers(is_frozen=True), num=42),
    }


def test_a_lone_worker_has_the_same_model(expected: dict[str, Trained]) -> None:
    for name, found in variants(Communicator.single_process(), 1).items():
        assert found.state.keys() == expected[name].state.keys()
        assert_same(found, expected[name])


@pytest.mark.process
@pytest.mark.parametrize(
    ("size", "num_data"), [(2, 1), (2, 2), (4, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_stages_on_several_workers_are_the_same_model(
    size: int, num_data: int, expected: dict[str, Trained]
) -> None:
    for of_worker in run_processes(size, variants, num_data, timeout_s=240):
        for name, found in of_worker.items():
            assert len(found.state) == 8 * num_data // size  # two parameters a stage
            assert_same(found, expected[name])


def thawed(comm: Communicator) -> Trained:
    """The first two stages, all that rank 0 of two has, are frozen in five of ten steps."""
    model, data = pipeline(comm, 1)

    def run(batch: Batch) -> None:
        batch.run(model)
        for stage in (model.stages[number] for number in "01" if number in model.stages):
            stage.requires_grad_(batch.step % 10 >= 5)

    return train(model, data, run)


@pytest.mark.process
def test_stages_that_are_frozen_and_thawed() -> None:
    """Gradients flow to them when they are trained, and else don't."""
    expected = thawed(Communicator.single_process())
    for found in run_processes(2, thawed, timeout_s=240):
        assert_same(found, expected)


def test_controls(expected: dict[str, Trained]) -> None:
    """Stages that draw the same, and micro-batches that count the same, are other models."""
    for spoilt in ("seeds", "weights"):
        assert_other(plainly(spoilt=spoilt), expected["means"])


EIGHT: dict[str, Any] = {"stages": (*7 * [Block], Head), "global_batch": 18, "micro_batch": 2}
VARIANTS_OF_EIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped sums": ("1f1b", {"weighed": True, "kind": allstep.optim.LAMB, "clip_norm": 0.05}),
    # Its last global batches have one micro-batch, so that copies have none.
    "short, exact": (
        "interleaved",
        {"num": 38, "policy": allstep.Synchronous(compression="exact")},
    ),
}


def eight_workers(comm: Communicator, num_data: int) -> dict[str, Trained]:
    return {
        name: pipelined(comm, num_data, schedule, **EIGHT, **options)
        for name, (schedule, options) in VARIANTS_OF_EIGHT.items()
    }


@pytest.mark.process
@pytest.mark.slow
def test_eight_workers() -> None:
    """Nine micro-batches, on 4 x 2, 2 x 4 and 1 x 8 (data x pipeline)."""
    expected = {name: plainly(**EIGHT, **given) for name, (_, given) in VARIANTS_OF_EIGHT.items()}
    _, clipped = VARIANTS_OF_EIGHT["clipped sums"]
    for spoilt in ("seeds", "weights"):
        assert_other(plainly(spoilt=spoilt, **EIGHT, **clipped), expected["clipped sums"])
    assert_other(plainly(**EIGHT, **clipped | {"clip_norm": None}), expected["clipped sums"])
    exact: list[State] = []
    for num_data in (4, 2, 1):
        workers = run_processes(8, eight_workers, num_data, timeout_s=400)
        for of_worker in workers:
            for name, found in of_worker.items():
                assert len(found.state) == 2 * num_data
                assert_same(found, expected[name])
        exact.append({n: p for found in workers for n, p in found["short, exact"].state.items()})
    for state in exact[1:]:
        assert all(torch.equal(p, exact[0][name]) for name, p in state.items())


def with_policies(comm: Communicator, num_data: int) -> list[Trained]:
    policies = [
        allstep.Synchronous(compression="exact"),
        allstep.Synchronous(compression="fp16"),
        allstep.LocalSGD(sync_every=2),
        allstep.Stale(steps=1),
    ]
    return [pipelined(comm, num_data, policy=policy) for policy in policies]


@pytest.mark.process
@pytest.mark.slow
def test_policies_along_the_axis_of_data() -> None:
    """Of the bits of workers that each have all stages, and with exact sums of a lone one."""
    whole = run_processes(2, with_policies, 2, timeout_s=240)[0]
    lone = pipelined(
        Communicator.single_process(), 1, policy=allstep.Synchronous(compression="exact")
    )
    for of_worker in run_processes(4, with_policies, 2, timeout_s=240):
        for found, same in zip(of_worker, whole, strict=True):
            assert_same_bits(found, same)
        assert_same_bits(of_worker[0], lone)


# -- losses without gradients --------------------------------------------------------------------


def evaluations(comm: Communicator) -> tuple[list[float], list[float], bool]:
    """In eval mode between two global batches, and of a copy."""
    model, data = pipeline(comm, 1)
    given = samples(46)
    cut = [given[:4], given[4:8], given[8:10]]
    losses = []

    def run(batch: Batch) -> None:
        batch.run(model)
        model.eval()
        losses.append(model.evaluate(cut).tolist())
        model.train()

    train(model, data, run)
    copied = copy.deepcopy(model).eval()
    return (
        losses[-2],
        losses[-1],
        copied.evaluate(cut).tolist() == model.eval().evaluate(cut).tolist(),
    )


@pytest.mark.process
def test_evaluate() -> None:
    expected = evaluations(Communicator.single_process())
    assert expected[0] != expected[1] and expected[2]
    for before, after, is_same_of_copy in run_processes(2, evaluations):
        assert before == pytest.approx(expected[0], rel=0, abs=1e-12)
        assert after == pytest.approx(expected[1], rel=0, abs=1e-12)
        assert is_same_of_copy


class Tracking(nn.Module):
    """Subtracts a moving average of what it sees, and normalizes a matrix by power iteration."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(6, 6, dtype=torch.float64)
        self.linear = nn.utils.parametrizations.spectral_norm(linear)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.2)
        return self.linear(x - self.mean.clone())


def with_buffers(comm: Communicator) -> State:
    """Parameters and buffers; an epoch's last micro-batch is another shape."""
    options = {"stages": [Tracking] * 4, "inputs": lambda data: data[0]}
    model, data = pipeline(comm, 1, **options)
    train(model, data, lambda batch: batch.run(model))
    return dict(model.state_dict())


@pytest.mark.process
def test_buffers_that_stages_change() -> None:
    """In finding out shapes a stage is called once more, which changes none."""
    expected = with_buffers(Communicator.single_process())
    for found in run_processes(2, with_buffers):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


class Changing(nn.Module):
    """Changes what it is given in place, and returns a transposed slice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12, dtype=torch.float64)

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x.mul_(0.9)).t()[:6].t(), counts


class LastChanging(Changing):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return super().forward(x, counts)[0]


def changing(comm: Communicator, schedule: str) -> Trained:
    return pipelined(comm, 1, schedule, stages=[Changing, Changing, Changing, LastChanging])


@pytest.mark.process
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_that_change_their_input_in_place_and_return_views(schedule: str) -> None:
    expected = changing(Communicator.single_process(), schedule)
    for found in run_processes(2, changing, schedule):
        assert_same(found, expected)


def copied(comm: Communicator) -> tuple[Tensor, Tensor]:
    """Losses of a pipeline that has run, and of its copy."""
    model, data = pipeline(comm, 1)
    train(model, data, lambda batch: batch.run(model))
    made, batch = copy.deepcopy(model), samples(8)[:]
    return model.eval().evaluate([batch]), made.eval().evaluate([batch])


@pytest.mark.process
def test_a_pipeline_that_has_run_is_copied() -> None:
    for losses, of_copy in [copied(Communicator.single_process()), *run_processes(2, copied)]:
        assert torch.equal(losses, of_copy)


# -- what is refused -----------------------------------------------------------------------------


def refusal(**options: Any) -> str:
    with pytest.raises(UsageError) as error:
        pipeline(Communicator.single_process(), 1, **options)
    return str(error.value)


def test_stages_that_are_no_pipeline() -> None:
    tied = [nn.Linear(2, 2), nn.Linear(2, 2)]
    tied[1].weight = tied[0].weight
    assert refusal(schedule="zb") == "`schedule` (='zb') is none of 'gpipe', '1f1b', 'interleaved'."
    assert refusal(stages=[]).startswith("`stages` are 0, which must be a multiple of the worker")
    assert refusal(axis="model").startswith("`name` (='model') is no axis of the mesh")
    assert refusal(stages=tied).startswith(
        "`stages`: `weight` of stage 1 is also a parameter of stage 0"
    )
    assert refusal(stages=[lambda: tied[0], nn.Tanh, lambda: tied[1]]).startswith(
        "`stages`: `weight` of stage 2 is also a parameter of stage 0"
    )
    assert refusal(stages=[lambda: None]).startswith(
        "`stages`: what makes stage 0 returned None; return a module"
    )
    assert refusal(mesh=Communicator.single_process()).startswith("`mesh` (a Communicator)")
    assert refusal(stages=[lambda: nn.Sequential(nn.BatchNorm1d(2))]).startswith(
        "`stages.0.0` is a BatchNorm1d with running statistics"
    )


def test_a_run_is_of_the_attached_pipeline() -> None:
    comm = Communicator.single_process()
    model, _ = pipeline(comm, 1)
    with pytest.raises(UsageError, match="`model` is not what `steps` has the one exchange of"):
        train(Head(), comm, lambda batch: batch.run(model))


def test_a_pipeline_is_called_where_all_stages_are() -> None:
    """It draws as in a run, to the last bit; other draws are the control."""
    comm = Communicator.single_process()

    def run_by_calls(batch: Batch) -> None:
        for data in batch:
            batch.backward(mean_error(model(*inputs_of(data)), data))

    def run_with_other_draws(batch: Batch) -> None:
        for data in batch:
            torch.rand(1)
            batch.backward(mean_error(model(*inputs_of(data)), data))

    expected = pipelined(comm, 1)
    model, data = pipeline(comm, 1)
    assert_same_bits(train(model, data, run_by_calls), expected)
    found = model.eval().measure(lambda called, x: called(*inputs_of(x)), samples(4)[:])
    assert torch.equal(found, model(*inputs_of(samples(4)[:])))
    model, data = pipeline(comm, 1)
    other = train(model, data, run_with_other_draws)
    assert any(not torch.equal(other.state[name], x) for name, x in expected.state.items())


def look_at_outputs(comm: Communicator) -> tuple[Tensor, str]:
    model, _ = pipeline(comm, 1)
    batch = samples(4)[:]
    found = model.eval().measure(lambda called, x: called(*inputs_of(x)), batch)
    with pytest.raises(UsageError) as refusal:
        model(*inputs_of(batch))
    return found, str(refusal.value)


@pytest.mark.process
def test_a_function_of_the_output_is_the_same_on_all_workers() -> None:
    comm = Communicator.single_process()
    model, _ = pipeline(comm, 1)
    expected = model.eval()(*inputs_of(samples(4)[:]))
    for found, refusal in run_processes(2, look_at_outputs):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert refusal.startswith("A Pipeline is not called: `batch.run(model)` runs")


def test_a_pipeline_is_not_elastic() -> None:
    comm = Communicator.single_process()
    model, _ = pipeline(comm, 1)
    exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
    loader = allstep.data.loader(samples(8), comm, global_batch=4, micro_batch=2)
    with pytest.raises(UsageError, match=r"`model\.stages` is divided over workers"):
        allstep.Elastic(loader, exchange, state={})


class Shrinking(nn.Module):
    """Returns fewer and fewer rows."""

    num = 4

    def forward(self, x: Tensor) -> Tensor:
        self.num -= 1
        return x[: self.num]


class InDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


def test_a_stage_that_returns_no_tensors() -> None:
    model, _ = pipeline(Communicator.single_process(), 1, stages=[InDict], inputs=lambda x: x)
    words = "Stage 0 returned a dict; a stage returns a tensor or a tuple of tensors"
    with pytest.raises(UsageError, match=words):
        model.evaluate([torch.ones(2, 6)])


def keep(
    model: Pipeline,
    data: Communicator,
    run_dir: Path,
    stops_after: int | None,
    policy: allstep.ExchangePolicy | None = None,
    num: int = 46,
) -> None:
    """Six steps with checkpoints, or fewer."""
    exchange = allstep.attach(model, data, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sizes = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
    with (
        allstep.data.loader(samples(num), data, **sizes) as loader,
        allstep.AutoCheckpoint(
            run_dir, loader, exchange, state={"optimizer": optimizer}, every_steps=1
        ) as checkpoint,
    ):
        for _ in checkpoint.epochs(2):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                batch.run(model)
                optimizer.step()
                optimizer.zero_grad()
                if batch.step == stops_after:
                    signal.raise_signal(signal.SIGTERM)


def kept(
    comm: Communicator, num_data: int, schedule: str, run_dir: Path, stops_after: int | None
) -> State:
    """Its parameters."""
    model, data = pipeline(comm, num_data, schedule=schedule)
    keep(model, data, run_dir, stops_after)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.process
def test_a_pipeline_goes_on_on_another_mesh(tmp_path: Path) -> None:
    """Also where stages lie in turns, so that workers have others of the same model."""
    alone = Communicator.single_process()
    expected = kept(alone, 1, "1f1b", tmp_path / "straight", None)
    run_processes(4, kept, 2, "interleaved", tmp_path / "run", 1)
    for size, num_data, schedule in ((2, 1, "1f1b"), (4, 1, "gpipe"), (1, 1, "1f1b")):
        folder = tmp_path / f"on {size}"
        shutil.copytree(tmp_path / "run", folder)
        if size == 1:
            found = [kept(alone, 1, schedule, folder, None)]
        else:
            found = run_processes(size, kept, num_data, schedule, folder, None)
        for state in found:
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


def without_fixed_shapes(comm: Communicator) -> None:
    options = {"stages": [Shrinking, nn.Identity], "inputs": lambda x: x}
    pipeline(comm, 1, **options)[0].evaluate([torch.ones(4, 6)] * 3)


@pytest.mark.process
def test_stages_without_fixed_shapes() -> None:
    words = r"UsageError: Stage 0 returned \[2, 6\] float32 for one .* and \[3, 6\] float32"
    with pytest.raises(RemoteError, match=words):
        run_processes(2, without_fixed_shapes)


def stages_of(width: int, num: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2)) for _ in range(num)]


def refused(comm: Communicator, run_dir: Path) -> dict[str, str]:
    """What each wrong call says, on two pipelines of two workers."""
    mesh = comm.mesh(data=2, pipeline=2)
    said = {}

    def note(name: str, call: Callable[[], object]) -> None:
        with pytest.raises(UsageError) as error:
            call()
        said[name] = str(error.value)

    def of(*stages: nn.Module) -> Pipeline:
        return Pipeline(stages, mesh, loss=lambda y, data: y.mean())

    note("three", lambda: of(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    model = of(nn.Linear(2, 2), nn.Linear(2, 2))
    note("all", lambda: allstep.attach(model, comm))
    note("axis", lambda: allstep.attach(model, mesh["pipeline"]))
    exchange = allstep.attach(model, mesh["data"])
    given = TensorDataset(torch.ones(4, 2))
    sizes = {"global_batch": 4, "micro_batch": 2}
    with allstep.data.loader(given, mesh["data"], shares="measured", **sizes) as loader:
        note("measured", lambda: allstep.steps(loader, exchange))
    with allstep.data.loader(given, mesh["data"], **sizes) as loader:
        note("few", lambda: allstep.steps(loader, exchange))
        note("elastic", lambda: allstep.Elastic(loader, exchange, state={}))
    note("shapes", lambda: model.evaluate([(torch.ones(n, 2),) for n in (3, 2, 1)]))
    said["other widths"] = misfit(of(*stages_of(4, 4)), mesh["data"], run_dir)
    said["fewer stages"] = misfit(of(*stages_of(3, 2)), mesh["data"], run_dir)
    return said


@pytest.mark.process
def test_what_a_pipeline_refuses(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    save_whole(pipeline(comm, 1, stages=stages_of(3, 4))[0], tmp_path)
    words = {
        "three": "`stages` are 3, which must be a multiple of the 2 workers along the axis.",
        "all": "attach it to mesh['data'], whose workers have the same stages",
        "axis": "attach it to mesh['data'], whose workers have the same stages",
        "few": "cuts a global batch in 2 micro-batches, of which a pipeline gets 1, and `schedule`"
        " (='1f1b') takes at least 2",
        "measured": "`shares` (='measured') would cut a global batch otherwise on each of the",
        "elastic": "`model.stages` is divided over workers, and its parts would go with one",
        "shapes": "inputs of 3 different shapes: [3, 2] float32, then [2, 2] float32, then [1, 2]",
        "other widths": "stages.0.0.weight [3, 2] instead of [4, 2], stages.0.0.bias [3] instead",
        "fewer stages": "unexpected: stages.2.0.weight, ",
    }
    for said in run_processes(4, refused, tmp_path):
        check_messages(said, words)
