"""Checks that all workers read the same data, before they train or measure on it.

Workers that divide different data sets, or one data set in different ways, would train on some
samples twice and on others never. So they compare the arguments and the contents of the first
samples when they make a loader. If samples differ, they are read again: a sample that a worker
reads differently the second time, such as with a random generator of its own, proves nothing.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from allstep.comm import Communicator
from allstep.comm.agreement import agree, digest, digest_bytes
from allstep.data.fetch import (
    RANDOM_STATE_LOCK,
    begin_epoch,
    fetch_sample,
    is_map_style,
    tensors_of,
)
from allstep.data.processes import LoaderProcesses
from allstep.data.random import preserved_random_state
from allstep.errors import check_type

_NUM_SAMPLES = 2
_CURE = "Give all workers the same data set, in the same order, and the same arguments."


def check_same_arguments(
    comm: Communicator, action: str, dataset: Dataset[Any] | None, arguments: Mapping[str, object]
) -> None:
    """Checks that all workers have data sets of the same length and the same arguments. Collective.

    The length of a stream is not compared.

    Raises:
        UsageError: if `comm` is something else.
        DisagreementError: if they don't; the message names the arguments that differ, their values
            and the ranks.
    """
    check_type("comm", comm, Communicator, "that of `allstep.init()`")
    if comm.size > 1:
        length = len(dataset) if is_map_style(dataset) else "not known"  # type: ignore[arg-type]
        details = [("len(dataset)", length), *((name, repr(x)) for name, x in arguments.items())]
        with comm.announced.call(action):
            agree(comm, action, details, cure=_CURE)


def check_same_samples(
    comm: Communicator,
    action: str,
    dataset: Dataset[Any],
    processes: LoaderProcesses,
    seed: int,
    *,
    tells_epoch: bool = False,
) -> None:
    """Checks that the first samples are the same on all workers. Collective.

    A stream's samples can be read only once: its loader compares them when it reads them. Others
    are read in a loader process if there are any, as a data set may open files that only that
    process can use.

    Args:
        comm: the workers.
        action: what they are about to do, for error messages.
        dataset: this worker's data set.
        processes: settings of the processes that read it.
        seed: seed of the samples' random states.
        tells_epoch: whether `set_epoch` of the data set is called for the first epoch.

    Raises:
        DisagreementError: if samples differ; the message names them and the ranks. A worker that
            can't read a sample raises the data set's own error instead.
    """
    if comm.size == 1 or not is_map_style(dataset):
        return
    contents = _Contents(dataset, seed, tells_epoch)
    first, error = _read(contents, processes)
    if error is None and len(set(agree(comm, action, told=digest_bytes(first)))) == 1:
        return
    again = first if error is not None else _read(contents, processes)[0]
    details = _read_twice(first, again)
    try:
        if error is not None:
            agree(comm, action, told=digest_bytes(first))  # in step with the other workers
        agree(comm, action, details, cure=_CURE)
    finally:
        if error is not None:
            raise error


def first_samples(
    dataset: Dataset[Any], processes: LoaderProcesses, seed: int, *, tells_epoch: bool
) -> list[tuple[str, str]]:
    """This worker's samples as `check_same_samples` compares them; [] for a stream.

    An exception of the data set is raised.
    """
    if not is_map_style(dataset):
        return []
    found, error = _read(_Contents(dataset, seed, tells_epoch), processes, num_times=2)
    if error is not None:
        raise error
    return _read_twice(found[: len(found) // 2], found[len(found) // 2 :])


def _read_twice(
    first: Sequence[tuple[str, str]], again: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    return [
        (name, content if content == second else "different each time")
        for (name, content), (_, second) in zip(first, again, strict=False)
    ]


def _read(
    contents: "_Contents", processes: LoaderProcesses, num_times: int = 1
) -> tuple[list[tuple[str, str]], Exception | None]:
    """A description of the content of each of the first samples; and an error if there was one."""
    in_memory = tensors_of(contents.dataset) is not None
    one = LoaderProcesses() if in_memory else processes.single()
    indices = [*range(min(_NUM_SAMPLES, len(contents)))] * num_times
    found: list[tuple[str, str]] = []
    items = one.start(contents, indices, seed=contents.seed)
    try:
        for index, content in zip(indices, items, strict=True):
            found.append((f"dataset[{index}]", f"content {content % (1 << 28):07x}"))
    except Exception as error:
        found.append((f"dataset[{indices[len(found)]}]", f"not readable ({type(error).__name__})"))
        return found, error
    finally:
        items.close()
    return found, None


class _Contents(Dataset[int]):
    """A data set of hashes of the samples' contents in the first epoch."""

    def __init__(self, dataset: Dataset[Any], seed: int, tells_epoch: bool) -> None:
        self.dataset, self.seed = dataset, seed
        self._must_tell_epoch = tells_epoch

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> int:
        if get_worker_info() is not None:
            return self._read(index)
        with RANDOM_STATE_LOCK, preserved_random_state():
            return self._read(index)

    def _read(self, index: int) -> int:
        if self._must_tell_epoch:
            begin_epoch(self.dataset, self.seed, 0)
            self._must_tell_epoch = False
        return content_of(fetch_sample(self.dataset, self.seed, 0, index))


def content_of(sample: object) -> int:
    """A hash of a sample's content."""
    return digest(_plain(sample))


def _plain(value: Any) -> Any:
    """A sample's content as plain data; of objects of unknown types only the type.

    >>> _plain({"x": (1, 2.5), "y": object()})
    [("'x'", ['1', '2.5']), ("'y'", 'object')]
    """
    if isinstance(value, Tensor) and value.layout == torch.strided:
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return str(value.dtype), tuple(value.shape), _hash(plain.tobytes())
    if isinstance(value, Mapping):
        return [(repr(key), _plain(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, np.generic) or hasattr(value, "__array_interface__"):  # such as PIL's
        array = np.asarray(value)
        if not array.dtype.hasobject:
            return str(array.dtype), array.shape, _hash(array.tobytes())
    return type(value).__name__


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
