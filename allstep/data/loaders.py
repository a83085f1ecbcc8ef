"""Makes the loader for any data set: the same global batches on any number of workers."""

from collections.abc import Callable
from typing import Any, Literal

from torch.utils.data import Dataset, IterableDataset

from allstep.comm import Communicator
from allstep.data.batches import BatchingOptions
from allstep.data.fetch import Collate
from allstep.data.map_loader import MapLoader
from allstep.data.processes import LoaderProcesses
from allstep.data.same_data import check_same_arguments, check_same_samples
from allstep.data.shares import Shares, SharesArgument
from allstep.data.streams import StreamLoader
from allstep.device import is_accelerator
from allstep.errors import UsageError, check_choice

_STREAMS = ("replicated", "sharded")


def loader(
    dataset: Dataset[Any],
    comm: Communicator,
    *,
    global_batch: int,
    micro_batch: int,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool = False,
    stream: Literal["replicated", "sharded"] = "replicated",
    shares: SharesArgument = "equal",
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    multiprocessing_context: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> MapLoader | StreamLoader:
    """Divides a data set into global batches, and these into workers' micro-batches. Collective.

    The order of samples is the same on all workers, seeded by (seed, epoch); it does not depend on
    which worker runs a micro-batch. Each sample is fetched with the random state of (seed, epoch,
    sample), so that random transforms draw the same on any number of workers and processes.

    Args:
        dataset: a map-style data set, or an IterableDataset (a stream). If it has `set_epoch`, or a
            data set inside torch's Subset, ConcatDataset or ChainDataset has, this is called at the
            start of each epoch, in each process that reads; apart from that, the data set must not
            change.
        comm: the workers that share the data.
        global_batch: samples of one optimizer step, over all workers.
        micro_batch: samples of one pass through the model; divides `global_batch`.
        seed: seed of all random states.
        shuffle: whether each epoch has a different order; by default True, but False for a stream,
            which has its own order.
        drop_last: skip an epoch's last incomplete global batch; with sharded streams also all
            batches after the first incomplete one.
        stream: "replicated" if every worker reads the same stream, which gives the same model
            on any number of workers; "sharded" if each reads its own part, of any length.
        shares: each worker's share of a global batch's micro-batches, which does not change the
            result: "equal"; a number for each worker, such as [3, 1] if the first is three times as
            fast; or "measured" to follow the measured seconds per micro-batch during training.
            "measured" needs CPU workers and a map-style data set.
        collate_fn: list of samples -> micro-batch; None for torch's default.
        num_workers, pin_memory, prefetch_factor, multiprocessing_context, worker_init_fn:
            as in torch.utils.data.DataLoader, for each worker.

    Returns:
        A loader for `allstep.steps`.

    Raises:
        UsageError: if an argument is out of range or contradicts another one; during training, if a
            stream yields no global batch in an epoch.
        DisagreementError: if data or arguments differ between workers.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> samples = TensorDataset(torch.arange(6))
        >>> batches = loader(
        ...     samples, Communicator.single_process(), global_batch=4, micro_batch=2, shuffle=False
        ... ).global_batches()
        >>> [[micro_batch.data for micro_batch in batch.micro_batches] for batch in batches]
        [[[tensor([0, 1])], [tensor([2, 3])]], [[tensor([4, 5])]]]
    """
    is_stream = isinstance(dataset, IterableDataset)
    numbers = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
    ways = {"shuffle": not is_stream if shuffle is None else shuffle, "drop_last": drop_last}
    kinds = {"stream": stream if is_stream else None}
    shown = {**numbers, **ways, **kinds, "shares": shares}
    check_same_arguments(comm, "make a loader", dataset, shown)
    cut = Shares(shares, comm.size)
    processes = LoaderProcesses(
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=multiprocessing_context,
        worker_init_fn=worker_init_fn,
    )
    check_choice("stream", stream, _STREAMS)
    for name, way in ways.items():
        if not isinstance(way, bool):
            raise UsageError(f"`{name}` (={way!r}) must be True or False.")
    if cut.is_measured and is_accelerator(comm.device):
        raise UsageError(
            f"`shares` (='measured') measures by the host's clock, which on {comm.device.type} does"
            " not tell how long a micro-batch takes. Give numbers, such as [3, 1]."
        )
    options = BatchingOptions(
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        drop_last=drop_last,
        shares=cut,
        collate_fn=collate_fn,
        processes=processes,
    )
    if not isinstance(dataset, IterableDataset):
        made = MapLoader(dataset, comm, options, shuffle=shuffle is None or shuffle)
        check_same_samples(comm, "make a loader", dataset, processes, seed, tells_epoch=True)
        return made
    if cut.is_measured:
        raise UsageError(
            "`shares` (='measured') needs a map-style `dataset`: a stream would have to be read"
            " again from its start. Give numbers, such as [3, 1]."
        )
    if shuffle:
        raise UsageError(
            "`shuffle` (=True) needs a map-style `dataset`; shuffle inside the stream instead."
        )
    return StreamLoader(dataset, comm, options, is_sharded=stream == "sharded")
