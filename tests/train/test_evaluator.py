"""Exact evaluation: each sample once, whatever the workers; modes and random states untouched."""

import math
import os
import random
import re
import signal
from collections import UserDict, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.comm.group import Topology
from allstep.env import num_cores, without_collector
from allstep.errors import DisagreementError, UsageError
from allstep.train.devices import map_tensors, to_device
from allstep.train.evaluator import Evaluator
from tests.helpers.ranks import run_ranks


class Samples(Dataset[tuple[Tensor, int]]):
    """(features, class); if asked for with random features from all three random states."""

    def __init__(self, num_samples: int, *, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        self.x = torch.randn(num_samples, 3, generator=generator)
        self.y = torch.randint(0, 4, (num_samples,), generator=generator)
        self._augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index]
        if self._augment:
            x = x + torch.randn(3) + random.random() + np.random.uniform()
        return x, int(self.y[index])


def make_model() -> nn.Module:
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12.0).reshape(4, 3).sin())
        model.bias.zero_()
    return model


def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
    x, y = batch
    logits = model(x)
    return {
        "accuracy": ((logits.argmax(1) == y).sum(), len(y)),
        "loss": (nn.functional.cross_entropy(logits, y, reduction="sum"), torch.tensor([len(y)])),
        "ones": (torch.ones(1, dtype=torch.float16), 1.0),
    }


def expected(samples: Samples) -> tuple[int, float]:
    """Correct answers and mean loss of the whole set at once."""
    logits = make_model()(samples.x)
    loss = nn.functional.cross_entropy(logits.double(), samples.y)
    return int((logits.argmax(1) == samples.y).sum()), loss.item()


@pytest.mark.parametrize("num_samples", [1, 7, 40, 101])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_evaluator_counts_are_exact_on_any_number_of_workers(
    num_samples: int, as_tensors: bool
) -> None:
    samples = Samples(num_samples)
    correct, loss = expected(samples)

    def evaluate(comm: Communicator) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        dataset = TensorDataset(samples.x, samples.y) if as_tensors else samples
        evaluator = Evaluator(metrics, dataset, comm, micro_batch=8)
        return evaluator(make_model()), evaluator.totals

    for size in range(1, 6):
        for result, totals in run_ranks(size, evaluate):
            assert list(result) == ["accuracy", "loss", "ones"]
            assert totals["accuracy"] == (correct, num_samples)
            assert result["accuracy"] == correct / num_samples
            assert totals["ones"] == (math.ceil(num_samples / 8),) * 2
            assert result["loss"] == pytest.approx(loss, rel=1e-6)


def test_evaluator_control_mean_of_workers_means_differs() -> None:
    """Negative control: what an average over workers would say."""
    samples = Samples(101)
    correct, _ = expected(samples)

    def naive(comm: Communicator) -> float:
        own = TensorDataset(samples.x[comm.rank :: 3], samples.y[comm.rank :: 3])
        evaluator = Evaluator(metrics, own, Communicator.single_process(), micro_batch=8)
        mean = torch.tensor(evaluator(make_model())["accuracy"], dtype=torch.float64)
        return float(comm.all_reduce(mean, "mean"))

    assert abs(run_ranks(3, naive)[0] - correct / 101) > 1e-4


@pytest.mark.process
def test_evaluator_with_loader_processes_gives_the_same() -> None:
    samples = Samples(30, augment=True)
    comm = Communicator.single_process()
    results = [
        Evaluator(metrics, samples, comm, micro_batch=4, num_workers=n)(make_model())
        for n in (0, 2)
    ]
    assert results[0] == results[1]


class Processes(Dataset[int]):
    """Each sample is the process that reads it, and whether that would survive Ctrl-C."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, bool]:
        survives = {signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        return os.getpid(), survives == {signal.SIG_IGN}


@pytest.mark.parametrize("fails", [False, True])
def test_evaluator_loader_processes_ignore_signals_and_end_with_it(
    fails: bool,
) -> None:
    pids: set[int] = set()

    def look(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        seen, survives = batch
        pids.update(seen.tolist())
        if fails:
            raise ZeroDivisionError
        return {"survives": (survives.sum(), len(survives))}

    evaluator = Evaluator(
        look, Processes(), Communicator.single_process(), micro_batch=2, num_workers=2
    )
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert evaluator(make_model()) == {"survives": 1.0}
    assert os.getpid() not in pids
    assert len(pids) == (1 if fails else 2)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with without_collector():  # [Note: fork]
        unguarded = next(iter(DataLoader(Processes(), num_workers=1)))  # torch's own would end
    assert not unguarded[1].item()


def test_evaluator_random_transforms_belong_to_the_sample() -> None:
    samples = Samples(30, augment=True)

    def evaluate(seed: int = 0, micro_batch: int = 4) -> float:
        comm = Communicator.single_process()
        evaluator = Evaluator(metrics, samples, comm, micro_batch=micro_batch, seed=seed)
        return evaluator(make_model())["loss"]

    assert evaluate() == evaluate()
    assert evaluate() == pytest.approx(evaluate(micro_batch=7), rel=1e-6)
    assert abs(evaluate() - evaluate(seed=1)) > 1e-3


def test_evaluator_keeps_the_global_random_states() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), np.random.uniform(), torch.rand(()).item()

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    def noisy(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        draws()
        return metrics(model, batch)

    evaluator = Evaluator(
        noisy, Samples(9, augment=True), Communicator.single_process(), micro_batch=4
    )
    model = make_model()
    seed()
    undisturbed = draws()
    seed()
    evaluator(model)
    assert draws() == undisturbed


def test_evaluator_restores_each_modules_mode() -> None:
    frozen = nn.BatchNorm1d(4).eval()
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Dropout(), frozen))
    seen = []

    def look(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        seen.append([module.training for module in model.modules()])
        assert not torch.is_grad_enabled()
        return metrics(model, batch)

    before = [module.training for module in model.modules()]
    assert before == [True, True, True, True, False]
    Evaluator(look, Samples(5), Communicator.single_process(), micro_batch=5)(model)
    assert seen == [[False] * 5]
    assert (
        [module.training for module in model.modules()] == before == [True, True, True, True, False]
    )

    def fail(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Evaluator(fail, Samples(5), Communicator.single_process(), micro_batch=5)(model)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_evaluator_metric_names_that_differ_between_ranks() -> None:
    def evaluate(comm: Communicator) -> str:
        def other_names(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
            return {"accuracy" if comm.rank else "precision": (1, 1), "loss": (0, 1)}

        evaluator = Evaluator(other_names, Samples(3), comm, micro_batch=1)
        with pytest.raises(DisagreementError) as caught:
            evaluator(make_model())
        return str(caught.value)

    for message in run_ranks(3, evaluate):
        assert "rank 0 gave `precision`, `loss`; rank 1 gave `accuracy`, `loss`; rank 2" in message


@pytest.mark.parametrize("size", [1, 2])
def test_evaluator_metric_names_that_differ_between_micro_batches(size: int) -> None:
    def evaluate(comm: Communicator) -> str:
        def by_size(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
            return {"whole" if len(batch[0]) == 2 else "short": (1, 1)}

        with pytest.raises(DisagreementError) as caught:
            Evaluator(by_size, Samples(3), comm, micro_batch=2)(make_model())
        return str(caught.value)

    for message in run_ranks(size, evaluate):
        assert "rank 0 gave `whole`" in message
        assert ("and then `short`" if size == 1 else "rank 1 gave `short`") in message


def test_evaluator_metric_names_in_any_order() -> None:
    def evaluate(comm: Communicator) -> list[tuple[str, float]]:
        def turned(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
            pairs = [("a", (1, 1)), ("b", (4, 2))]
            return dict(pairs[::-1] if comm.rank == 1 else pairs)

        return list(Evaluator(turned, Samples(6), comm, micro_batch=2)(make_model()).items())

    assert run_ranks(3, evaluate) == [[("a", 1.0), ("b", 2.0)]] * 3


def test_evaluator_without_counts_or_metrics() -> None:
    comm = Communicator.single_process()
    evaluator = Evaluator(lambda model, batch: {"f1": (0, 0)}, Samples(3), comm, micro_batch=2)
    assert math.isnan(evaluator(make_model())["f1"])
    assert Evaluator(lambda model, batch: {}, Samples(3), comm, micro_batch=2)(make_model()) == {}


def test_evaluator_with_a_collate_fn() -> None:
    def count(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"samples": (batch["n"], 1)}

    evaluator = Evaluator(
        count,
        TensorDataset(torch.arange(5)),
        Communicator.single_process(),
        micro_batch=2,
        collate_fn=lambda samples: {"n": len(samples)},
    )
    evaluator(make_model())
    assert evaluator.totals == {"samples": (5.0, 3.0)}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, r"gave 3 for `m`; it must be a pair \(sum, count\)"),
        ((torch.ones(2), 1), r"gave \(tensor\(\[1., 1.\]\), 1\) for `m`"),
        (("many", 1), r"gave \('many', 1\) for `m`"),
        ((None, 1), r"gave \(None, 1\) for `m`"),
        ((1, 2, 3), r"gave \(1, 2, 3\) for `m`"),
    ],
)
def test_evaluator_refuses_wrong_metrics(value: Any, words: str) -> None:
    evaluator = Evaluator(
        lambda m, b: {"m": value}, Samples(3), Communicator.single_process(), micro_batch=2
    )
    with pytest.raises(UsageError, match=words):
        evaluator(make_model())


def test_shares_of_other_workers_are_refused() -> None:
    """They would leave out what those who are not there have."""
    alone = allstep.data.loader(
        Samples(12), Communicator.single_process(), global_batch=4, micro_batch=2, shares=[1]
    ).shares
    with pytest.raises(UsageError, match="`shares` are of 1 workers, and `comm` is of 2"):
        run_ranks(2, lambda comm: Evaluator(metrics, Samples(9), comm, micro_batch=2, shares=alone))


def test_an_evaluator_follows_workers_that_come_and_go() -> None:
    def measure(comm: Communicator) -> dict[str, Any]:
        loader = allstep.data.loader(Samples(12), comm, global_batch=6, micro_batch=2)
        evaluate = Evaluator(metrics, Samples(9), comm, micro_batch=2)
        shared = Evaluator(metrics, Samples(9), comm, micro_batch=2, shares=loader.shares)
        left = comm.split(color=0 if comm.rank < 2 else None)
        if left is None:
            return {}
        comm.become(left.wire, Topology.from_nodes([0, 0], left.rank))
        with pytest.raises(UsageError, match="`shares` are of 3 workers, and `comm` is of 2"):
            shared(make_model())
        evaluate(make_model())
        return evaluate.totals

    alone = Evaluator(metrics, Samples(9), Communicator.single_process(), micro_batch=2)
    alone(make_model())
    assert run_ranks(3, measure) == [alone.totals, alone.totals, {}]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


class SizedStream(Stream):
    def __len__(self) -> int:
        return 1


def test_evaluator_refuses_wrong_arguments() -> None:
    comm = Communicator.single_process()
    with pytest.raises(UsageError, match=r"`micro_batch` \(=0\)"):
        Evaluator(metrics, Samples(3), comm, micro_batch=0)
    with pytest.raises(UsageError, match=r"`num_workers` \(=-1\)"):
        Evaluator(metrics, Samples(3), comm, micro_batch=1, num_workers=-1)
    for name, value in {"seed": None, "metrics": None, "shares": [1], "collate_fn": 3}.items():
        arguments: dict[str, Any] = {"metrics": metrics, "micro_batch": 1} | {name: value}
        with pytest.raises(UsageError, match=rf"`{name}` \(={re.escape(repr(value))}\)"):
            Evaluator(dataset=Samples(3), comm=comm, **arguments)
    with pytest.raises(UsageError, match="`dataset` is empty"):
        Evaluator(metrics, Samples(0), comm, micro_batch=1)
    for unfit in (Stream(), SizedStream(), DataLoader(Samples(3)), {1, 2}):
        with pytest.raises(UsageError, match=r"`dataset` \(a \w+\) .* can't be indexed"):
            Evaluator(metrics, unfit, comm, micro_batch=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("found", [None, ("accuracy", 1.0), torch.ones(2)])
def test_metrics_that_are_no_dict_are_refused(found: Any) -> None:
    comm = Communicator.single_process()
    evaluate = Evaluator(lambda model, batch: found, Samples(3), comm, micro_batch=2)
    for measure in (evaluate, evaluate.names):
        with pytest.raises(UsageError, match=r"`metrics` gave .*; it must return a dict"):
            measure(make_model())


class Named(UserDict[str, Any]):
    """As a tokenizer's batches: what is in it is an attribute, too."""

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["data"][name]


class Labelled(dict[str, Any]):
    label = 7


def test_dicts_keep_their_class() -> None:
    def sums(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"sum": (batch.x.sum(), batch.n)}

    def collate(samples: list[Any]) -> Named:
        return Named(x=torch.stack([x for x, _ in samples]), n=len(samples))

    data, comm = Samples(5), Communicator.single_process()
    evaluate = Evaluator(sums, data, comm, micro_batch=2, collate_fn=collate)
    assert evaluate(make_model())["sum"] == pytest.approx(data.x.sum().item() / 5)
    given = Labelled(x=torch.ones(2), none=defaultdict(list, y=torch.ones(1)))
    moved = to_device(given, torch.device("meta"))
    assert (type(moved), moved.label, moved["x"].device.type) == (Labelled, 7, "meta")
    assert moved["none"]["z"] == [] and moved["none"]["y"].is_meta
    assert not given["x"].is_meta and not given["none"]["y"].is_meta


def test_to_device_of_nested_data() -> None:
    meta = torch.device("meta")
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    data = {"x": [torch.ones(2), "name"], "pair": torch.ones(3).max(0), "packed": packed, "n": 3}
    moved = to_device(data, meta)
    assert moved["x"][0].device == moved["pair"].values.device == meta
    assert moved["packed"].data.device == meta
    assert moved["packed"].batch_sizes.device.type == "cpu"
    assert moved["x"][1] == "name"
    assert moved["n"] == 3
    assert torch.equal(map_tensors((torch.ones(2),), lambda x: x + 1)[0], torch.full((2,), 2.0))
    assert num_cores() >= 1
