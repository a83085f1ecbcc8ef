"""A user's own training loop over global batches, the same on any number of workers."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import nn

from allstep.data import GlobalBatch, MapLoader
from allstep.data.batches import GlobalBatchLoader
from allstep.data.random import derive_seed, preserved_random_state, seed_all
from allstep.data.shares import Shares
from allstep.device import is_accelerator
from allstep.errors import UsageError
from allstep.exchange import Exchange
from allstep.exchange.stragglers import COMPUTE_CURE
from allstep.nn import GroupedBatchNorm, Pipeline
from allstep.train.auto_checkpoint import AutoCheckpoint
from allstep.train.batch import Batch
from allstep.train.elastic_loop import Elastic
from allstep.train.loop_state import check_exchanges

_BEGIN = 0x626567696E  # keeps random numbers apart, of what comes before the micro-batches


class Loader(Protocol):
    """What `steps` needs of a loader; `allstep.data.loader` makes them."""

    @property
    def seed(self) -> int: ...

    def global_batches(self) -> Iterator[GlobalBatch]: ...


def steps(
    loader: Loader,
    *exchanges: Exchange,
    replay: bool = False,
    checkpoint: AutoCheckpoint | None = None,
    elastic: Elastic | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Batch]:
    """The epoch's remaining global batches, one item each.

    Iterating an item yields this worker's micro-batches, each with its random state set;
    `item.backward(loss)` weighs the micro-batch's mean loss by its samples (or, given
    `weight=`, a sum by that), so that `p.grad` finally is the gradient of the mean over the
    global batch,

        grad = sum_k num_samples_k / num_samples * grad_k

    whichever worker ran micro-batch k. A worker may have several micro-batches, or none.
    Before and after the loop over an item the random state is set from the seed and the step, so
    that an optimizer that draws noise makes the same update on all workers, on any number of them
    and in a resumed run. When `steps` ends, or is left, the earlier random state is restored.
    At the end of the epoch batch norm's running statistics are made equal on all workers.

    Args:
        loader: from `allstep.data.loader`.
        exchanges: from `allstep.attach`, one for each model. A single one overlaps with the last
            micro-batch's backward pass; several run after the last micro-batch, in the given
            order, and `backward` may be called several times.
        replay: keep this worker's part of a global batch, so that it can be iterated again
            (a second pass draws other random numbers).
        checkpoint: an `AutoCheckpoint` that saves the loop's state after some of the steps, and
            ends the loop early, after a whole step, when a signal has come.
        elastic: an `Elastic` that lets the others continue when a worker is lost, and others join.
            The loop over an item may then begin again, from its first micro-batch.
        clock: returns the time in seconds, for measured shares and to find slow workers.

    Yields:
        A `Batch` for each global batch.

    Raises:
        UsageError: if an exchange is missing or something else is given, if the loader has no
            global batches, if a pipeline can't take the loader's micro-batches, or is elastic, if
            a model on several workers has a `SyncBatchNorm`, if `checkpoint` or `elastic` is not
            entered, not in `epochs`, or was made for another loader or exchange, if it is missing
            in its `epochs`, if `elastic` is given with `replay` or `checkpoint`, or if there are
            several exchanges and a model has experts on several workers.

    Example:
        >>> import torch, allstep
        >>> from torch.utils.data import TensorDataset
        >>> comm = allstep.Communicator.single_process()
        >>> model = torch.nn.Linear(3, 1)
        >>> exchange = allstep.attach(model, comm)
        >>> samples = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
        >>> loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for batch in allstep.steps(loader, exchange):
        ...     for x, y in batch:
        ...         batch.backward(torch.nn.functional.mse_loss(model(x), y))
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> loader.step
        3
    """
    check_exchanges(exchanges)
    if not hasattr(loader, "global_batches"):
        raise UsageError(
            f"`loader` (a {type(loader).__name__}) can't be cut in global batches;"
            " make it with `allstep.data.loader`."
        )
    kept_by = getattr(loader, "kept_by", "")
    if kept_by and checkpoint is None and elastic is None:
        raise UsageError(
            f"`steps` is in a loop over `{kept_by}.epochs` and was not given `{kept_by}`, which"
            f" would not hear of its steps: write `steps(loader, ..., {kept_by}={kept_by})`."
        )
    for exchange in exchanges:
        _refuse_synchronized_norms(exchange)
        if isinstance(exchange.model, Pipeline):
            _check_pipeline(exchange.model, loader)
        if exchange.averaging is not None:
            _check_local_batches(exchange, loader)
    shares = getattr(loader, "shares", None)
    if shares is not None and not shares.is_equal:
        for exchange in exchanges:
            _refuse_shares(shares, exchange)
    if len(exchanges) > 1 and any(exchange.is_divided for exchange in exchanges):
        raise UsageError(
            f"`exchanges` are {len(exchanges)}, and a model has experts on several workers, which"
            " all must call it in the same order: put the models in one `torch.nn.ModuleList` and"
            " attach that."
        )
    if elastic is not None and (replay or checkpoint is not None):
        raise UsageError(
            "`elastic` goes without `replay`, whose second pass would be no part of the step that"
            " is run again, and without `checkpoint`, which talks to workers between two steps:"
            " give `allstep.Elastic` the `run_dir`."
        )
    return _steps(loader, exchanges, replay, checkpoint, elastic, clock)


def _refuse_synchronized_norms(exchange: Exchange) -> None:
    """Refuses `SyncBatchNorm`: its statistics would span as many micro-batches as workers."""
    for name, module in exchange.model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and exchange.comm.size > 1:
            raise UsageError(
                f"`model`: `{name}` is a SyncBatchNorm, which normalises over the micro-batches of"
                f" all {exchange.comm.size} workers at once: the model would depend on their"
                " number, and a worker with one micro-batch more would wait for the others. Use"
                " torch's BatchNorm, or `allstep.nn.convert_batch_norm` for groups of samples."
            )


def _check_pipeline(model: Pipeline, loader: Loader) -> None:
    """Checks that a pipeline's workers have equal micro-batches, as many as its schedule takes."""
    if model.num_workers == 1 or not isinstance(loader, GlobalBatchLoader):
        return
    if loader.shares.is_measured:
        raise UsageError(
            "`shares` (='measured') would cut a global batch otherwise on each of the workers of a"
            " pipeline; give numbers, or leave them equal."
        )
    fewest = min(map(len, loader.shares.parts(loader.num_micro_batches)))
    if fewest < model.fewest_micro_batches:
        raise UsageError(
            f"`loader` cuts a global batch in {loader.num_micro_batches} micro-batches, of which a"
            f" pipeline gets {fewest}, and `schedule` (='1f1b') takes at least"
            f" {model.fewest_micro_batches}: use a smaller `micro_batch`, or 'gpipe'."
        )


def _check_local_batches(exchange: Exchange, loader: Loader) -> None:
    """Checks that each worker of local SGD has at least one micro-batch."""
    size = exchange.comm.size
    if isinstance(loader, GlobalBatchLoader) and loader.num_micro_batches < size:
        raise UsageError(
            f"`loader` cuts a global batch in {loader.num_micro_batches} micro-batches, and of"
            f" `LocalSGD` each of the {size} workers takes one at least: who has none would bring"
            " parameters that it has not trained to each mean. Use a smaller `micro_batch`, or"
            " fewer workers."
        )


def _refuse_shares(shares: Shares, exchange: Exchange) -> None:
    if exchange.averaging is not None:
        raise UsageError(
            f"`shares` (={shares.how!r}) would have a worker with more micro-batches count for more"
            " in a local step; leave them equal with `LocalSGD`."
        )
    has_one_each = all(len(part) == 1 for part in shares.parts(exchange.comm.size))
    modules = exchange.model.modules()
    if not has_one_each and any(isinstance(m, GroupedBatchNorm) and m.has_peers for m in modules):
        raise UsageError(
            f"`shares` (={shares.how!r}) don't leave each worker one micro-batch, which batch norm"
            " over several workers' micro-batches needs; leave them equal, or convert the model"
            " with a `group_size` of one micro-batch."
        )


def _steps(
    loader: Loader,
    exchanges: tuple[Exchange, ...],
    replay: bool,
    checkpoint: AutoCheckpoint | None,
    elastic: Elastic | None,
    clock: Callable[[], float],
) -> Iterator[Batch]:
    device, activity = exchanges[0].comm.device, exchanges[0].comm.activity
    keeper = checkpoint or elastic  # of the position; not both are given
    is_over = keeper is not None and not keeper.begin_steps(loader, exchanges)
    source = elastic or loader
    exchanges[0].stragglers.compute_cure = _cure_by_shares(loader, exchanges[0]) or COMPUTE_CURE
    with preserved_random_state(device):
        for global_batch in () if is_over else source.global_batches():
            batch = Batch(
                global_batch,
                exchanges,
                seed=loader.seed,
                replay=replay,
                elastic=elastic,
                clock=clock,
            )
            seed_all(derive_seed(loader.seed, _BEGIN, batch.step), device)
            try:
                yield batch
                batch.check_finished()
                times = exchanges[0].stragglers.own_times = batch.times
                activity.note_times(times.data_s, times.compute_s, times.wait_s)
                _follow_shares(loader, exchanges[0])
                if keeper is not None and keeper.after_step():
                    break
            finally:
                for exchange in exchanges:
                    exchange.awaits_update, exchange.batch.unfinished = False, None
    for exchange in exchanges:
        if elastic is None:
            exchange.sync_buffers()
        else:
            exchange.statistics.settle()
    if keeper is not None:
        keeper.end_steps()


def _cure_by_shares(loader: Loader, exchange: Exchange) -> str | None:
    """The advice for a worker that computes slowly, if others could take its micro-batches."""
    if not isinstance(loader, GlobalBatchLoader) or not loader.shares.is_equal:
        return None  # shares are set already
    if isinstance(exchange.model, Pipeline):
        return None
    if exchange.averaging is not None or loader.num_micro_batches <= exchange.comm.size:
        return None
    if isinstance(loader, MapLoader) and not is_accelerator(exchange.comm.device):
        return 'try `shares="measured"`'
    return "try `shares`, such as [3, 1]"


def _follow_shares(loader: Loader, exchange: Exchange) -> None:
    """Divides the next global batches by the times that workers reported of their last one."""
    shares = getattr(loader, "shares", None)
    if shares is None or not shares.is_measured or not isinstance(loader, GlobalBatchLoader):
        return
    worker_times = exchange.stragglers.worker_times
    has_moved = loader.follow_shares([times.micro_batch_s for times in worker_times])
    if has_moved and exchange.comm.rank == 0:
        words = shares.in_words(loader.num_micro_batches) or "all workers are as fast again"
        logging.getLogger("allstep").info(f"shares from step {loader.step} on: {words}")
