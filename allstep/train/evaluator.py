"""Metrics on a whole test set, each sample counted exactly once on any number of workers."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from allstep.comm import Communicator, divided_prefixes
from allstep.comm.agreement import agree
from allstep.comm.reproducible import digits_of, sum_of_digits
from allstep.data.fetch import FetchMicroBatch, is_map_style, not_map_style
from allstep.data.processes import LoaderProcesses
from allstep.data.random import derive_seed, preserved_random_state, seed_all
from allstep.data.same_data import check_same_arguments, check_same_samples
from allstep.data.shares import Shares
from allstep.device import has_streams
from allstep.errors import DisagreementError, UsageError, check_integer, check_type
from allstep.exchange.exchange import exchanges_of
from allstep.exchange.state_sweep import tensor_checksums
from allstep.nn import Pipeline, num_calls_of, serve_others, serving
from allstep.torch_classes import is_dtensor
from allstep.train.devices import to_device
from allstep.train.task import Metrics

# Keep an evaluation's random numbers apart from those of training with the same seed.
_SAMPLE = 0x73616D706C65
_COMPUTE = 0x6576616C


class Evaluator:
    """Measures a model on a test set that is divided over the workers.

        metric = sum over all micro-batches of sum / sum of count    (nan if nothing was counted)

    The test set is cut into the same micro-batches on any number of workers, so that counts and
    sums have the same bits: [Note: reproducible sum]. Random transforms draw from (seed, sample),
    and the training's random state is not disturbed.

    Args:
        metrics: `(model, micro_batch) -> {name: (sum, count)}`, numbers or one-element tensors;
            the names must be the same for every micro-batch.
        dataset: map-style, the same on every worker.
        comm: the workers; each of them must call the evaluator.
        micro_batch: samples that go through the model at once.
        num_workers: processes per worker that read samples; 0 reads in the worker itself.
        collate_fn: samples -> micro-batch; torch's default when None.
        seed: seed of every random state.
        shares: each worker's share of the test set, as in `loader.shares`; equal shares when None.

    Attributes:
        totals: (sum, count) of each metric at the last call.

    Raises:
        UsageError: if the test set is empty or not map-style, a number is out of range, or an
            argument is of a wrong kind.

    >>> from torch.utils.data import TensorDataset
    >>> samples = TensorDataset(torch.tensor([1.0, 2.0, 6.0]))
    >>> def metrics(model, batch):
    ...     return {"mean": (model(batch[0]).sum(), len(batch[0]))}
    >>> evaluator = Evaluator(metrics, samples, Communicator.single_process(), micro_batch=2)
    >>> evaluator(nn.Identity())
    {'mean': 3.0}
    >>> evaluator.totals
    {'mean': (9.0, 3.0)}
    """

    def __init__(
        self,
        metrics: Callable[[nn.Module, Any], Metrics],
        dataset: Dataset[Any],
        comm: Communicator,
        *,
        micro_batch: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        shares: Shares | None = None,
    ) -> None:
        check_integer("micro_batch", micro_batch)
        check_integer("seed", seed, -(1 << 63))
        if not callable(metrics):
            raise UsageError(
                f"`metrics` (={metrics!r}) must be a function: (model, micro-batch) -> sums and"
                " counts by name."
            )
        check_type("comm", comm, Communicator, "that of `allstep.init()`")
        if not isinstance(shares, Shares | None):
            raise UsageError(f"`shares` (={shares!r}): give `loader.shares`, or None.")
        _check_shares(shares, comm)
        self.totals: dict[str, tuple[float, float]] = {}
        self._metrics = metrics
        self._comm = comm
        self._processes = LoaderProcesses(
            num_workers=num_workers, pin_memory=has_streams(comm.device)
        )
        self._seed = seed
        self._given_shares = shares
        self._fetch = FetchMicroBatch(dataset, derive_seed(seed, _SAMPLE), collate_fn)
        self._cut = _cut(_length(dataset), micro_batch)
        self._dataset, self._arguments = dataset, {"micro_batch": micro_batch, "seed": seed}
        self._is_compared = False

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Measures the model; all workers call it.

        Args:
            model: on `comm.device`; in eval mode meanwhile, then each module's mode is restored.
                Batch norm's running statistics, and with local SGD the parameters, must be made
                equal before, by `exchange.sync_buffers()`.

        Returns:
            sum / count of each metric, the same on every worker.

        Raises:
            UsageError: if the metrics are not a dict of pairs of numbers, or if `shares` has
                another length than the present number of workers.
            DisagreementError: on every worker, if their models, their test sets, their micro-batch
                sizes, or the metrics' names differ.
        """
        self._comm.activity.enter("evaluation")
        _check_shares(self._given_shares, self._comm)
        if self._comm.size > 1:
            _check_same_model(self._comm, model)
            self._check_same_data()
        sums = _Sums(self._comm.device)
        with (
            preserved_random_state(self._comm.device),
            evaluating(model),
            closing(self._micro_batches()) as micro_batches,
        ):
            exchanges = [exchange for _, exchange in exchanges_of(model)]
            for exchange in exchanges:
                exchange.begin_batch(num_calls_of(exchange.model, len(self._part)))
            self._serve_others(model)
            for index, data in micro_batches:
                for exchange in exchanges:
                    exchange.begin_micro_batch()
                seed_all(derive_seed(self._seed, _COMPUTE, index), self._comm.device)
                sums.add(self._measure(model, data))
            with serving(model):
                for exchange in exchanges:
                    exchange.join_others()
        names = _agreed_names(self._comm, sums.name_sets)
        totals = sum_of_digits(self._comm.all_reduce(sums.of(names))).tolist()
        self.totals = {name: (a, b) for name, (a, b) in zip(names, totals, strict=True)}
        return {name: a / b if b else float("nan") for name, (a, b) in self.totals.items()}

    def names(self, model: nn.Module) -> list[str]:
        """The metrics' names, found by running the first micro-batch; all workers call it.

        Args:
            model: as in a measurement.

        Returns:
            The names that rank 0 found, on every worker.
        """
        self._comm.activity.enter("evaluation")
        with preserved_random_state(self._comm.device), evaluating(model):
            seed_all(derive_seed(self._seed, _COMPUTE, 0), self._comm.device)
            data = self._fetch[0, list(self._cut[0])]
            names = list(self._measure(model, data))
            for _, exchange in exchanges_of(model):
                exchange.join_others()
        found: list[str] = self._comm.broadcast_object(names)
        return found

    def _measure(self, model: nn.Module, data: Any) -> Metrics:
        found = self._metrics(model, to_device(data, self._comm.device))
        if not isinstance(found, Mapping):
            raise UsageError(
                f"`metrics` gave {found!r}; it must return a dict: the name of each metric, and its"
                " pair (sum, count)."
            )
        return found

    def _check_same_data(self) -> None:
        """Compares the test sets, at the first call only: no collective runs in `__init__`."""
        if not self._is_compared:
            comm, dataset, action = self._comm, self._dataset, "evaluate a model"
            check_same_arguments(comm, action, dataset, self._arguments)
            check_same_samples(comm, action, dataset, self._processes, self._seed)
            self._is_compared = True

    def _serve_others(self, model: nn.Module) -> None:
        """Runs this worker's experts for others that have more micro-batches."""
        if not isinstance(model, Pipeline):
            serve_others(model, len(self._part))
        elif model.keeps_in_step:
            parts = self._shares.parts(len(self._cut))
            for _ in range(max(map(len, parts)) - len(self._part)):
                model.run(())

    @property
    def _shares(self) -> Shares:
        """The shares of the present workers."""
        return self._given_shares or Shares("equal", self._comm.size)

    @property
    def _part(self) -> range:
        """The indices of this worker's micro-batches in the whole set."""
        return self._shares.parts(len(self._cut))[self._comm.rank]

    def _micro_batches(self) -> Generator[tuple[int, Any], None, None]:
        """This worker's contiguous block of micro-batches, with their index in the whole set."""
        part = self._part
        if not part:
            return
        keys = [(0, list(self._cut[index])) for index in part]
        items = self._processes.start(self._fetch, keys, seed=self._seed)
        try:
            yield from zip(part, items, strict=True)
        finally:
            items.close()


class _Sums:
    """(sum, count) of each metric so far, as digits, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.name_sets: list[list[str]] = []  # each distinct list that was seen
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: Metrics) -> None:
        """Adds one micro-batch's sums and counts."""
        names = list(metrics)
        if not any(set(names) == set(seen) for seen in self.name_sets):
            self.name_sets.append(names)
        for name, pair in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + digits_of(self._checked(name, pair))

    def of(self, names: list[str]) -> Tensor:
        """The digits [metric, 2, digits] of these metrics; zeros for those not measured here."""
        nothing = digits_of(torch.zeros(2, dtype=torch.float64, device=self._device))
        sums = [self._sums.get(name, nothing) for name in names]
        return torch.stack(sums) if sums else nothing[:0, None]

    def _checked(self, name: str, pair: Any) -> Tensor:
        try:
            given = [torch.as_tensor(x, dtype=torch.float64).detach().reshape(()) for x in pair]
            numbers: list[Tensor] = to_device(given, self._device)
        except (TypeError, ValueError, RuntimeError):
            numbers = []
        if len(numbers) != 2:
            raise UsageError(
                f"`metrics` gave {pair!r} for `{name}`; it must be a pair (sum, count) of numbers"
                " or one-element tensors."
            )
        return torch.stack(numbers)


def _check_shares(shares: Shares | None, comm: Communicator) -> None:
    if shares is not None and shares.num_workers != comm.size:
        raise UsageError(
            f"`shares` are of {shares.num_workers} workers, and `comm` is of {comm.size}: samples"
            " would be left out. Give the present `loader.shares` of the same workers, or None."
        )


def _check_same_model(comm: Communicator, model: nn.Module) -> None:
    """Raises if the workers' models differ: their results would not be those of one model."""
    for _, exchange in exchanges_of(model):
        if exchange.comm is comm:
            exchange.agree("evaluate a model")
    own = divided_prefixes(model)
    state = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not name.startswith(own) and not is_dtensor(value)
    }
    with comm.announced.call("evaluate a model"):
        agree(
            comm,
            "evaluate a model",
            tensor_checksums(state),
            cure="Call `exchange.sync_buffers()` on every worker before (for an `AveragedModel`"
            " before each of its updates), which makes batch norm's statistics equal and ends a"
            " round of local SGD; under DDP broadcast rank 0's buffers."
            " Apart from these, change models on all workers alike.",
        )


def _agreed_names(comm: Communicator, name_sets: list[list[str]]) -> list[str]:
    """The metrics' names; raises unless all workers that had samples found the same."""
    by_rank: list[list[list[str]]] = list(comm.all_gather_object(name_sets))
    given = [names for seen in by_rank for names in seen]
    names = given[0]
    if any(set(other) != set(names) for other in given):
        listed = "; ".join(
            f"rank {rank} gave {' and then '.join(_quoted(names) for names in seen)}"
            for rank, seen in enumerate(by_rank)
            if seen
        )
        raise DisagreementError(
            f"The names of `metrics` differ: {listed}. Give the same names for every micro-batch, "
            "with (0, 0) for what it has none of."
        )
    return names


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _length(dataset: Dataset[Any]) -> int:
    if not is_map_style(dataset):
        raise not_map_style(dataset)
    num_samples = len(dataset)  # type: ignore[arg-type]
    if num_samples == 0:
        raise UsageError("`dataset` is empty; give the evaluator at least one sample.")
    return num_samples


def _cut(num_samples: int, micro_batch: int) -> list[range]:
    """The samples' ranges of the micro-batches; the last may be short."""
    samples = range(num_samples)
    return [samples[start : start + micro_batch] for start in samples[::micro_batch]]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards each module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # not inference mode: its tensors clash with compiled modules and with later training
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
