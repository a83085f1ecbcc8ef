"""Asynchronous SGD: workers at their own pace, on parameters that others change meanwhile."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from allstep.comm import Communicator, Work, divided_modules, fsdp_modules
from allstep.device import is_accelerator
from allstep.errors import CommunicationError, UsageError
from allstep.exchange.agreement import agree
from allstep.exchange.exchange import exchanges_of
from allstep.exchange.parameters import ParameterSet, signature, sparse_gradient_message
from allstep.exchange.policy import Synchronous
from allstep.exchange.shard_server import ShardServer

_REQUEST, _REPLY = 0, 1  # tags: a worker and the server of the same rank both receive
_PULL, _PUSH, _CLOSE = range(3)


class ParameterServer:
    """Parameters in shards, one a rank, which workers pull and push gradients to (Downpour SGD).

    Each rank is a worker and serves a shard: some whole parameters. A server applies a gradient
    when it arrives, to parameters that others may have changed since the worker's pull:

        w <- optimizer(w, g),  g of the parameters of s updates ago      s: the staleness

    With `staleness_aware` the update's rate is divided by max(1, s). Nobody waits for another
    worker. So it is not the same model on any number of workers, nor twice on the same one, and
    nothing is resumed: it is here to be compared with the policies of `attach`.

    It works in a `with` block, at whose end each worker waits for all workers' last pushes; then
    all have one model. Parameters are the servers'; of floating-point buffers, such as running
    statistics, the mean over the workers.

    A worker pulls and pushes as often as it likes, at least once in `comm.timeout_s`. Gradients of
    several backward passes add up in `p.grad` till they are pushed. A lost worker is an error on
    all others.

    Args:
        model: the same module on every rank; it begins with rank 0's parameters and buffers.
        comm: the workers, on CPUs.
        optimizer: new, of the model's parameters. It is taken over: its groups then hold this
            rank's shard. What does not look at other parameters works, momentum and Adam too.
        schedule: updates of a shard so far -> multiplier of the learning rates.
        staleness_aware: divide an update's rate by its staleness.
        arrivals: ranks in the order in which each server takes their pulls and pushes, over and
            over, without those that have closed; the others wait. With `range(comm.size)` a
            training can be repeated. None takes them as they arrive.

    Raises:
        UsageError: if the model's gradients are exchanged already, or late, or compressed; if the
            optimizer has been used, is of other parameters, or needs a closure; off CPUs.
        DisagreementError: if ranks pass other models or options.

    Example:
        >>> import torch, allstep
        >>> model, comm = torch.nn.Linear(2, 1), allstep.Communicator.single_process()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> with allstep.exchange.ParameterServer(model, comm, optimizer) as server:
        ...     for _ in range(3):
        ...         server.pull()
        ...         model(torch.ones(3, 2)).mean().backward()
        ...         server.push()
        >>> server.staleness
        {0: 3}

    Source: Dean et al., "Large scale distributed deep networks", NIPS 2012, section 4.1 and
    appendix; Zhang et al., "Staleness-aware async-SGD for distributed deep learning",
    IJCAI 2016, arXiv:1511.05950.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        optimizer: Optimizer,
        *,
        schedule: Callable[[int], float] = lambda num_updates: 1.0,
        staleness_aware: bool = False,
        arrivals: Sequence[int] | None = None,
    ) -> None:
        served = _served_parameters(model, comm, optimizer)
        if any(rank not in range(comm.size) for rank in arrivals or ()):
            raise UsageError(f"`arrivals` (={arrivals}) must be ranks, 0 to {comm.size - 1}.")
        tensors = ParameterSet(model).tensors
        options = (
            ("optimizer", type(optimizer).__name__, list(served)),
            ("staleness_aware", staleness_aware),
            ("arrivals", arrivals and list(arrivals)),
        )
        agree(comm, "make a parameter server", (*signature(tensors), *options))
        comm.broadcast(tuple(tensor.detach() for tensor in tensors.values()), root=0)
        group = comm.split(0)  # its messages and timeouts are apart from the user's
        assert group is not None
        self._model, self._comm = model, group
        self._shards = _divide(served, comm.size)
        self._versions: dict[int, int] = {}  # of each shard at the last pull
        own = _take_over(optimizer, self._shards[comm.rank])
        self._server = ShardServer(
            own, optimizer, schedule, staleness_aware, deque(arrivals or ()), comm.timeout_s
        )
        self._staleness: Counter[int] | None = None
        self._failure: BaseException | None = None
        self._is_open = False
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"serves {rank}", daemon=True)
            for rank in self._peers
        ]

    @property
    def staleness(self) -> dict[int, int]:
        """Staleness -> updates of shards: of this rank's so far, of all shards at the end."""
        return dict(sorted((self._staleness or self._server.staleness).items()))

    def pull(self) -> None:
        """Copies the parameters, as their servers have them now, into the model."""
        with self._guarded("pull"):
            if not self._versions:
                _refuse_exchanged(self._model)  # it may have been attached meanwhile
            posted = [self._ask(rank, _PULL) for rank in self._peers]
            self._take(self._comm.rank, *self._server.pull(self._comm.rank))
            for work in posted:
                work.wait()
            for rank in self._peers:
                version, *values = self._comm.recv(rank, _REPLY)
                self._take(rank, int(version), values)

    def push(self) -> None:
        """Sends what is in `p.grad`, which is then None; the servers update their parameters.

        Raises:
            UsageError: outside of the block, before the first pull, or if a gradient is sparse.
        """
        with self._guarded("push"):
            if not self._versions:
                raise UsageError(
                    "`push` was called before the first `pull`: a gradient's staleness counts from"
                    " there. Call `pull()` before the forward pass."
                )
            gradients = [self._gradients_of(shard) for shard in self._shards]
            own = self._comm.rank
            posted = [self._ask(rank, _PUSH, gradients[rank]) for rank in self._peers]
            self._server.push(own, self._versions[own], gradients[own])
            for work in posted:
                work.wait()
            self._model.zero_grad(set_to_none=True)

    def _close(self) -> None:
        """Waits for all workers' last pushes; then all have one model. Collective."""
        with self._guarded("close"):
            for work in [self._ask(rank, _CLOSE) for rank in self._peers]:
                work.wait()
            self._server.leave(self._comm.rank)
            for thread in self._threads:  # ends, by a request or the timeout of waiting for it
                thread.join()
            if self._failure is not None:
                raise self._failure
            own = tuple(p.detach() for p in self._server.parameters)
            for rank in range(self._comm.size):
                is_own = rank == self._comm.rank
                self._take(rank, 0, self._comm.broadcast(own if is_own else None, rank))
            buffers = tuple(b.detach() for b in self._model.buffers() if b.is_floating_point())
            if buffers:
                self._comm.all_reduce(buffers, "mean")
            counts = self._comm.all_gather_object(dict(self._server.staleness))
            self._staleness = sum(map(Counter, counts), Counter())
        self._is_open = False
        self._comm.close()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._is_open = True
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        try:
            if error is None:
                self._close()
        finally:
            if self._is_open:
                self._comm.abort()
            self._is_open = False

    @contextmanager
    def _guarded(self, verb: str) -> Iterator[None]:
        """Raises what made this rank's server fail, rather than what follows from it."""
        if not self._is_open:
            raise UsageError(
                f"`{verb}` was called outside of `with ParameterServer(...) as server:`, at whose"
                " end all workers' last pushes are waited for; call it in that block."
            )
        try:
            if self._failure is not None:
                raise self._failure
            yield
        except CommunicationError as error:
            if self._failure in (None, error):
                raise
            raise self._failure from error

    def _ask(self, rank: int, kind: int, gradients: Sequence[Tensor | None] = ()) -> Work[None]:
        """Posts a request to a server: its kind, the version, which gradients there are."""
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        header = torch.tensor([kind, self._versions.get(rank, 0), *places])
        present = [gradient for gradient in gradients if gradient is not None]
        return self._comm.send((header, *present), rank, _REQUEST, async_op=True)

    def _serve(self, rank: int) -> None:
        """Answers another rank's requests until it closes."""
        try:
            while True:
                header, *tensors = self._comm.recv(rank, _REQUEST)
                kind, version, *places = header.tolist()
                if kind == _CLOSE:
                    self._server.leave(rank)
                    return
                if kind == _PULL:
                    version, values = self._server.pull(rank)
                    self._comm.send((torch.tensor(version), *values), rank, _REPLY)
                else:
                    gradients = dict(zip(places, tensors, strict=True))
                    everyone = range(len(self._server.parameters))
                    self._server.push(rank, version, [gradients.get(place) for place in everyone])
        except BaseException as error:
            self._failure = self._failure or error
            self._server.interrupt()
            self._comm.interrupt()

    @torch.no_grad()
    def _take(self, rank: int, version: int, values: Sequence[Tensor]) -> None:
        self._versions[rank] = version
        for p, value in zip(self._shards[rank].values(), values, strict=True):
            p.copy_(value)

    def _gradients_of(self, shard: dict[str, nn.Parameter]) -> list[Tensor | None]:
        for name, p in shard.items():
            if p.grad is not None and p.grad.is_sparse:
                raise UsageError(sparse_gradient_message(name))
        return [p.grad for p in shard.values()]


def _served_parameters(
    model: nn.Module, comm: Communicator, optimizer: Optimizer
) -> dict[str, nn.Parameter]:
    """name -> parameter that the optimizer has, in the model's order."""
    devices = [comm.device, *(p.device for p in model.parameters())]
    for device in filter(is_accelerator, devices):
        raise UsageError(
            f"`model` or `comm` is on {device.type}: a parameter server answers in threads, which"
            " the backends of accelerators don't take. Pass device='cpu' to `allstep.init`, and"
            " leave the model there."
        )
    for name in [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise UsageError(
            f"`{name}` has no shape yet: run a forward pass before the server is made."
        )
    _refuse_exchanged(model)
    if isinstance(optimizer, LBFGS):
        raise UsageError("`optimizer` (LBFGS) needs a closure, which a server has not; take SGD.")
    if optimizer.state:
        raise UsageError(
            "`optimizer` has a state of earlier steps, which belongs to parameters that move to"
            " their servers; make a new one."
        )
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    served = {name: p for name, p in model.named_parameters() if id(p) in ids}
    if len(served) < len(ids):
        raise UsageError(
            f"`optimizer` has {len(ids) - len(served)} parameters that `model` has not; make it of"
            " `model.parameters()`."
        )
    return served


def _refuse_exchanged(model: nn.Module) -> None:
    """Raises UsageError for a gradient that was exchanged, or is a part of one."""
    if divided_modules(model):
        raise UsageError(
            f"`model` has modules divided over workers ({', '.join(divided_modules(model))}),"
            " which call each other in step; train it with `attach`."
        )
    if fsdp_modules(model):
        raise UsageError(
            "`model` is sharded by FSDP2, whose passes are collective; train it with `attach`."
        )
    for _, exchange in exchanges_of(model):
        policy, size = exchange.policy, exchange.comm.size
        is_plain = isinstance(policy, Synchronous) and policy.wire_format.name == "fp32"
        if size > 1 or not is_plain:
            raise UsageError(
                f"`model` is attached over {size} workers with {policy}: a parameter server takes"
                " no compression, `exact` and staleness of `attach`. Detach it, or attach it with"
                " `Communicator.single_process()` alone, which adds up a worker's micro-batches."
            )


def _divide(parameters: dict[str, nn.Parameter], size: int) -> list[dict[str, nn.Parameter]]:
    """Assigns whole parameters, the largest first, to the rank with the fewest elements so far."""
    num_elements = [0] * size
    owners = {}
    for name in sorted(parameters, key=lambda name: -parameters[name].numel()):
        owners[name] = num_elements.index(min(num_elements))
        num_elements[owners[name]] += parameters[name].numel()
    return [{n: p for n, p in parameters.items() if owners[n] == rank} for rank in range(size)]


def _take_over(optimizer: Optimizer, shard: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """Gives the optimizer copies of a shard's parameters in their place, and returns these."""
    copies = {id(p): nn.Parameter(p.detach().clone()) for p in shard.values()}
    for group in optimizer.param_groups:
        kept = [index for index, p in enumerate(group["params"]) if id(p) in copies]
        group["params"] = [copies[id(group["params"][index])] for index in kept]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in kept]
    return list(copies.values())
