"""Streams, events, memory and random states of a device; only this module names kinds of device.

Everything goes through torch's generic interface, so that CUDA, ROCm, XPU and later kinds share
one code path. A test passes another `Driver`, whose streams are only names, and thus finds on a
CPU what would be a race or a hidden wait on an accelerator.

[Note: accelerator] Every device but a CPU counts as an accelerator: its kernels run later than
they are called, so that the host must not read values. So does "meta", which has no values at all.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, sleep
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

# What to do, for error messages.
HIDE_ACCELERATORS = "hide the GPUs: CUDA_VISIBLE_DEVICES= before the command"

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 2e-3  # between two queries of an event


class Event(Protocol):
    """A point in a stream's sequence of work."""

    def query(self) -> bool:
        """Whether the device has reached this point."""


class Stream(Protocol):
    """A device's queue of work; the current stream inside `with`."""

    def wait_stream(self, stream: Any) -> None:
        """Makes later work here wait for all work that `stream` has been given so far."""

    def wait_event(self, event: Any) -> None:
        """Makes later work here wait for the event."""

    def record_event(self) -> Event:
        """An event after all the work that this stream has been given so far."""

    def synchronize(self) -> None:
        """Makes the host wait for all work of this stream."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Driver:
    """All calls that concern an accelerator; this class passes them to torch."""

    def __init__(self) -> None:
        self._copy_streams: dict[torch.device, Stream] = {}

    def is_accelerator(self, device: torch.device) -> bool:
        """Whether the device's kernels run later than they are called. [Note: accelerator]"""
        return device.type != "cpu"

    def has_streams(self, device: torch.device) -> bool:
        """Whether the device has streams that one can wait for."""
        return device.type not in ("cpu", "meta")

    def default(self) -> torch.device:
        """This machine's accelerator, without an index; the CPU if it has none.

        No backend of torch has collectives for "mps": on such a machine workers use the CPU.
        """
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu" if found is None or found.type == "mps" else found.type)

    def count(self) -> int:
        """Number of accelerators that this process sees."""
        return 0 if self.default().type == "cpu" else torch.accelerator.device_count()

    def current(self, kind: str) -> torch.device:
        """The current device of a kind: where torch puts a tensor if no index is given."""
        return torch.device(kind, torch.accelerator.current_device_index())

    def set_current(self, device: torch.device) -> None:
        """Makes `device` the process's current one."""
        torch.accelerator.set_device_index(device)

    def identity(self, device: torch.device) -> str:
        """An id that no other device has, on other machines either; empty if unknown."""
        module = torch.get_device_module(device)
        properties = module.get_device_properties(_index(self, device))
        return str(getattr(properties, "uuid", ""))

    def current_stream(self, device: torch.device) -> Stream:
        """The stream on which work that is called now is queued."""
        return cast(Stream, torch.accelerator.current_stream(device))

    def new_stream(self, device: torch.device, *, is_urgent: bool) -> Stream:
        """A new stream; the kernels of an urgent one run before those waiting in others."""
        return cast(Stream, torch.Stream(device, priority=-1 if is_urgent else 0))

    def copy_stream(self, device: torch.device) -> Stream:
        """The device's one stream for copies from the host."""
        if device not in self._copy_streams:
            self._copy_streams[device] = self.new_stream(device, is_urgent=False)
        return self._copy_streams[device]

    def synchronize(self, device: torch.device) -> None:
        """Makes the host wait for all streams of the device."""
        torch.accelerator.synchronize(device)

    def wait_until(self, event: Event, timeout_s: float) -> bool:
        """Makes the host wait for an event; False if the device has not reached it in time.

        torch's own wait for an event would never end where another worker is missing.
        """
        deadline_s = perf_counter() + timeout_s
        pause_s = _LEAST_PAUSE_S
        while not event.query():
            if perf_counter() > deadline_s:
                return False
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keeps the tensor's memory from being reused before `stream` is done with it."""
        tensor.record_stream(cast(torch.Stream, stream))

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the device's current stream is being captured as a graph."""
        ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def new_pinned(self, like: Tensor) -> Tensor:
        """Pinned host memory with the shape and dtype of `like`."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def new_future(self, device: torch.device) -> torch.futures.Future[Tensor]:
        """A future of a tensor there; waiting for it waits for the stream that completed it."""
        return torch.futures.Future(devices=[device])

    def seed(self, device: torch.device, seed: int) -> None:
        """Sets the device's random state."""
        with torch.accelerator.device_index(_index(self, device)):
            torch.get_device_module(device).manual_seed(seed)

    def preserved_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        """Restores the device's random state on exit."""
        numbered = torch.device(device.type, _index(self, device))
        return torch.random.fork_rng([numbered], device_type=device.type)


_driver = Driver()


@contextmanager
def using_driver(driver: Driver) -> Iterator[None]:
    """Uses another driver inside, in all threads; for tests."""
    global _driver
    kept, _driver = _driver, driver
    try:
        yield
    finally:
        _driver = kept


def is_accelerator(device: torch.device) -> bool:
    """Whether the device's kernels run later than they are called. [Note: accelerator]

    >>> is_accelerator(torch.device("cpu")), is_accelerator(torch.device("meta"))
    (False, True)
    """
    return _driver.is_accelerator(device)


def has_streams(device: torch.device) -> bool:
    """Whether the device has streams that one can wait for; "meta" and a CPU have none."""
    return _driver.has_streams(device)


def default_device() -> torch.device:
    """This machine's accelerator, without an index; the CPU if it has none."""
    return _driver.default()


def num_devices() -> int:
    """Number of accelerators that this process sees."""
    return _driver.count()


def current_device(kind: str) -> torch.device:
    """The current device of a kind: where torch puts a tensor if no index is given."""
    return _driver.current(kind)


def set_current_device(device: torch.device) -> None:
    """Makes `device` the process's current one."""
    _driver.set_current(device)


def device_id(device: torch.device) -> str:
    """An id that no other accelerator has, on other machines either; empty for a CPU."""
    return _driver.identity(device) if has_streams(device) else ""


def nccl_version() -> str:
    """The version of NCCL, or of AMD's RCCL; empty where torch has neither."""
    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> Stream:
    """The stream on which work that is called now is queued."""
    return _driver.current_stream(device)


def new_stream(device: torch.device, *, is_urgent: bool = False) -> Stream:
    """A new stream of an accelerator.

    Args:
        device: the accelerator.
        is_urgent: whether its kernels run before those waiting in other streams.
    """
    return _driver.new_stream(device, is_urgent=is_urgent)


def copy_stream(device: torch.device) -> Stream:
    """The accelerator's one stream for copies from the host."""
    return _driver.copy_stream(device)


def synchronize(device: torch.device) -> None:
    """Makes the host wait for all work of the device; returns at once for a CPU."""
    if has_streams(device):
        _driver.synchronize(device)


def wait_until(event: Event, timeout_s: float) -> bool:
    """Makes the host wait for an event; False if the device has not reached it in time."""
    return _driver.wait_until(event, timeout_s)


def lend_to_current_stream(tensor: Tensor) -> None:
    """Keeps a tensor's memory from being reused before the current stream is done with it."""
    if has_streams(tensor.device):
        _driver.record_stream(tensor, _driver.current_stream(tensor.device))


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured as a graph."""
    return has_streams(device) and _driver.is_capturing(device)


def copy_to_host(tensor: Tensor) -> tuple[Tensor, Event | None]:
    """Starts a copy to the host without waiting for its end.

    Args:
        tensor: a tensor on any device.

    Returns:
        The copy, and the event after which it may be read; None if it may be read at once.
    """
    if not has_streams(tensor.device):
        return tensor, None
    on_host = _driver.new_pinned(tensor)
    on_host.copy_(tensor, non_blocking=True)
    return on_host, _driver.current_stream(tensor.device).record_event()


def tensor_on(
    device: torch.device, numbers: Sequence[float], dtype: torch.dtype | None = None
) -> Tensor:
    """Copies the host's numbers to a device, without waiting until they have arrived.

    >>> tensor_on(torch.device("cpu"), [1, 2])
    tensor([1, 2])
    """
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def read_scalars(scalars: Sequence[Tensor]) -> list[Any]:
    """The scalars' values; the host waits only once for all scalars of one device.

    >>> read_scalars([torch.tensor(1.5), torch.tensor(2.0)])
    [1.5, 2.0]
    """
    found = {
        device: iter(torch.stack([x for x in scalars if x.device == device]).tolist())
        for device in {x.device for x in scalars}
    }
    return [next(found[x.device]) for x in scalars]


def new_future(device: torch.device) -> torch.futures.Future[Tensor]:
    """A future of a tensor there; waiting for it waits for the stream that completed it."""
    return _driver.new_future(device) if has_streams(device) else torch.futures.Future()


def seed(seed: int, device: torch.device | None = None) -> None:
    """Seeds torch's generators: the CPU's and, if `device` is an accelerator, that of `device`.

    torch.manual_seed seeds the generators of all devices, at eighty times the cost.
    """
    torch.default_generator.manual_seed(seed)
    if device is not None and has_streams(device):
        _driver.seed(device, seed)


def drawn_seed() -> int:
    """A seed that follows from the CPU's random state, which goes on."""
    return int(torch.randint(2**62, ()).item())


@contextmanager
def preserved_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restores on exit the random states that `seed` sets."""
    own: AbstractContextManager[None] = nullcontext()
    if device is not None and has_streams(device):
        own = _driver.preserved_random_state(device)
    with torch.random.fork_rng([]), own:
        yield


def _index(driver: Driver, device: torch.device) -> int:
    index: int | None = driver.current(device.type).index if device.index is None else device.index
    assert index is not None
    return index
