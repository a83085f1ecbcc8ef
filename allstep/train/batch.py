"""One worker's part of a global batch: its micro-batches, their losses and their gradients."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.data import GlobalBatch, MicroBatch
from allstep.data.random import derive_seed, seed_all
from allstep.device import drawn_seed, is_accelerator
from allstep.errors import UsageError
from allstep.exchange import Exchange
from allstep.exchange.optimizer_watch import attached_here
from allstep.exchange.stragglers import WorkerTimes
from allstep.nn import Chain, Pipeline, num_calls_of, serve_others, serving
from allstep.train.devices import to_device
from allstep.train.elastic import LOST
from allstep.train.elastic_loop import Elastic
from allstep.train.gradient_guard import GradientGuard
from allstep.train.losses import Losses, mean_of

# Keep random numbers apart from those that the data room derives from the same seed: of dropout and
# its like, and of optimizers that draw some in a step.
_COMPUTE, _UPDATE = 0x636F6D70757465, 0x757064617465

_MOST_PASSES = 4  # backward passes through a model in a micro-batch, where there are several


def seed_update(seed: int, step: int, device: torch.device, num_passes: int = 0) -> None:
    """Sets the random state of a step's update, whichever micro-batches this worker has run."""
    seed_all(derive_seed(seed, _UPDATE, step, num_passes), device)


class Batch:
    """This worker's part of one global batch; made by `steps`.

    Attributes:
        step: optimizer steps before this one.
        epoch: passes over the data before this one.
        num_samples: samples of the whole global batch, over all workers.
        micro_batch: the micro-batch that is being processed, or None outside of the loop.
        data_wait_s: seconds spent waiting for data so far.
        attempt: how often the loop over its micro-batches was begun before and repeated because a
            worker was lost; always 0 without `elastic`. Reset your own sums when it is positive.
    """

    def __init__(
        self,
        batch: GlobalBatch,
        exchanges: tuple[Exchange, ...],
        *,
        seed: int,
        replay: bool,
        elastic: Elastic | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.attempt = 0
        self._elastic = elastic
        self._lost: BaseException | None = None  # the error that told of a lost worker in this pass
        self._sums: Tensor | None = None  # of all workers' losses and weights, with `elastic`
        self.step = batch.step
        self.epoch = batch.epoch
        self.num_samples = batch.num_samples
        self.micro_batch: MicroBatch | None = None
        self.data_wait_s = 0.0
        self._compute_s = self._exchange_wait_s = 0.0
        self._num_run = 0
        self._clock = clock
        self._part = batch  # as the present workers divide it
        self._kept: list[MicroBatch] | None = [] if replay else None
        self._exchanges = exchanges
        self._device = exchanges[0].comm.device
        self._activity = exchanges[0].comm.activity
        self._seed = seed
        self._num_passes = 0
        self._exchanged = False
        self._is_open = self._is_over = False
        self._losses = Losses(exchanges, batch.num_samples)
        self._gradients = GradientGuard(exchanges)

    def __iter__(self) -> Iterator[Any]:
        """This worker's micro-batches on its device, each with its random state set."""
        if self._is_over:
            raise UsageError(
                f"Global batch {self.step} was iterated after the next one had been asked for, as"
                " by `list(steps(...))` or a loop that reads ahead, which throws its micro-batches"
                " away. Take one batch at a time; Lightning reads none ahead where what it iterates"
                " has a length."
            )
        if self._num_passes and self._kept is None:
            raise UsageError(
                "A batch was iterated twice; `steps(…, replay=True)` keeps it for that."
            )
        self._is_open = True
        yield from self._pass() if self._elastic is None else self._passes(self._elastic)
        self._activity.enter("optimizer")
        seed_update(self._seed, self.step, self._device, self._num_passes)
        self._num_passes += 1
        self._is_open = False

    def _passes(self, elastic: Elastic) -> Iterator[Any]:
        """Repeats the micro-batches until no worker is lost meanwhile. [Note: elastic loops]"""
        while self._sums is None:
            try:
                self._part = elastic.begin_pass() or self._part
                yield from self._pass()
                self._sums = elastic.commit(self._losses.local_sums(self._device))
            except LOST:
                self._sums = elastic.lose_workers()
                self.micro_batch, self._lost = None, None
                self.attempt += self._sums is None

    def _pass(self) -> Iterator[Any]:
        """This worker's micro-batches, with the exchange at their end."""
        self._exchanged = False
        self._losses.begin_pass()
        samples = f"{self.num_samples} samples after {self._part.position} others"
        num_passes = 1 if len(self._exchanges) == 1 else _MOST_PASSES
        others = [other for other in attached_here() if other not in self._exchanges]
        together = (
            exchange.global_batch(
                self.step,
                samples,
                num_micro_batches=self._part.num_micro_batches,
                num_passes=num_passes,
                sum_factor=self._losses.sum_factor,
            )
            for exchange in self._exchanges
        )
        with _all((*(other.left_out() for other in others), *together)):
            totals = [(exchange.statistics, exchange.total_weight) for exchange in self._exchanges]
            with _all(statistics.step(total) for statistics, total in totals):
                self._gradients.note_earlier()
                for exchange in self._exchanges:
                    num_calls = num_calls_of(exchange.model, self._part.num_local_micro_batches)
                    exchange.begin_batch(num_calls)
                self._serve_others()
                self._gradients.begin()
                for micro_batch in self._fetch():
                    with self._running(micro_batch), self._timing():
                        yield micro_batch.data
                        if self._lost is not None:
                            raise self._lost
                        self._gradients.check(self.step)
                        self._losses.end_micro_batch()
                    self.micro_batch = None
                if not self._exchanged:
                    self._gradients.check(self.step)
                    for exchange in self._exchanges:
                        if exchange.is_fully_sharded:
                            with serving(exchange.model):
                                exchange.join_others()
                    self._synchronize()
            self._gradients.end(self.step)

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        scaler: torch.amp.GradScaler | None = None,
        exchange: bool = True,
    ) -> None:
        """Adds this micro-batch's share of the global gradient; exchanges on the last.

            grad = sum_k num_samples_k / num_samples * grad_k        without `weight`
            grad = sum_k grad_k / sum_k weight_k                     with it

        Args:
            loss: scalar; the mean over the micro-batch's samples, or with `weight` the sum over
                its tokens, frames or boxes.
            weight: number of these tokens, frames or boxes, 0 or more; given for every micro-batch
                of the global batch or for none. A tensor on a GPU makes the host wait. If all
                weights are 0 the gradient is NaN, as the mean over nothing.
            scaler: multiplies the gradient by its scale. `scaler.scale(loss)` does so, too, but
                then `global_loss` is the mean of scaled losses.
            exchange: False delays the exchange to the end of the loop over the batch, so that
                gradients can be read before it, by `exchange.local_gradients()`, or changed in
                `p.grad`; exact sums refuse a change.

        Raises:
            UsageError: outside of the loop over the batch; for a second loss of the last
                micro-batch with a single exchange, or of any micro-batch with `weight`; if only
                some micro-batches have a weight: on the worker that has both, or on all workers.
        """
        micro_batch = self.micro_batch
        if micro_batch is None:
            raise UsageError("`backward` belongs inside the loop over the batch's micro-batches.")
        if self._lost is not None:  # all micro-batches will be run again
            return
        if self._exchanged:
            raise UsageError(
                "`backward` was called twice for the last micro-batch: its gradients have been"
                " exchanged. Add the losses and call it once."
            )
        self._gradients.check(self.step)
        self._activity.enter("backward")
        factor = self._take(loss, weight)
        loss = loss if scaler is None else scaler.scale(loss)
        loss = loss if factor == 1 else loss * factor
        if exchange and micro_batch.is_last and self._exchanges_in_backward:
            self._backward_and_exchange(loss)
        else:
            with _all(each.no_sync() for each in self._exchanges):
                loss.backward()  # type: ignore[no-untyped-call]
        if exchange or any(each.is_exact for each in self._exchanges):
            self._gradients.note()
        else:
            self._gradients.forget()

    def run(
        self,
        model: Pipeline,
        prepare: Callable[[Any], Any] = lambda data: data,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Runs forward and backward of all micro-batches in a pipeline, in place of the loop.

        Args:
            model: the model that the exchange is attached to.
            prepare: micro-batch -> input of the pipeline.
            scaler: multiplies the gradients by its scale, as if each loss were scaled.

        Raises:
            UsageError: if there are several exchanges, or one that is attached to another model.
        """
        exchange = self._exchanges[0]
        if len(self._exchanges) > 1 or exchange.model is not model:
            raise UsageError("`model` is not what `steps` has the one exchange of: attach it.")
        data, seeds, factors, losses = [], [], [], []
        scale = 1.0 if scaler is None else scaler.get_scale()
        for read in self:
            each = prepare(read)
            weight = None if model.weight is None else model.weight(each)
            data.append(each)
            seeds.append(drawn_seed())
            losses.append(torch.zeros((), dtype=torch.float64, device=self._device))
            factors.append(scale * self._take(losses[-1], weight))
            assert self.micro_batch is not None
            if self.micro_batch.is_last:
                with exchange.no_sync():
                    found = model.run(
                        data,
                        seeds=seeds,
                        factors=factors,
                        begin_backward=exchange.begin_micro_batch,
                    )
                for loss, value in zip(losses, found, strict=True):
                    loss.copy_(value)  # `_take` was given the tensor before its value was known
                self._gradients.note()

    def global_loss(self) -> float:
        """The mean loss over the global batch, the same on every worker. Collective.

        Use it for a log, `ReduceLROnPlateau` or the closure of LBFGS. The losses that `backward`
        was given are weighed as their gradients are (sums are divided by the sum of weights), also
        those that the workers of a chain's parts were given. For arrays that are divided in windows
        it is the loss of the windows at this worker's place in the grid. Call it after the loop
        over the batch, on every worker.

        Raises:
            UsageError: inside the loop over the batch, of which workers have different numbers of
                micro-batches.
        """
        if self.micro_batch is not None:
            raise UsageError(
                f"`global_loss` was called in the loop over global batch {self.step}'s"
                " micro-batches, of which workers have different numbers. Call it when that loop"
                " has ended, on every worker."
            )
        sums = self._sums
        if sums is None:
            sums = self._exchanges[0].comm.all_reduce(self._losses.local_sums(self._device))
            for workers in self._workers_of_chains():
                sums[0] = workers.all_reduce(sums[0])
        return mean_of(sums)

    def _workers_of_chains(self) -> Iterable[Communicator]:
        """The workers along the axes of the models' chains, some of whom have no loss."""
        divided = (x.model for x in self._exchanges if x.workers_with_other_parts)
        chains = (m for model in divided for m in model.modules() if isinstance(m, Chain))
        return dict.fromkeys(chain.parts.comm for chain in chains)

    def local_sums(self) -> Tensor:
        """Digits of this worker's part of the losses and of their weights, [2, digits].

        Weighed as in `global_loss`; losses that are means have no weights.
        """
        return self._losses.local_sums(self._device)[:2]

    def check_finished(self) -> None:
        """Raises if the loop over the micro-batches was left early; closes the batch."""
        self._is_over = True
        if self._is_open:
            raise UsageError(
                f"The loop over global batch {self.step} was left before its last micro-batch,"
                " so that its gradients were never exchanged. Iterate it to the end."
            )

    @property
    def gradient_share(self) -> float:
        """The factor of the micro-batch's mean gradient in `p.grad` before the exchange."""
        assert self.micro_batch is not None
        return self._losses.gradient_share

    def _take(self, loss: Tensor, weight: float | Tensor | None) -> float:
        """Adds the micro-batch's loss to the sums; returns the factor of its gradients."""
        if weight is not None and self._losses.is_kind_open:
            self._gradients.refuse_earlier(self.step)
        return self._losses.add(loss, None if weight is None else float(weight))

    def _backward_and_exchange(self, loss: Tensor) -> None:
        exchange = self._exchanges[0]
        num_before = exchange.num_exchanges
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            if exchange.num_exchanges == num_before:  # no parameter of the model was in this graph
                exchange.synchronize()
        except LOST as error:
            if self._elastic is None:
                raise
            self._lost = error  # raised by the loop over the batch, not in the user's code
        self._exchanged = True

    @property
    def _exchanges_in_backward(self) -> bool:
        """Whether the last micro-batch's backward pass can end with the exchange."""
        return len(self._exchanges) == 1 and not self._exchanges[0].is_fully_sharded

    def _serve_others(self) -> None:
        """Runs this worker's experts for others that have more micro-batches."""
        for exchange in self._exchanges:
            model, num = exchange.model, self._part.num_local_micro_batches
            begin = exchange.begin_micro_batch
            if isinstance(model, Pipeline):
                if model.keeps_in_step and not num:
                    with exchange.no_sync():
                        model.run((), begin_backward=begin)
            elif exchange.is_divided:
                with exchange.no_sync():
                    serve_others(model, num, begin)

    def _synchronize(self) -> None:
        for exchange in self._exchanges:
            exchange.synchronize()
        self._exchanged = True

    def _fetch(self) -> Iterator[MicroBatch]:
        """The micro-batches in order, timed; kept for another pass if `replay` is set."""
        if self._num_passes and self._kept is not None:
            yield from self._kept
            return
        source = iter(self._part.micro_batches)
        while True:
            self._activity.enter("data", self.step)
            start_s = self._clock()
            micro_batch = next(source, None)
            self.data_wait_s += self._clock() - start_s
            if micro_batch is None:
                return
            if is_accelerator(self._device):
                data = to_device(micro_batch.data, self._device)
                micro_batch = replace(micro_batch, data=data)
            if self._kept is not None:
                self._kept.append(micro_batch)
            self._activity.enter("forward")
            yield micro_batch

    @property
    def times(self) -> WorkerTimes:
        """This worker's time so far, by what it was spent on."""
        return WorkerTimes(self.data_wait_s, self._compute_s, self._exchange_wait_s, self._num_run)

    @contextmanager
    def _timing(self) -> Iterator[None]:
        """Times one micro-batch; waiting for the exchange does not count as compute."""
        start_s, waited_s = self._clock(), self._waited_s
        yield
        wait_s = self._waited_s - waited_s
        self._exchange_wait_s += wait_s
        self._compute_s += max(0.0, self._clock() - start_s - wait_s)
        self._num_run += 1

    @property
    def _waited_s(self) -> float:
        if self._clock is not time.perf_counter:
            return 0.0  # the exchange knows no other
        return sum(exchange.stats().exposed_s for exchange in self._exchanges)

    def _running(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Sets what a micro-batch depends on: its random state and its share of the statistics."""
        self.micro_batch = micro_batch
        self._losses.begin_micro_batch(micro_batch.num_samples)
        parts = (self._seed, _COMPUTE, self.step, micro_batch.index, self._num_passes)
        seed_all(derive_seed(*parts), self._device)
        for exchange in self._exchanges:
            exchange.begin_micro_batch()
        share = self._losses.statistics_share
        return _all(exchange.statistics.micro_batch(share) for exchange in self._exchanges)


def _all(contexts: Iterable[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """One context that enters all of them; a single one is returned as it is, for speed."""
    first, *others = contexts
    if not others:
        return first
    stack = ExitStack()
    for context in (first, *others):
        stack.enter_context(context)
    return stack
