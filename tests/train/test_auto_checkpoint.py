"""A user's own loop saves by itself and goes on as if it had not stopped."""

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, LocalSGD, Stale
from allstep.comm import read_states
from allstep.comm.worker_state import FAILED
from allstep.errors import CheckpointError, DisagreementError, UsageError
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.ranks import run_ranks
from tests.helpers.restarted_loop import NUM_EPOCHS, NUM_STEPS, STEPS_PER_EPOCH, Moment, train


class CrashError(Exception):
    """The end of a life."""


def crash_at(moment: Moment) -> Callable[[Moment], None]:
    def happens(now: Moment) -> None:
        if now == moment:
            raise CrashError

    return happens


def crash(comm: Communicator, run_dir: Path, moment: Moment, **options: Any) -> None:
    with pytest.raises(CrashError):
        train(comm, str(run_dir), crash_at(moment), **options)


def alone() -> Communicator:
    return Communicator.single_process()


MOMENTS = [("update", step) for step in range(NUM_STEPS)] + [
    ("epoch", epoch) for epoch in range(NUM_EPOCHS)
]


@pytest.mark.parametrize(
    ("every_steps", "first", "elastic"),
    [
        (3, 1, False),
        (None, 0, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 0, False), (1, 0, True), (3, 1, True), (None, 0, False))
        ),
    ],
)
def test_a_loop_that_crashed_anywhere_ends_with_the_same_bits(
    every_steps: int | None, first: int, elastic: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"every_steps": every_steps, "elastic": elastic}
    whole = train(alone(), str(tmp_path / "whole"), **options)
    assert whole["steps"] == list(range(NUM_STEPS))
    assert whole["rate"] == pytest.approx(0.1 * 0.7**NUM_EPOCHS)
    num_saved = 0
    for number, moment in enumerate(MOMENTS[first::2]):
        run_dir = tmp_path / str(number)
        crash(alone(), run_dir, moment, **options)
        found = train(alone(), str(run_dir), **options)
        assert not differing_names(found["model"], whole["model"])
        assert found["rate"] == whole["rate"]
        num_saved += NUM_STEPS - len(found["steps"])
        every = every_steps or STEPS_PER_EPOCH
        done = moment[1] if moment[0] == "update" else (moment[1] + 1) * STEPS_PER_EPOCH
        assert found["steps"] == list(range(done - done % every, NUM_STEPS))
    assert num_saved > NUM_STEPS  # lives were not all begun anew


@pytest.mark.parametrize("elastic", [False, True])
def test_a_finished_loop_has_no_step_left(elastic: bool, tmp_path: Path) -> None:
    whole = train(alone(), str(tmp_path), every_steps=5, elastic=elastic)
    again = train(alone(), str(tmp_path), every_steps=5, elastic=elastic)
    assert again["steps"] == []
    assert not differing_names(again["model"], whole["model"])
    assert again["rate"] == whole["rate"]  # the last epoch's end is run again, of the same state


@pytest.mark.parametrize("elastic", [False, True])
def test_a_loop_that_goes_to_another_folder_keeps_its_own(
    elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()

    def happens(now: Moment) -> None:
        monkeypatch.chdir(tmp_path / "other")
        if now == ("update", 5):
            raise CrashError

    with pytest.raises(CrashError):
        train(alone(), "run", happens, every_steps=2, elastic=elastic)
    monkeypatch.chdir(tmp_path)
    found = train(alone(), "run", every_steps=2, elastic=elastic)
    assert found["steps"][0] == 4
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize(
    "policy",
    [
        Stale(),
        LocalSGD(sync_every=3, average_optimizer_state=True),
        allstep.Synchronous(compression="exact"),
    ],
)
def test_policies_go_on_with_what_was_in_flight(policy: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": policy, "every_steps": 2, "draws": False}

    def run(comm: Communicator) -> None:
        whole = train(comm, str(tmp_path / "whole"), **options)
        crash(comm, tmp_path / "run", ("update", 7), **options)
        found = train(comm, str(tmp_path / "run"), **options)
        assert found["steps"][0] == 6
        assert not differing_names(found["model"], whole["model"])

    run_ranks(2, run)


def test_gradients_of_several_global_batches_are_kept(tmp_path: Path) -> None:
    """Saved after 7 of them, where an update is made of three."""
    options: dict[str, Any] = {"updates_every": 3, "every_steps": 1, "draws": False}

    def run(comm: Communicator) -> None:
        whole = train(comm, str(tmp_path / "whole"), **options)
        crash(comm, tmp_path / "run", ("update", 7), **options)
        found = train(comm, str(tmp_path / "run"), **options)
        assert found["steps"][0] == 7
        assert not differing_names(found["model"], whole["model"])

    run_ranks(2, run)


@pytest.mark.parametrize("elastic", [False, True])
def test_gradients_are_kept_where_no_step_was_made(elastic: bool, tmp_path: Path) -> None:
    """The second life makes the end of an epoch only, of whose last step no update was made."""
    options: dict[str, Any] = {"updates_every": 3, "draws": False, "elastic": elastic}
    whole = train(alone(), str(tmp_path / "whole"), **options)
    for moment in (("epoch", 0), ("update", 4)):
        crash(alone(), tmp_path / "run", moment, **options)
    found = train(alone(), str(tmp_path / "run"), **options)
    assert found["steps"] == list(range(4, NUM_STEPS))
    assert not differing_names(found["model"], whole["model"])


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_of_zero_are_zero_again(set_to_none: bool, tmp_path: Path) -> None:
    """Then momentum moves a layer that a step does not use; it does not where there is none."""
    samples = TensorDataset(torch.arange(24.0).view(12, 2) / 24)

    def life(run_dir: Path, stop: int = 6) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        exchange = allstep.attach(layers, alone())
        loader = allstep.data.loader(samples, alone(), global_batch=2, micro_batch=2)
        state = {"optimizer": optimizer}
        with allstep.AutoCheckpoint(
            run_dir, loader, exchange, state=state, every_steps=1
        ) as checkpoint:
            for _ in checkpoint.epochs(1):
                for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                    if batch.step == stop:
                        raise CrashError
                    for (x,) in batch:
                        batch.backward(
                            layers[0](x).square().mean()
                            + (layers[1](x).square().mean() if batch.step == 0 else 0)
                        )
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
        return layers.state_dict()

    whole = life(tmp_path / "whole")
    with pytest.raises(CrashError):
        life(tmp_path / "run", 3)
    assert not differing_names(life(tmp_path / "run"), whole)


def test_several_models_optimizers_schedules_and_a_scaler_go_on(tmp_path: Path) -> None:
    samples = TensorDataset(torch.arange(48.0).view(24, 2) / 48)

    def life(run_dir: Path, stop: int | None = None) -> dict[str, Any]:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            nets = [nn.Linear(2, 2), nn.Linear(2, 1)]
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=0.2, total_steps=18),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1], patience=0),
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=4)
        exchanges = [allstep.attach(net, alone()) for net in nets]
        loader = allstep.data.loader(samples, alone(), global_batch=4, micro_batch=2)
        parts = [*optimizers, *schedules, scaler]
        state = {f"{type(part).__name__} {n}": part for n, part in enumerate(parts)}
        checkpoint = allstep.AutoCheckpoint(run_dir, loader, *exchanges, state=state, every_steps=1)
        with checkpoint:
            for _ in checkpoint.epochs(3):
                for batch in allstep.steps(loader, *exchanges, checkpoint=checkpoint):
                    for (x,) in batch:
                        batch.backward(scaler.scale(nets[1](nets[0](x)).square().mean()))
                    if batch.step == stop:
                        raise CrashError
                    for optimizer in optimizers:
                        scaler.step(optimizer)
                        optimizer.zero_grad()
                    scaler.update()
                    schedules[0].step()
                schedules[1].step(1.0)
        return {
            "nets": [net.state_dict() for net in nets],
            "parts": [part.state_dict() for part in parts],
        }

    whole = life(tmp_path / "whole")
    assert whole["parts"][-1]["scale"] > 2.0
    for stop in (3, 9, 17):
        with pytest.raises(CrashError):
            life(tmp_path / str(stop), stop)
        found = life(tmp_path / str(stop))
        for net, other in zip(found["nets"], whole["nets"], strict=True):
            assert not differing_names(net, other)
        assert str(found["parts"]) == str(whole["parts"])


@pytest.mark.parametrize("kind", ["alone", "in a sequence", "in a chain"])
def test_a_schedule_by_milestones_goes_on(kind: str, tmp_path: Path) -> None:
    samples = TensorDataset(torch.arange(8.0).view(4, 2) / 8)

    def life(run_dir: Path, stop: int | None = None) -> list[float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)
        schedule: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], 0.1)
        if kind == "in a sequence":
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, schedule], [3])
        if kind == "in a chain":
            schedule = torch.optim.lr_scheduler.ChainedScheduler([constant, schedule])
        exchange = allstep.attach(model, alone())
        loader = allstep.data.loader(samples, alone(), global_batch=2, micro_batch=2)
        state = {"optimizer": optimizer, "schedule": schedule}
        rates = []
        checkpoint = allstep.AutoCheckpoint(run_dir, loader, exchange, state=state, every_steps=1)
        with checkpoint:
            for _ in checkpoint.epochs(4):
                for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                    for (x,) in batch:
                        batch.backward(model(x).square().mean())
                    if batch.step == stop:
                        raise CrashError
                    optimizer.step()
                    schedule.step()
                    rates += schedule.get_last_lr()
        return rates

    whole = life(tmp_path / "whole")
    for stop in (1, 4):
        with pytest.raises(CrashError):
            life(tmp_path / str(stop), stop)
        assert life(tmp_path / str(stop)) == whole[stop:]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_another_number_of_workers_goes_on(num_workers: int, tmp_path: Path) -> None:
    def begin(comm: Communicator) -> dict[str, Any]:
        crash(comm, tmp_path / "run", ("update", 6), every_steps=5, draws=False)
        return train(comm, str(tmp_path / "whole"), draws=False)

    def go_on(comm: Communicator) -> dict[str, Any]:
        return train(comm, str(tmp_path / "run"), every_steps=5, draws=False)

    whole = run_ranks(2, begin)[0]["model"]
    for found in run_ranks(num_workers, go_on):
        assert found["steps"][0] == 5
        assert state_difference(found["model"], whole) < 1e-10


def thaw(comm: Communicator, run_dir: Path, last_step: int, **options: Any) -> dict[str, Tensor]:
    """A loop that trains its first layer from the second epoch on; up to a step."""
    generator = torch.Generator().manual_seed(3)
    samples = TensorDataset(*(torch.randn(24, n, generator=generator).double() for n in (3, 1)))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = allstep.attach(model, comm, **options)
    loader = allstep.data.loader(samples, comm, global_batch=6, micro_batch=2)
    state = {"optimizer": optimizer}
    with allstep.AutoCheckpoint(str(run_dir), loader, exchange, state=state) as checkpoint:
        for epoch in checkpoint.epochs(4):
            if epoch == 1:
                model[0].requires_grad_(True)
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                if batch.step == last_step:
                    raise CrashError
                for x, y in batch:
                    batch.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize(
    "policy", [allstep.Synchronous(), allstep.Synchronous(compression="exact")]
)
def test_what_was_frozen_and_is_trained_by_now(
    policy: allstep.Synchronous, before: int, after: int, tmp_path: Path
) -> None:
    """The script has frozen it again before it goes on, and is behind the place that trains it."""
    whole = thaw(alone(), tmp_path / "whole", -1, policy=policy)
    with pytest.raises(CrashError):
        run_ranks(before, lambda comm: thaw(comm, tmp_path / "run", 14, policy=policy))
    for found in run_ranks(after, lambda comm: thaw(comm, tmp_path / "run", -1, policy=policy)):
        if policy.compression == "exact":
            assert differing_names(found, whole) == []
        else:
            torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def test_a_loop_that_restores_the_model_only_differs(tmp_path: Path) -> None:
    """Control: momentum, schedule and position matter to the result."""
    whole = train(alone(), str(tmp_path / "whole"))["model"]
    crash(alone(), tmp_path / "run", ("update", 6), every_steps=5)
    naive = train(alone(), str(tmp_path / "run"), resumes=False)["model"]
    assert state_difference(naive, whole) > 1e-3


def test_the_state_around_the_steps_follows_from_the_epoch(tmp_path: Path) -> None:
    def drawn(run_dir: Path, moment: Moment | None = None) -> list[float]:
        """What the end of each epoch draws, in two lives."""
        numbers: list[float] = []

        def happens(now: Moment) -> None:
            if now == moment:
                raise CrashError
            if now[0] == "epoch":
                numbers.append(torch.rand(()).item())

        if moment is not None:
            with pytest.raises(CrashError):
                train(alone(), str(run_dir), happens, every_steps=1)
            moment = None
        train(alone(), str(run_dir), happens, every_steps=1)
        return numbers

    state = torch.get_rng_state()
    whole = drawn(tmp_path / "whole")
    assert len(set(whole)) == NUM_EPOCHS
    assert drawn(tmp_path / "run", ("update", 6)) == whole
    assert torch.equal(torch.get_rng_state(), state)


def test_a_damaged_checkpoint_is_left_for_the_one_before(tmp_path: Path) -> None:
    whole = train(alone(), str(tmp_path / "whole"), every_steps=2)
    crash(alone(), tmp_path / "run", ("update", 7), every_steps=2)
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    (newest / "tensors.safetensors").write_bytes(b"")
    found = train(alone(), str(tmp_path / "run"), every_steps=2)
    assert found["steps"][0] == 4
    assert not differing_names(found["model"], whole["model"])


def test_a_folder_of_damaged_checkpoints_is_not_begun_anew(tmp_path: Path) -> None:
    crash(alone(), tmp_path, ("update", 3), every_steps=2)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        train(alone(), str(tmp_path))


# -- when it saves -----------------------------------------------------------------------------


class Clock:
    """Goes on by so many seconds each time that it is read."""

    def __init__(self, tick_s: float) -> None:
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(("tick_s", "expected"), [(0.0, [12]), (10.0, [4, 8, 12])])
def test_a_lone_elastic_loop_saves_by_its_clock(
    tick_s: float, expected: list[int], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"every_s": 30.0, "keep": 100, "clock": Clock(tick_s)}
    train(alone(), str(tmp_path), elastic=True, **options)
    assert saved_steps(tmp_path) == expected


@pytest.mark.parametrize(("tick_s", "expected"), [(0.0, [12]), (10.0, [4, 7, 10, 12])])
def test_rank_0_s_clock_says_when_to_save(
    tick_s: float, expected: list[int], tmp_path: Path
) -> None:
    """The other worker's clock runs away; if it counted, workers would save at other steps."""

    def run(comm: Communicator) -> None:
        clock = Clock(1e6 if comm.rank else tick_s)
        train(comm, str(tmp_path), every_s=30.0, keep=100, clock=clock)

    run_ranks(2, run)
    assert saved_steps(tmp_path) == expected


def test_steps_and_seconds_save_both(tmp_path: Path) -> None:
    train(alone(), str(tmp_path), every_steps=5, every_s=40.0, keep=100, clock=Clock(10.0))
    assert {5, 10, 12} < set(saved_steps(tmp_path))


@pytest.mark.parametrize("elastic", [False, True])
def test_by_default_each_epoch_s_last_step_is_saved(elastic: bool, tmp_path: Path) -> None:
    train(alone(), str(tmp_path), elastic=elastic)
    assert saved_steps(tmp_path) == [4, 8, 12]


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(
    ("moment", "expected"), [(("update", 6), [1, 2]), (("epoch", 0), [0, 1, 2])]
)
def test_the_end_of_an_epoch_is_repeated_if_it_was_not_over(
    moment: Moment, expected: list[int], elastic: bool, tmp_path: Path
) -> None:
    """What it takes of the steps, as their mean loss, is not there without them."""
    crash(alone(), tmp_path, moment, elastic=elastic)
    epochs: list[int] = []

    def note(now: Moment) -> None:
        if now[0] == "epoch":
            epochs.append(now[1])

    train(alone(), str(tmp_path), note, elastic=elastic)
    assert epochs == expected


# -- when it stops -----------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """SIGTERM, raised by these tests, must not end them where nobody has asked for it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("moment", "num_steps", "num_elastic_steps"),
    [
        (("update", 0), 2, 2),  # an elastic loop asks before an update
        (("micro-batch", 2), 2, 1),
        (("update", 5), 7, 7),
        (("update", 7), 8, 9),
        (("epoch", 1), 8, 9),
    ],
)
@pytest.mark.parametrize("elastic", [False, True])
def test_sigterm_ends_the_loop_after_a_step_with_a_checkpoint(
    moment: Moment,
    num_steps: int,
    num_elastic_steps: int,
    elastic: bool,
    tmp_path: Path,
    quiet: None,
) -> None:
    def happens(now: Moment) -> None:
        if now == moment:
            signal.raise_signal(signal.SIGTERM)

    whole = train(alone(), str(tmp_path / "whole"), elastic=elastic)
    first = train(alone(), str(tmp_path / "run"), happens, every_s=1e9, elastic=elastic)
    assert first["interrupted"] == signal.SIGTERM
    num_steps = num_elastic_steps if elastic else num_steps
    assert len(first["steps"]) == num_steps
    assert saved_steps(tmp_path / "run") == [num_steps]
    second = train(alone(), str(tmp_path / "run"), elastic=elastic)
    assert second["interrupted"] is None
    assert first["steps"] + second["steps"] == list(range(NUM_STEPS))
    assert not differing_names(second["model"], whole["model"])
    assert second["rate"] == whole["rate"]


# -- what it refuses ---------------------------------------------------------------------------


class Parts:
    """What a small loop consists of."""

    def __init__(
        self,
        comm: Communicator,
        *,
        model: nn.Module | None = None,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        policy: allstep.ExchangePolicy | None = None,
        num_samples: int = 8,
        **loader: Any,
    ) -> None:
        self.model = model or nn.Linear(2, 1)
        self.exchange = allstep.attach(self.model, comm, policy)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        samples = TensorDataset(torch.ones(num_samples, 2))
        sizes = {"global_batch": 4, "micro_batch": 2} | loader
        self.loader = allstep.data.loader(samples, comm, **sizes)

    def checkpoint(self, run_dir: Path, **options: Any) -> allstep.AutoCheckpoint:
        state = {"state": {"optimizer": self.optimizer}} | options
        return allstep.AutoCheckpoint(run_dir, self.loader, self.exchange, **state)

    def train(self, checkpoint: allstep.AutoCheckpoint, *, num_epochs: int = 1) -> None:
        with checkpoint:
            for _ in checkpoint.epochs(num_epochs):
                self.steps(checkpoint)

    def steps(self, checkpoint: allstep.AutoCheckpoint) -> None:
        for batch in allstep.steps(self.loader, self.exchange, checkpoint=checkpoint):
            for (x,) in batch:
                batch.backward(self.model(x).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(2, 3)}, r"another model: of another shape: weight \[1, 2\] instead"),
        ({"model": nn.Linear(2, 1).double()}, r"of another dtype: weight torch.float32 instead"),
        ({"optimizer": torch.optim.AdamW}, r"`state` \(={'optimizer': 'AdamW'}\) differs"),
        ({"global_batch": 8}, r"`global_batch` \(=8\) differs from the checkpoint's \(=4\)"),
        ({"micro_batch": 4}, r"`micro_batch` \(=4\) differs"),
        ({"seed": 5}, r"`seed` \(=5\) differs"),
        ({"shuffle": False}, r"`shuffle` \(=False\) differs"),
        ({"num_samples": 12}, r"`num_samples` \(=12\) differs from the checkpoint's \(=8\)"),
        ({"policy": Stale()}, r"(?s)`\w+` \(=\w+\) was \w+ in the checkpoint"),
    ],
)
def test_another_training_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    first = Parts(alone())
    first.train(first.checkpoint(tmp_path))
    other = Parts(alone(), **changes)
    with pytest.raises(CheckpointError, match=message):
        other.train(other.checkpoint(tmp_path), num_epochs=2)
    first = Parts(alone())
    first.train(first.checkpoint(tmp_path), num_epochs=2)  # nothing on the disk has changed
    assert first.loader.step == 4


def test_a_folder_in_use_is_refused_by_an_elastic_loop(tmp_path: Path) -> None:
    parts = Parts(alone())
    with (
        parts.checkpoint(tmp_path),
        pytest.raises(UsageError, match="is being trained by process"),
    ):
        train(alone(), str(tmp_path), elastic=True)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("moment", [("update", 6), ("epoch", 0)])
def test_a_folder_of_the_other_kind_of_loop(moment: Moment, elastic: bool, tmp_path: Path) -> None:
    """A loop that was elastic may go on without, and the reverse."""
    policy = allstep.Synchronous(compression="exact")
    whole = train(alone(), str(tmp_path / "whole"), policy=policy)
    crash(alone(), tmp_path / "run", moment, policy=policy, elastic=not elastic)
    found = train(alone(), str(tmp_path / "run"), policy=policy, elastic=elastic)
    assert found["steps"] == list(range(4, NUM_STEPS))
    assert differing_names(found["model"], whole["model"]) == []
    assert found["rate"] == whole["rate"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    first, second = Parts(alone()), Parts(alone())
    with (
        first.checkpoint(tmp_path),
        pytest.raises(UsageError, match="is being trained by process"),
        second.checkpoint(tmp_path),
    ):
        pass
    second.train(second.checkpoint(tmp_path))


class SmallLoop:
    """Of three steps an epoch and a rate that falls, kept by `Elastic` or `AutoCheckpoint`."""

    def __init__(self, run_dir: Path, *, elastic: bool, **options: Any) -> None:
        policy = allstep.Synchronous(compression="exact")
        self._parts = Parts(alone(), policy=policy, num_samples=12)
        self.schedule = torch.optim.lr_scheduler.StepLR(self._parts.optimizer, 1, 0.5)
        loader, exchange = self._parts.loader, self._parts.exchange
        state = {"optimizer": self._parts.optimizer, "schedule": self.schedule}
        self.keeper: allstep.AutoCheckpoint | allstep.Elastic
        if elastic:
            keeper = allstep.Elastic(loader, exchange, state=state, run_dir=run_dir, **options)
            self._given: dict[str, Any] = {"elastic": keeper}
            self.keeper = keeper
        else:
            self.keeper = allstep.AutoCheckpoint(run_dir, loader, exchange, state=state, **options)
            self._given = {"checkpoint": self.keeper}
        self.steps: list[int] = []

    def epoch(self, before: Callable[[int], object] = lambda step: None) -> None:
        """Its steps, up to one before which is returned True; without those with False."""
        parts = self._parts
        for batch in allstep.steps(parts.loader, parts.exchange, **self._given):
            told = before(batch.step)
            if told is False:
                continue
            for (x,) in batch:
                batch.backward(parts.model(x).mean())
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            self.steps.append(batch.step)
            if told is True:
                break


@pytest.mark.parametrize("elastic", [False, True])
def test_an_epochs_steps_are_left_at_the_last_one(elastic: bool, tmp_path: Path) -> None:
    """What follows them has been run when the end of the epoch is saved."""

    def live(dies_at: int) -> SmallLoop:
        def before(step: int) -> bool | None:
            if step == dies_at:
                raise CrashError
            return step % 3 == 2 or None

        loop = SmallLoop(tmp_path, elastic=elastic)
        with loop.keeper as keeper:
            for _ in keeper.epochs(3):
                loop.epoch(before)
                loop.schedule.step()
        return loop

    with pytest.raises(CrashError):
        live(4)
    again = live(-1)
    assert again.steps == [3, 4, 5, 6, 7, 8]
    assert again.schedule.get_last_lr() == [0.1 * 0.5**3]


@pytest.mark.parametrize("elastic", [False, True])
def test_a_global_batch_that_is_left_out(elastic: bool, tmp_path: Path) -> None:
    loop = SmallLoop(tmp_path, elastic=elastic, every_steps=1)
    with loop.keeper as keeper:
        for _ in keeper.epochs(1):
            loop.epoch(lambda step: False if step == 1 else None)
    assert loop.steps == [0, 2]
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_no_epochs_follow_a_signal(tmp_path: Path, quiet: None) -> None:
    def ask(step: int) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGTERM)

    loop = SmallLoop(tmp_path, elastic=True)
    with loop.keeper as keeper:
        for num_epochs in (2, 4):
            for _ in keeper.epochs(num_epochs):
                loop.epoch(ask)
    assert loop.steps == [0, 1]
    assert saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("elastic", [False, True])
def test_an_exception_in_the_loop_is_noted(elastic: bool, tmp_path: Path) -> None:
    loop = SmallLoop(tmp_path, elastic=elastic)
    with pytest.raises(CrashError), loop.keeper as keeper:
        for _ in keeper.epochs(1):
            raise CrashError("out of luck")
    (state,) = read_states(tmp_path)
    assert (state.end, state.message) == (FAILED, "CrashError: out of luck")


def test_an_optimizer_that_is_not_in_the_state_is_refused_at_the_first_step(
    tmp_path: Path,
) -> None:
    parts = Parts(alone())
    with pytest.raises(UsageError, match=r"lacks an optimizer that updates the model \(a SGD\)"):
        parts.train(parts.checkpoint(tmp_path, state={}))
    assert parts.loader.step == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_steps": 0}, r"`every_steps` \(=0\) must be at least 1"),
        ({"every_steps": 2.5}, r"`every_steps` \(=2.5\) must be a whole number"),
        ({"every_s": 0.0}, r"`every_s` \(=0.0\) must be above 0 and finite; give .* seconds"),
        ({"every_s": "600"}, r"`every_s` \(='600'\)"),
        ({"every_s": True}, r"`every_s` \(=True\)"),
        ({"keep": None}, r"`keep` \(=None\) must be a whole number"),
        ({"keep": "3"}, r"`keep` \(='3'\) must be a whole number"),
        ({"state": [3]}, r"`state` \(a list\) must be a dict .*`state={\"optimizer\": optimizer}`"),
        ({"state": None}, r"`state` \(a NoneType\) must be a dict"),
        ({"every_s": float("nan")}, r"`every_s` \(=nan\)"),
        ({"keep": 0}, r"`keep` \(=0\) must be at least 1"),
        ({"state": {"rate": 0.1}}, r"`state`: 'rate' \(a float\) has no `state_dict`"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Parts(alone()).checkpoint(tmp_path, **options)


def test_a_loader_of_torch_is_refused(tmp_path: Path) -> None:
    parts = Parts(alone())
    parts.loader = torch.utils.data.DataLoader(TensorDataset(torch.ones(4)))  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"`loader` \(a DataLoader\) tells no position"):
        parts.checkpoint(tmp_path)


def test_steps_in_epochs_take_the_checkpoint(tmp_path: Path) -> None:
    parts = Parts(alone())
    with parts.checkpoint(tmp_path) as checkpoint:
        for _ in checkpoint.epochs(1):
            with pytest.raises(UsageError, match=r"was not given `checkpoint`"):
                allstep.steps(parts.loader, parts.exchange)
            parts.steps(checkpoint)
    allstep.steps(parts.loader, parts.exchange)


def test_steps_belong_in_epochs_in_with(tmp_path: Path) -> None:
    parts, other = Parts(alone()), Parts(alone())
    checkpoint = parts.checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"put `steps` in `for epoch in checkpoint.epochs"):
        parts.steps(checkpoint)
    with pytest.raises(UsageError, match=r"`epochs` is for `with AutoCheckpoint"):
        checkpoint.epochs(1)
    with checkpoint:
        for _ in checkpoint.epochs(1):
            with pytest.raises(UsageError, match="made for another loader or other exchanges"):
                other.steps(checkpoint)
            parts.steps(checkpoint)
            with pytest.raises(UsageError, match="A second loop over `steps` began in one epoch"):
                parts.steps(checkpoint)
    with pytest.raises(UsageError, match="is entered once"):
        checkpoint.__enter__()


def test_workers_with_other_intervals_are_refused(tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        parts = Parts(comm)
        with pytest.raises(DisagreementError, match="every_steps"):
            parts.train(parts.checkpoint(tmp_path, every_steps=1 + comm.rank))
        by_seconds = 600.0 if comm.rank else None
        with pytest.raises(DisagreementError, match="every_s is None"):
            parts.train(parts.checkpoint(tmp_path, every_s=by_seconds))

    run_ranks(2, run)


def test_a_loop_without_a_folder_is_the_same_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = train(alone(), str(tmp_path / "whole"))
    found = train(alone(), None)
    assert found["steps"] == whole["steps"]
    assert differing_names(found["model"], whole["model"]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_workers_of_which_one_has_no_folder_are_refused(tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        parts = Parts(comm)
        with pytest.raises(DisagreementError, match="run_dir is None"):
            parts.train(parts.checkpoint(None if comm.rank else tmp_path))

    run_ranks(2, run)


def test_a_loop_may_be_left(tmp_path: Path) -> None:
    """By a break, as for an early stop: it goes on from the newest checkpoint."""
    parts = Parts(alone(), num_samples=16)
    with parts.checkpoint(tmp_path, every_steps=2) as checkpoint:
        for _ in checkpoint.epochs(3):
            for batch in allstep.steps(parts.loader, parts.exchange, checkpoint=checkpoint):
                for (x,) in batch:
                    batch.backward(parts.model(x).mean())
                parts.optimizer.step()
                if batch.step == 2:
                    break
            break
    again = Parts(alone(), num_samples=16)
    with again.checkpoint(tmp_path) as checkpoint:
        assert (again.loader.step, again.loader.epoch) == (2, 0)
        assert next(checkpoint.epochs(3)) == 0


def test_a_stream_goes_on(tmp_path: Path) -> None:
    class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(22.0).view(11, 2))

    def seen(run_dir: Path, stop: int | None = None) -> list[float]:
        model = nn.Linear(2, 1)
        exchange = allstep.attach(model, alone())
        loader = allstep.data.loader(Numbers(), alone(), global_batch=4, micro_batch=2)
        found = []
        with allstep.AutoCheckpoint(
            run_dir, loader, exchange, state={}, every_steps=1
        ) as checkpoint:
            for _ in checkpoint.epochs(2):
                for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                    if batch.step == stop:
                        raise CrashError
                    for x in batch:
                        found.append(float(x.sum()))
                        batch.backward(model(x).mean())
        return found

    whole = seen(tmp_path / "whole")
    assert len(whole) == 2 * 6
    for stop in range(6):
        run_dir = tmp_path / str(stop)
        with pytest.raises(CrashError):
            seen(run_dir, stop)
        rest = seen(run_dir)
        assert whole[-len(rest) :] == rest
        assert len(rest) == sum([2, 2, 2] * 2) - 2 * stop
        shutil.rmtree(run_dir)


def test_what_it_says_names_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(alone())
    parts.train(parts.checkpoint(tmp_path))
    caplog.set_level("INFO", logger="allstep")
    again = Parts(alone())
    again.train(again.checkpoint(tmp_path), num_epochs=2)
    assert re.search(r"goes on after step 2", caplog.text)
