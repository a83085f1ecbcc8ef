"""Makes torch's process groups and sends through them; only this module calls a process group.

[Note: end of a group] Gloo closes a group's connections when the last reference to the group goes;
whoever drops it waits for the group's calls. If a connection closes while a call of another rank
needs it, that call may not notice, and last until its timeout. So closing a group first waits, for
a while, for calls that were started and never waited for; the other ranks have started them, too,
unless one failed. A group whose calls don't end by then, or that is aborted, is handed to a thread.

[Note: elastic workers on a GPU] What NCCL has begun with a worker that is lost stays in the
device's queue, and nothing behind it runs until the communicator is aborted. Gloo's calls end with
an error, in the thread that waits. So workers that may go on without each other use only Gloo, and
tensors on a GPU go through host memory, as NCCL's messages do between hosts on Ethernet.

[Note: Gloo's threads] One thread of a group reads what arrives. While a call has locked the
connection, this thread polls the kernel until the call is done; and having just been woken, it may
do so on the core that the call's thread lost to it. So Gloo's threads must not preempt others when
they wake. Where a core is free, no wait gets longer.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

from allstep.comm.connections import Connections
from allstep.comm.failures import explained, translated
from allstep.comm.missing import RankNames
from allstep.comm.work import END_S, BackendWork, ThreadWork, Work
from allstep.device import current_device, default_device, synchronize
from allstep.env import allow_messages_in_turn, patient_threads
from allstep.errors import CollectiveTimeoutError, PeerLostError, UsageError

_MOMENT_S = 0.05  # time between two checks that members are still there
_CHUNK_BYTES = 1 << 30  # backends count a message's bytes in 32 bits in places
_WATCHED_BYTES = 1 << 24  # least size of a message whose wait is watched [Note: missed ends]
_FEW = 8  # ended calls that may stay in the list
_SWAP_TAG = (1 << 31) - 2

# The backends of torch's table that take the same options.
_CLASSES = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}

_BackendType = dist.ProcessGroup.BackendType
_Start = Callable[[dist.ProcessGroup], dist.Work]


def make_group(
    store: Store, rank: int, size: int, *, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """A group of `size` workers that meet on `store`, with Gloo and an accelerator's own backend.

    torch's global state stays as it is. A process may have any number of groups, also in several
    threads.

    Args:
        store: a store that only the members share; wrap it in a PrefixStore.
        rank, size: this member's rank, and the number of members.
        device: the device that this member computes on.
        timeout_s: timeout of the group's calls, and of the meeting.
    """
    timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroup(store, rank, size)
    with patient_threads():  # [Note: Gloo's threads]
        gloo = dist.ProcessGroupGloo(PrefixStore("cpu/", store), rank, size, timeout)
    group._register_backend(torch.device("cpu"), _BackendType.GLOO, gloo)
    group._set_default_backend(_BackendType.GLOO)
    if backend_name(device) is not None:
        _add_backend(group, store, device, timeout_s)
    return group


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout_s: float,
    check: Callable[[], None],
) -> dist.ProcessGroup:
    """`make_group`, in a thread that is left behind if a member will not come.

    Args:
        store, rank, size, device, timeout_s: as for `make_group`.
        check: called again and again; raises if a member will not come.
    """
    # The thread has its own connection to the store, which may be blocked for long.
    own: Store = store.clone()  # type: ignore[attr-defined]
    make = partial(make_group, own, rank, size, device=device, timeout_s=timeout_s)
    meeting = ThreadWork.start(make, "the meeting")
    deadline_s = time.monotonic() + 2 * timeout_s  # an accelerator's backend waits forever
    while not meeting.is_completed():
        check()
        if time.monotonic() > deadline_s:
            raise RuntimeError("the meeting timed out")
        with suppress(CollectiveTimeoutError):
            meeting.wait(_MOMENT_S)
    return meeting.wait()


def backend_name(device: torch.device) -> str | None:
    """The backend of torch's own table for an accelerator; None where Gloo has to do.

    >>> backend_name(torch.device("cuda", 0)), backend_name(torch.device("cpu"))
    ('nccl', None)
    """
    name: str | None = dist.Backend.default_device_backend_map.get(device.type)
    return name if name in _CLASSES else None


def backend_timeout(timeout_s: float) -> timedelta:
    """The timeout of an accelerator's backend, after which it ends the process.

    Its calls have the group's timeout, not one of their own. It is longer than that of a wait for
    such a call, so that the wait ends first and says which ranks are missing.
    """
    return timedelta(seconds=2 * timeout_s)


def _add_backend(
    group: dist.ProcessGroup, store: Store, device: torch.device, timeout_s: float
) -> None:
    name = backend_name(device)
    assert name is not None
    kind = getattr(dist, _CLASSES[name])
    options = kind.Options()
    options._timeout = backend_timeout(timeout_s)
    options.is_high_priority_stream = True  # or its kernels would wait behind the backward pass
    allow_messages_in_turn()
    backend = kind(PrefixStore(f"{device.type}/", store), group.rank(), group.size(), options)
    # Otherwise it would connect in the first calls, each time only the ranks that make the call:
    # other ranks may wait elsewhere meanwhile, and nothing would end that wait.
    backend.eager_connect_single_device(device)
    group.bound_device_id = device
    kind_of_backend = getattr(_BackendType, name.upper())
    group._register_backend(torch.device(device.type), kind_of_backend, backend)
    group._set_default_backend(kind_of_backend)


class GroupWire:
    """The wire of one of torch's process groups; see `Wire` for the verbs.

    Args:
        group: the process group.
        timeout_s: timeout of each call.
        close: called once when the wire is closed, with whether the group was aborted.
        names: names of the ranks, for errors; None for their numbers in this group.
        chunk_bytes: size of the longest message; longer ones are sent in pieces.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        close: Callable[[bool], None] = lambda is_aborted: None,
        names: RankNames | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self.group: dist.ProcessGroup | None = group
        self._connections: Connections | None = Connections(group)  # None after `close`
        self.rank = group.rank()
        self.size = group.size()
        self._timeout_s = timeout_s
        self._reductions: dict[Any, Any] = {}  # operation -> options with the present timeout
        self._close = close
        self._chunk_bytes = chunk_bytes
        self._noting = threading.Lock()  # for `_under_way`; several threads may make calls
        self._under_way: list[BackendWork] = []  # all pending calls, and some that have ended
        self._num_not_ended = 0  # pending calls when they were last counted
        self.names = names or RankNames.of(group)
        self._device_types = {
            device.type
            for device in group._device_types
            if device.type == "cpu" or group._get_backend(device).name() != "gloo"
        }

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reductions.clear()
        if self.group is not None:
            for kind in self._device_types - {"cpu"}:
                backend = self.group._get_backend(torch.device(kind))
                if backend.name() in _CLASSES:
                    backend.set_timeout(backend_timeout(timeout_s))

    def transport_device(self, device: torch.device) -> torch.device:
        if device.type in self._device_types:
            return device
        kind = default_device().type
        # A group without Gloo also sends tensors that are on the CPU.
        return current_device(kind) if kind in self._device_types else torch.device("cpu")

    def _post(
        self,
        verb: str,
        starts: Sequence[_Start],
        timeout_s: float | None = None,
        *,
        is_on_cpu: bool,
        meets: bool = False,
        peers: Sequence[int] | None = None,
    ) -> Work[None]:
        """Starts calls.

        Args:
            verb: name of the calls, for errors.
            starts: functions that start one call each.
            timeout_s: timeout of messages; None for calls whose own options hold their timeout.
            is_on_cpu: whether the tensors are on the CPU.
            meets: whether the host's wait for the calls ends only after all ranks have made them.
            peers: ranks whose connections are checked during a wait; None for all. See
                [Note: missed ends].
        """
        group = self._group_for(verb)
        try:
            works = [start(group) for start in starts]
        except RuntimeError:
            with self._explained(verb, None):
                raise

        check = partial(self._check_connections, peers) if peers else self._check_connections
        work = BackendWork(
            works,
            partial(self._explained, verb),
            f"`{verb}` on {self.names.own}",
            partial(self._note_meeting, verb) if meets and is_on_cpu else None,
            timeout_s,
            polls=not is_on_cpu,
            check=check if is_on_cpu and peers != [] else None,
        )
        with self._noting:
            self._under_way.append(work)
            if len(self._under_way) > 2 * self._num_not_ended + _FEW:  # but not in each call
                self._under_way = self._not_ended()
                self._num_not_ended = len(self._under_way)
        return work

    def _group_for(self, verb: str) -> dist.ProcessGroup:
        group = self.group  # another thread may close it meanwhile
        if group is None:
            raise UsageError(
                f"`{verb}` was called on a closed communicator; call it before `close()`."
            )
        return group

    def _check_connections(self, peers: Sequence[int] | None = None) -> None:
        """Raises Gloo's error if one of these ranks, or of all if None, has gone."""
        connections = self._connections  # another thread may close them meanwhile
        if connections is not None:
            connections.check(peers)

    def _note_meeting(self, verb: str) -> None:
        self.names.last_call = verb

    def _not_ended(self) -> list[BackendWork]:
        return [work for work in self._under_way if not work.has_ended]

    def _explained(self, verb: str, timeout_s: float | None) -> explained:
        """Typed errors for what fails inside; after the full timeout with the missing ranks."""
        limit_s = timeout_s or self.timeout_s
        return explained(verb, self.names, limit_s, is_final=limit_s >= self.timeout_s)

    def _options(self, kind: type[Any]) -> Any:
        options = kind()
        options.timeout = timedelta(seconds=self.timeout_s)
        return options

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, verb: str) -> Work[None]:
        options = self._reductions.get(op)
        if options is None:
            options = self._options(dist.AllreduceOptions)
            options.reduceOp = op
            self._reductions[op] = options
        start = methodcaller("allreduce", [tensor], options)
        return self._post(verb, [start], is_on_cpu=tensor.is_cpu, meets=True)

    def reduce_scatter(
        self, parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType, verb: str
    ) -> tuple[Tensor, Work[None]]:
        is_on_cpu = parts[0].is_cpu
        if len({(part.numel(), part.dtype) for part in parts}) == 1:
            options = self._options(dist.ReduceScatterOptions)
            options.reduceOp = op
            joined = torch.cat([part.reshape(-1) for part in parts])
            output = torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format)
            flat = output.reshape(-1)
            start = methodcaller("_reduce_scatter_base", flat, joined, options)
            return output, self._post(verb, [start], is_on_cpu=is_on_cpu, meets=True)
        own = [part.clone(memory_format=torch.contiguous_format) for part in parts]

        def reduce_to(root: int) -> _Start:
            options = self._options(dist.ReduceOptions)
            options.reduceOp = op
            options.rootRank = root
            return methodcaller("reduce", [own[root]], options)

        starts = [reduce_to(root) for root in range(self.size)]
        return own[self.rank], self._post(verb, starts, is_on_cpu=is_on_cpu, meets=True)

    def _broadcasts(self, buffer: Tensor, root: int) -> list[_Start]:
        options = self._options(dist.BroadcastOptions)
        options.rootRank = root
        options.rootTensor = 0
        return [methodcaller("broadcast", [chunk], options) for chunk in self._chunks(buffer)]

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Work[None]:
        return self._post(verb, self._broadcasts(buffer, root), is_on_cpu=buffer.is_cpu)

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        output = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=buffer.device)
        pieces = list(torch.split(output, list(sizes_bytes)))
        if buffer.is_cpu:
            self._swap([buffer.contiguous()] * self.size, pieces, verb)
        elif len(set(sizes_bytes)) == 1 and output.numel() <= self._chunk_bytes:
            base = buffer.contiguous()
            options = self._options(AllgatherOptions)
            start = methodcaller("_allgather_base", output, base, options)
            self._post(verb, [start], is_on_cpu=False).wait()
        else:
            pieces[self.rank].copy_(buffer)
            starts = [
                start
                for root, piece in enumerate(pieces)
                for start in self._broadcasts(piece, root)
            ]
            self._post(verb, starts, is_on_cpu=False).wait()
        return pieces

    def all_to_all(
        self, buffers: Sequence[Tensor], sizes_bytes: Sequence[int], verb: str
    ) -> list[Tensor]:
        output = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=buffers[0].device)
        pieces = list(torch.split(output, list(sizes_bytes)))
        if output.is_cpu:
            self._swap([buffer.contiguous() for buffer in buffers], pieces, verb)
            return pieces
        options = self._options(dist.AllToAllOptions)
        joined = torch.cat(list(buffers))
        sent_bytes = [buffer.numel() for buffer in buffers]
        start = methodcaller(
            "alltoall_base", output, joined, list(sizes_bytes), sent_bytes, options
        )
        self._post(verb, [start], is_on_cpu=False).wait()
        return pieces

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], verb: str) -> None:
        """Sends to all ranks and receives from all, at once.

        Gloo's own collectives take turns, which on a slow link takes up to twice as long.
        """
        incoming[self.rank].copy_(outgoing[self.rank])
        starts: list[_Start] = []
        for distance in range(1, self.size):
            source, dest = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            starts += self._recvs(incoming[source], source, _SWAP_TAG)
            starts += self._sends(outgoing[dest], dest, _SWAP_TAG)
        peers: Sequence[int] | None = None if _is_watched(*incoming) else []
        self._post(verb, starts, self.timeout_s, is_on_cpu=True, meets=True, peers=peers).wait()

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Work[None]:
        starts = self._sends(buffer, dest, tag)
        return self._post_message(verb, starts, (dest, buffer))

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Work[None]:
        starts = self._recvs(buffer, source, tag)
        return self._post_message(verb, starts, (source, buffer))

    def exchange(
        self, outgoing: Tensor, dest: int, incoming: Tensor, source: int, tag: int, verb: str
    ) -> Work[None]:
        starts = [*self._recvs(incoming, source, tag), *self._sends(outgoing, dest, tag)]
        if incoming.is_cpu:
            return self._post_message(verb, starts, (dest, outgoing), (source, incoming))

        def together(group: dist.ProcessGroup) -> dist.Work:
            """Groups the calls: one after the other, two ranks would wait forever."""
            group._start_coalescing(incoming.device)
            for start in starts:
                start(group)
            return group._end_coalescing(incoming.device)

        return self._post(verb, [together] if starts else [], is_on_cpu=False)

    def _sends(self, buffer: Tensor, dest: int, tag: int) -> list[_Start]:
        return [methodcaller("send", [chunk], dest, tag) for chunk in self._chunks(buffer)]

    def _recvs(self, buffer: Tensor, source: int, tag: int) -> list[_Start]:
        return [methodcaller("recv", [chunk], source, tag) for chunk in self._chunks(buffer)]

    def _chunks(self, buffer: Tensor) -> list[Tensor]:
        """Pieces that any backend can send; none if the buffer is empty."""
        return list(torch.split(buffer, self._chunk_bytes)) if buffer.numel() else []

    def _post_message(
        self, verb: str, starts: Sequence[_Start], *messages: tuple[int, Tensor]
    ) -> Work[None]:
        """Posts messages; Gloo takes the timeout of a send or receive only at its wait."""
        is_on_cpu = messages[0][1].is_cpu
        limit_s = self.timeout_s if is_on_cpu else None
        return self._post(verb, starts, limit_s, is_on_cpu=is_on_cpu, peers=_watched(*messages))

    def _store(self) -> Store:
        return self._group_for("split").get_group_store()

    def new_group_id(self) -> int:
        return self._store().add("allstep/split", 1)

    def split(self, name: str, ranks: Sequence[int], device: torch.device) -> "GroupWire":
        store = PrefixStore(f"allstep/split/{name}", self._store())
        rank, size = ranks.index(self.rank), len(ranks)
        names = self.names.subgroup(ranks, rank)
        if device.type not in self._device_types:
            device = torch.device("cpu")  # groups split off a group with only Gloo have only Gloo
        with translated("split", self.names.number, self.names.size, self.timeout_s):
            group = connect(
                store,
                rank,
                size,
                device=device,
                timeout_s=self.timeout_s,
                check=partial(self._check_split, names),
            )
        return GroupWire(group, self.timeout_s, partial(shut_down, group, device), names)

    def _check_split(self, names: RankNames) -> None:
        names.check_all_there("split")
        if self.names.is_interrupted:
            raise PeerLostError(f"`split` on {names.own}: the others have left the group.")

    def check(self, verb: str) -> None:
        if "cpu" in self._device_types:
            with self._explained(verb, None):
                self._check_connections()

    def interrupt(self) -> None:
        connections = self._connections  # another thread may close them meanwhile
        if connections is not None:
            self._break_off(connections)

    def _break_off(self, connections: Connections) -> None:
        if "cpu" in self._device_types:
            self.names.is_interrupted = True
            connections.close()

    def close(self, *, abort: bool) -> None:
        group, self.group = self.group, None
        connections, self._connections = self._connections, None
        if group is None or connections is None:
            return
        deadline_s = time.monotonic() + min(END_S, self.timeout_s)
        is_aborted = abort or not all(work.wait_quietly(deadline_s) for work in self._not_ended())
        if is_aborted:
            self.names.has_left = True
            self._break_off(connections)
            with suppress(RuntimeError):
                group.abort()
        elif "cpu" in self._device_types:
            connections.leave()
        left = self._not_ended()
        if left:
            ThreadWork.start(partial(_hold, group, left, self.timeout_s), "the end of a group")
        self._close(is_aborted)


def shut_down(group: dist.ProcessGroup, device: torch.device, is_aborted: bool) -> None:
    """Shuts down a group that allstep made; dropping it would abort the device's pending calls.

    After an abort this does not wait for the device: another group's call there may never end.
    """
    if backend_name(device) is not None:
        if not is_aborted:
            synchronize(device)
        with suppress(RuntimeError):  # aborted already
            group.shutdown()


def _hold(group: dist.ProcessGroup, works: Iterable[BackendWork], timeout_s: float) -> None:
    """Holds a group until its calls have ended: dropping it earlier would block until then."""
    deadline_s = time.monotonic() + timeout_s
    for work in works:
        work.wait_quietly(deadline_s)


def _is_watched(*messages: Tensor) -> bool:
    return max(message.nbytes for message in messages) >= _WATCHED_BYTES


def _watched(*messages: tuple[int, Tensor]) -> list[int]:
    """The peers of the messages whose wait is watched. [Note: missed ends]"""
    return [peer for peer, buffer in messages if _is_watched(buffer)]
