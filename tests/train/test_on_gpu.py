"""Whole trainings of ranks that share a real GPU; see `tests.helpers.on_gpu`.

A GPU's dropout draws other numbers than a CPU's, so that runs are compared with one rank on the
same device.
"""

import functools
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import allstep
from allstep import Communicator, Synchronous, TrainOptions
from allstep.train import read_checkpoint
from allstep.train.devices import map_tensors
from tests.helpers import restarted_loop, same_model
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.gpus import on_cpu
from tests.helpers.on_gpu import gpu, over_links, run_on_gpu
from tests.helpers.processes import RemoteError
from tests.helpers.restarted_loop import STEPS_PER_EPOCH, Moment
from tests.train.test_exact import read_log, train_digits

pytestmark = [pytest.mark.gpu, pytest.mark.process]

TOLERANCE = 1e-10
EXACT = Synchronous(compression="exact")
Found = dict[str, Any]

SHARES = {1: "equal", 2: "3,1", 3: "5,2,1"}
WAYS = ["equal", "uneven", "none for some", "loader processes"]


def on_host(found: Any) -> Any:
    """What a rank may return: no tensor of the GPU, which ends with the rank's process."""
    return map_tensors(found, lambda tensor: tensor.cpu())


def single_process() -> Communicator:
    return Communicator.single_process(gpu())


# -- the same model ------------------------------------------------------------------------------


def options_of(way: str, size: int) -> TrainOptions:
    if way == "uneven":
        return replace(same_model.OPTIONS, shares=SHARES[size])
    if way == "none for some":  # 2 micro-batches for 3 ranks
        return replace(same_model.OPTIONS, global_batch=2 * same_model.MICRO_BATCH)
    return replace(same_model.OPTIONS, loader_workers=2 * (way == "loader processes"))


def train_in_all_ways(comm: Communicator, folder: str) -> dict[str, Found]:
    """Batch norm, dropout, augmentation, a short last batch, an evaluation of each epoch."""
    found = {}
    for way in WAYS:
        task = same_model.make_task("adamw" if way == "equal" else "sgd")
        report = allstep.fit(task, options_of(way, comm.size), comm, Path(folder) / way)
        assert next(task.model.parameters()).device == comm.device
        found[way] = on_host({"model": task.model.state_dict(), "totals": report.totals})
    steps = same_model.train_with_steps(comm, "adamw", loader_workers=1)
    return found | {"steps": {"model": on_host(steps), "totals": {}}}


def losses_of(run_dir: Path) -> Tensor:
    return torch.tensor([line["loss"] for line in read_log(run_dir) if "loss" in line])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Found]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_on_gpu(1, train_in_all_ways, str(folder))[0]


@over_links
@pytest.mark.parametrize("size", [2, 3])
def test_fit_and_steps_give_the_same_model_on_any_number_of_ranks(
    link: str, size: int, alone: tuple[Path, dict[str, Found]], tmp_path: Path
) -> None:
    folder, expected = alone
    for found in run_on_gpu(size, train_in_all_ways, str(tmp_path), link=link):
        for way, each in expected.items():
            assert state_difference(found[way]["model"], each["model"]) < TOLERANCE, way
            assert found[way]["totals"] == each["totals"], way
    for way in WAYS:
        losses, expected_losses = losses_of(tmp_path / way), losses_of(folder / way)
        assert len(losses) > 2 and losses.shape == expected_losses.shape
        torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)


def train_exactly(comm: Communicator, folder: str, compression: str = "exact") -> Found:
    state, log, metrics = train_digits(comm, folder, compression)
    return {"model": on_host(state), "log": log, "metrics": metrics}


@over_links
def test_exact_sums_have_the_same_bits_on_any_number_of_ranks(link: str, tmp_path: Path) -> None:
    """As `allstep train` trains: float32, with the log, the noise scale and evaluations."""
    runs = {
        size: run_on_gpu(size, train_exactly, str(tmp_path / str(size)), link=link)
        for size in (1, 2, 3)
    }
    (expected,) = runs[1]
    for size in (2, 3):
        for found in runs[size]:
            assert not differing_names(found["model"], expected["model"]), size
            assert found["metrics"] == expected["metrics"], size
        assert runs[size][0]["log"] == expected["log"], size


def test_plain_sums_have_other_bits_on_three_ranks(tmp_path: Path) -> None:
    """The control of exact sums."""
    alone, three = (
        run_on_gpu(size, train_exactly, str(tmp_path / str(size)), "fp32")[0] for size in (1, 3)
    )
    assert differing_names(three["model"], alone["model"])


class Reader(nn.Module):
    """Layers with states between them, and dropout, whose own state cuDNN keeps."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.LSTM(6, 8, num_layers=2, dropout=dropout, batch_first=True)
        self.scores = nn.Linear(8, 11)

    def forward(self, characters: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.layers(self.embedding(characters))[0])
        return scores


def train_reader(comm: Communicator, dropout: float = 0.5) -> Found:
    """Sums over characters with weights, an optimizer whose count of steps is on the device."""
    torch.default_generator.manual_seed(5)
    model = Reader(dropout).double().to(comm.device)
    samples = TensorDataset(torch.randint(0, 11, (44, 9)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        samples, comm, global_batch=12, micro_batch=4, pin_memory=comm.device.type != "cpu"
    )
    losses = []
    for _ in range(2):
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                scores = model(x[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, x[:, 1:].flatten(), reduction="sum")
                batch.backward(loss, weight=x[:, 1:].numel())
            losses.append(batch.global_loss())
            optimizer.step()
            optimizer.zero_grad()
    exchange.detach()
    return {"model": on_host(model.state_dict()), "losses": torch.tensor(losses)}


def test_recurrent_layers_drop_the_same_on_any_number_of_ranks() -> None:
    (alone,) = run_on_gpu(1, train_reader)
    for size in (2, 3):
        for found in run_on_gpu(size, train_reader):
            assert state_difference(found["model"], alone["model"]) < TOLERANCE, size
            torch.testing.assert_close(found["losses"], alone["losses"], rtol=1e-10, atol=0)
    (without,) = run_on_gpu(1, train_reader, 0.0)
    assert state_difference(without["model"], alone["model"]) > 1e-3


# -- lower precision, and gradients that are not finite ------------------------------------------


class WithOutlier(Dataset[tuple[Tensor, Tensor]]):
    """Images of which one is too large for float16, or for any format."""

    def __init__(self, factor: float) -> None:
        self._images, self._factor = same_model.Images(), factor

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._images[index]
        return x * (self._factor if index == 17 else 1.0), y


PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"precision": "bfloat16"}, 1.0),
    "float16": ({"precision": "float16", "clip_norm": 1.0}, 1e6),
    "skip": ({"precision": "float32", "nonfinite": "skip"}, float("inf")),
}


def train_in_precisions(comm: Communicator, folder: str) -> dict[str, Found]:
    found = {}
    for name, (changes, factor) in PRECISIONS.items():
        task = replace(same_model.make_task("sgd"), train_set=WithOutlier(factor))
        run_dir = Path(folder) / name
        options = replace(same_model.OPTIONS, compression="exact", **changes)
        report = allstep.fit(task, options, comm, run_dir)
        found[name] = {
            "model": on_host(task.model.state_dict()),
            "num_skipped": report.num_skipped,
            "scaler": read_checkpoint(report.checkpoint)["scaler"] if comm.rank == 0 else None,
        }
    return found


def test_lower_precisions_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    """A step whose gradient is not finite is left out, on all ranks or on none."""
    runs = {
        size: run_on_gpu(size, train_in_precisions, str(tmp_path / str(size))) for size in (1, 2, 3)
    }
    (expected,) = runs[1]
    for size in (2, 3):
        for found in runs[size]:
            for name in PRECISIONS:
                differing = differing_names(found[name]["model"], expected[name]["model"])
                assert not differing, (size, name)
                assert found[name]["num_skipped"] == expected[name]["num_skipped"]
        assert runs[size][0]["float16"]["scaler"] == expected["float16"]["scaler"]
    assert all(x.isfinite().all() for name in PRECISIONS for x in expected[name]["model"].values())
    assert expected["skip"]["num_skipped"] == same_model.OPTIONS.epochs
    assert expected["float16"]["scaler"]["scale"] <= 2.0 ** (16 - same_model.OPTIONS.epochs)


# -- checkpoints ---------------------------------------------------------------------------------


def train_restarted(
    comm: Communicator,
    run_dir: str,
    policy: allstep.ExchangePolicy,
    moment: Moment | None = None,
) -> Found:
    """A loop of its own under AutoCheckpoint, whose last rank may be killed at a moment."""
    happens = restarted_loop.kill_at(moment, signal.SIGKILL, (comm.size - 1,), comm)
    return on_host(restarted_loop.train(comm, run_dir, happens, policy=policy, every_steps=2))


@over_links
def test_a_training_that_lost_a_rank_goes_on_from_its_checkpoint_on_any_number(
    link: str, tmp_path: Path
) -> None:
    whole = run_on_gpu(1, train_restarted, str(tmp_path / "whole"), EXACT, link=link)[0]
    broken = tmp_path / "broken"
    moment = ("update", STEPS_PER_EPOCH + 1)
    with pytest.raises(RemoteError):
        run_on_gpu(3, train_restarted, str(broken), EXACT, moment, link=link)
    for size in (1, 2, 3):
        run_dir = shutil.copytree(broken, tmp_path / str(size))
        for found in run_on_gpu(size, train_restarted, str(run_dir), EXACT, link=link):
            assert found["steps"][0] == STEPS_PER_EPOCH
            assert not differing_names(found["model"], whole["model"]), size


def test_a_resumed_training_has_the_bits_of_one_on_as_many_ranks(tmp_path: Path) -> None:
    train = functools.partial(train_restarted, policy=Synchronous())
    whole = run_on_gpu(2, train, str(tmp_path / "whole"))[0]
    with pytest.raises(RemoteError):
        run_on_gpu(2, functools.partial(train, moment=("update", 7)), str(tmp_path / "run"))
    for found in run_on_gpu(2, train, str(tmp_path / "run")):
        assert found["steps"][0] == 6
        assert not differing_names(found["model"], whole["model"])


def train_without_dropout(
    device: torch.device, run_dir: Path, epochs: int, *, resume: bool = False
) -> dict[str, Tensor]:
    task = same_model.make_task("adamw")
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    options = replace(same_model.OPTIONS, epochs=epochs)
    allstep.fit(task, options, Communicator.single_process(device), run_dir, resume=resume)
    state: dict[str, Tensor] = on_host(task.model.state_dict())
    return state


@pytest.mark.parametrize("begins_on_gpu", [True, False])
def test_a_checkpoint_of_one_device_is_loaded_on_another(
    begins_on_gpu: bool, tmp_path: Path
) -> None:
    devices = [gpu(), torch.device("cpu")]
    first, second = devices if begins_on_gpu else devices[::-1]
    half = train_without_dropout(first, tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "loaded")
    loaded = train_without_dropout(second, tmp_path / "loaded", 1, resume=True)
    assert not differing_names(loaded, half)
    resumed = train_without_dropout(second, tmp_path / "run", 2, resume=True)
    whole = train_without_dropout(first, tmp_path / "whole", 2)
    assert state_difference(resumed, whole) < 1e-8
    assert state_difference(resumed, half) > 1e-3


# -- what only an accelerator has ----------------------------------------------------------------


@pytest.mark.skipif(on_cpu(), reason="on a CPU the host waits for nothing")
def test_host_waits_for_nothing_in_a_loop_with_steps() -> None:
    """Torch itself tells of each wait; the first steps make buckets and states."""
    comm, task = single_process(), same_model.make_task("sgd", augment=False)
    model, optimizer = task.model.to(comm.device), task.optimizer(task.model)
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        task.train_set, comm, global_batch=96, micro_batch=32, pin_memory=True
    )
    try:
        for batch in allstep.steps(loader, exchange):
            if batch.step == 2:
                torch.cuda.set_sync_debug_mode("error")
            for data in batch:
                batch.backward(same_model.loss_of(model, data))
            batch.local_sums()
            optimizer.step()
            optimizer.zero_grad()
            if batch.step == 3:  # the end of the epoch may wait
                with pytest.raises(RuntimeError, match="synchronizing"):
                    float(next(model.parameters()).sum())  # the control
                torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        exchange.detach()
