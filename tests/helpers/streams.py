"""Ranks whose CPU tensors are taken for an accelerator's, with streams that are only names.

Torch's own sanitizer is told of every operator and of every wait. It says where two streams touch
the same memory without an order between them, which a test of values cannot see. Beside it,
whatever would make the host wait for the device is noted, and so is memory that is lent to another
stream. A driver can leave out the calls of one `Site`, as a mutant.

Not modelled: streams of the backend itself, which starts and ends in the current one.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.cuda import _sanitizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from allstep import device
from tests.helpers.sites import Site

_KEEPS_ORDER = {"c10d", "allstep"}  # operators that write what they are given, unsaid
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")
_HOST_READS = {Tensor.tolist, Tensor.cpu, Tensor.numpy}


def _resolve_operators() -> None:
    """Has torch make its Python objects of all operators, in one thread.

    Where two threads need one for the first time, under a dispatch mode, torch makes it twice,
    frees one, and may go on with that: a segmentation fault.
    """
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        name, _, overload = name.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


_resolve_operators()


@dataclass
class Rank:
    """One rank's device.

    Attributes:
        races: accesses without an order.
        waits: where the host would have waited for the device.
        lent: where memory was lent to another stream, and which.
        clocked: where the host waited for a device or stream in order to look at a clock.
    """

    driver: "StreamsAsNames"
    finds_races: bool = True
    handler: _sanitizer.EventHandler = field(default_factory=_sanitizer.EventHandler)
    races: list[str] = field(default_factory=list)
    waits: list[Site] = field(default_factory=list)
    lent: list[tuple[Site, int]] = field(default_factory=list)
    clocked: list[Site] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # memory taken anew would look like a race
    host: set[int] = field(default_factory=set)  # storages that are not the device's
    landing: dict[int, tuple[int, int]] = field(default_factory=dict)  # of the host: stream, number
    current: "NamedStream" = field(init=False)
    copies: Any = None  # the stream of copies from the host, once there is one
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.main = NamedStream(self, 0)
        self.current = self.main

    def does(self, verb: str) -> bool:
        """Whether a call is made, and not the mutant's."""
        site = Site.here(verb)
        self.driver.seen.add(site)
        return site != self.driver.left_out


class NamedEvent:
    def __init__(self, rank: Rank, stream: "NamedStream") -> None:
        self._rank, self.id = rank, next(rank.ids)
        rank.handler._handle_event_creation(self.id)
        rank.handler._handle_event_record(self.id, stream.id)

    def query(self) -> bool:
        return True


class NamedStream:
    def __init__(self, rank: Rank, number: int) -> None:
        self._rank, self.id = rank, number
        self._outer: list[NamedStream] = []
        if number:
            rank.handler._handle_stream_creation(number)

    def wait_stream(self, stream: "NamedStream") -> None:
        if self._rank.does("wait_stream"):
            self._wait(NamedEvent(self._rank, stream))

    def wait_event(self, event: NamedEvent) -> None:
        if self._rank.does("wait_event"):
            self._wait(event)

    def _wait(self, event: NamedEvent) -> None:
        self._rank.handler._handle_event_wait(event.id, self.id)

    def record_event(self) -> NamedEvent:
        return NamedEvent(self._rank, self)

    def synchronize(self) -> None:
        if self._rank.does("synchronize"):
            self._rank.clocked.append(Site.here("synchronize"))
            self._rank.handler._handle_stream_synchronization(self.id)

    def __enter__(self) -> "NamedStream":
        self._outer.append(self._rank.current)
        self._rank.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._rank.current = self._outer.pop()


class _Future(torch.futures.Future):
    """As CUDA's: whoever waits for it, DDP here, waits for the stream that completed it."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def set_result(self, result: Any) -> None:
        self._rank.main._wait(NamedEvent(self._rank, self._rank.current))
        super().set_result(result)


class StreamsAsNames(device.Driver):
    """Takes CPU tensors for an accelerator's, in the threads that are in `rank`.

    Args:
        left_out: whose calls are not made.

    Attributes:
        seen: the sites that have asked for an order, or would have.
    """

    def __init__(self, left_out: Site | None = None) -> None:
        super().__init__()
        self.left_out = left_out
        self.seen: set[Site] = set()
        self._own = threading.local()

    @contextmanager
    def rank(self, *, lints: bool = False) -> Iterator[Rank]:
        """This thread's device, as long as this lasts.

        Args:
            lints: note waits of the host, instead of races.
        """
        rank = Rank(self, finds_races=not lints)  # which takes longer
        self._own.rank = rank
        try:
            with _Watch(rank), ExitStack() as stack:
                if lints:
                    stack.enter_context(_Lint(rank))
                    stack.enter_context(_LintBelow(rank))
                yield rank
        finally:
            del self._own.rank

    @property
    def _rank(self) -> Rank:
        rank: Rank = self._own.rank
        return rank

    def is_accelerator(self, device: torch.device) -> bool:
        return hasattr(self._own, "rank")

    def has_streams(self, device: torch.device) -> bool:
        return self.is_accelerator(device)

    def default(self) -> torch.device:
        return torch.device("cpu")

    def identity(self, device: torch.device) -> str:
        return ""

    def set_current(self, device: torch.device) -> None:
        pass

    def current_stream(self, device: torch.device) -> device.Stream:
        return self._rank.current

    def new_stream(self, device: torch.device, *, is_urgent: bool) -> device.Stream:
        return NamedStream(self._rank, next(self._rank.ids))

    def copy_stream(self, device: torch.device) -> device.Stream:
        self._rank.copies = self._rank.copies or self.new_stream(device, is_urgent=False)
        return self._rank.copies

    def synchronize(self, device: torch.device) -> None:
        if self._rank.does("synchronize"):
            self._rank.clocked.append(Site.here("synchronize"))
            self._rank.handler._handle_device_synchronization()

    def wait_until(self, event: device.Event, timeout_s: float) -> bool:
        if self._rank.does("wait_until"):
            assert isinstance(event, NamedEvent)
            self._rank.handler._handle_event_synchronization(event.id)
        return True

    def record_stream(self, tensor: Tensor, stream: device.Stream) -> None:
        if self._rank.does("record_stream"):
            assert isinstance(stream, NamedStream)
            self._rank.lent.append((Site.here("record_stream"), stream.id))

    def is_capturing(self, device: torch.device) -> bool:
        return False

    def new_pinned(self, like: Tensor) -> Tensor:
        on_host = torch.empty_like(like)
        self._rank.host.add(_memory(on_host))
        self._rank.kept.append(on_host)
        return on_host

    def new_future(self, device: torch.device) -> torch.futures.Future[Tensor]:
        return _Future(self._rank)

    def seed(self, device: torch.device, seed: int) -> None:
        pass

    def preserved_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()


@cache
def _roles(func: Any) -> tuple[list[tuple[str, bool, bool]], tuple[bool, bool]]:
    """Of an operator's arguments and of its result: the name, whether it is written or a view.

    Torch makes a schema's objects anew each time that it is asked.
    """

    def role(x: Any) -> tuple[bool, bool]:
        alias = x.alias_info
        return alias is not None and alias.is_write, alias is not None and not alias.is_write

    schema = func._schema
    result = role(schema.returns[0]) if schema.returns else (False, False)
    return [(x.name, *role(x)) for x in schema.arguments], result


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Those of an operator's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors_in(x)


class _Arguments(_sanitizer.ArgumentHandler):
    """Torch's, for CPU tensors, by whole storages, without asking for a schema at each call."""

    def read_inputs(
        self, func: Any, args: Any, kwargs: dict[str, Any], *, is_factory: bool
    ) -> None:
        for (name, is_write, is_view), value in _named(_roles(func)[0], args, kwargs):
            for memory in self._memories(value):
                self.tensor_aliases[memory].append(name)
                if is_write:
                    self.dataptrs_written.add(memory)
                elif not (is_factory or is_view):
                    self.dataptrs_read.add(memory)

    def read_result(self, func: Any, out: Any, *, is_factory: bool) -> None:
        _, is_view = _roles(func)[1]
        for memory in self._memories(out):
            self.outputs.add(memory)
            if not (is_factory or is_view):
                self.dataptrs_written.add(memory)

    def _memories(self, value: Any) -> list[int]:
        found = [memory for x in _tensors_in(value) if (memory := _memory(x))]
        for memory in found:
            self.tensor_aliases.setdefault(memory, [])
        return found


def _named(roles: list[Any], args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(roles, args, strict=False)
    yield from ((role, kwargs[role[0]]) for role in roles[len(args) :] if role[0] in kwargs)


class _DispatchMode(TorchDispatchMode):
    """One that is not asked at each operator whether it is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Watch(_DispatchMode):
    """Tells the sanitizer of every operator of this thread."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rank, name = self._rank, func.name().partition(".")[0]
        used = {_memory(x) for x in _tensors_in((*args, *kwargs.values()))}
        self._look_for_host_reads(name, used)
        is_factory = name.startswith(("aten::empty", "aten::new_")) or name.endswith("_like")
        arguments = _Arguments()
        if rank.finds_races:
            arguments.read_inputs(func, args, kwargs, is_factory=is_factory)
        out = func(*args, **kwargs)
        if name == "aten::lift_fresh":
            rank.host.add(_memory(args[0]))
        if name == "aten::scalar_tensor":  # a number that an operator was given
            rank.host.add(_memory(out))
        rank.kept.append(out)
        if used and used <= rank.host and kwargs.get("device") is None:  # the host's own work
            rank.host.update(map(_memory, _tensors_in(out)))
        if rank.finds_races:
            arguments.read_result(func, out, is_factory=is_factory)
            if name.partition("::")[0] in _KEEPS_ORDER:
                arguments.dataptrs_written |= used - {0}
            self._launch(name, arguments)
        if name == "aten::copy_" and _memory(args[0]) in rank.host:
            rank.landing[_memory(args[0])] = rank.current.id, rank.handler.seq_num
        if name in _WAITS and not used <= rank.host:
            rank.handler._handle_stream_synchronization(rank.current.id)
        return out

    def _launch(self, name: str, arguments: _Arguments) -> None:
        """Tells the sanitizer of a kernel, and notes the races that it sees."""
        rank = self._rank
        self._forget_fresh(arguments)
        written = arguments.dataptrs_written - rank.host
        read = arguments.dataptrs_read - written - rank.host
        if not read and not written:
            return
        for race in rank.handler._handle_kernel_launch(
            rank.current.id, read, written, arguments.outputs, name, arguments.tensor_aliases
        ):
            access, earlier = race.current_access, race.previous_access
            rank.races.append(
                f"{access.operator} in stream {access.stream}, "
                f"{earlier.operator} in stream {earlier.stream}; {Site.here('')}"
            )

    def _look_for_host_reads(self, name: str, used: set[int]) -> None:
        """The host looks at what a stream may still be writing."""
        for memory in used & self._rank.landing.keys():
            stream, number = self._rank.landing[memory]
            if self._rank.handler.syncs.host_sync_state.get(stream, -1) < number:
                self._rank.races.append(f"{name} by the host, copy_ in stream {stream}")

    def _forget_fresh(self, arguments: _Arguments) -> None:
        """What an operator has made lies in memory that nobody has used before."""
        accesses = self._rank.handler.tensors_accessed.accesses
        for memory in arguments.outputs - arguments.dataptrs_read:
            if not arguments.tensor_aliases[memory]:
                accesses.pop(memory, None)


class _Lint(TorchFunctionMode):
    """Notes what would make the host wait for the device."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        on_host = first is not None and _memory(first) in self._rank.host
        if (func in _HOST_READS and not on_host) or self._copies_from_host(func, args, kwargs):
            self._rank.waits.append(Site.here(func.__name__))
        if func is Tensor.backward:  # its hooks would run outside of the mode
            gradient, edge = kwargs.pop("gradient"), get_gradient_edge(first)
            with self:
                return torch.autograd.backward(edge, gradient, **kwargs)
        return func(*args, **kwargs)

    def _copies_from_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """A copy of the host's numbers for which the host waits."""
        is_made = func is torch.tensor or (
            func is torch.as_tensor and not isinstance(args[0], Tensor)
        )
        if func is Tensor.new_tensor or (is_made and kwargs.get("device") is not None):
            return True
        source = {Tensor.to: 0, Tensor.copy_: 1}.get(func)
        if source is None or _memory(args[source]) not in self._rank.host:
            return False
        moves = func is Tensor.copy_ or any(map(self._is_on_device, args[1:]))
        return moves and not kwargs.get("non_blocking", False)

    def _is_on_device(self, target: Any) -> bool:
        """Whether what is copied there leaves the host."""
        is_tensor = isinstance(target, Tensor)
        is_there = is_tensor and _memory(target) not in self._rank.host
        return is_there or isinstance(target, torch.device)


class _LintBelow(_DispatchMode):
    """The same below torch's functions: numbers that are read, or written to one element."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, host = func.name().partition(".")[0], self._rank.host
        if name in _WAITS and not {*map(_memory, _tensors_in(args))} <= host:
            self._rank.waits.append(Site.here(name.removeprefix("aten::")))
        if name == "aten::lift_fresh":
            host.add(_memory(args[0]))
        is_element = name == "aten::copy_" and not args[0].dim() and _memory(args[0]) not in host
        if is_element and _memory(args[1]) in host and len(args) == 2:
            self._rank.waits.append(Site.here("copy_ of a scalar"))
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
