"""Wire formats and staleness for torch's DistributedDataParallel."""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from allstep.comm import Communicator, Work, init
from allstep.comm.ddp import find_ddp, is_joining
from allstep.comm.work import JoinedWork
from allstep.device import new_future
from allstep.errors import UsageError, check_type
from allstep.exchange.comm_hook import CommHook, Gradients, after_engine, check_policy
from allstep.exchange.hooks import is_in_backward
from allstep.exchange.layout import BucketLayout
from allstep.exchange.parameters import sparse_gradient_message
from allstep.exchange.policy import ExchangePolicy, Stale, Synchronous
from allstep.exchange.reducer import Bucket, Reducer
from allstep.exchange.wires.error_feedback import keeps_unsent

_STATIC_GRAPH = (
    "`static_graph` (=True) of DistributedDataParallel and `steps` (={steps}) of `Stale`: the first"
    " backward pass hands over several buckets, one for each dtype and device of the parameters,"
    " without an end. Leave `static_graph` out, or pass `Synchronous()`."
)


def ddp_hook(
    policy: Synchronous | Stale | None = None, comm: Communicator | None = None
) -> "DDPCommHook":
    """A communication hook that exchanges DDP's buckets by a policy.

    Args:
        policy: its compression, staleness, reduction and algorithm are used; the buckets are DDP's.
        comm: the workers of DDP's process group; None to take that group.

    Returns:
        The hook, for `DistributedDataParallel.register_comm_hook`.

    Raises:
        UsageError: if `policy` is local SGD, or if an argument is of a wrong type; in a backward
            pass, if `comm` has other workers than DDP, if a gradient is sparse, for a second DDP
            model, or with staleness in `join()`.

    Example:
        >>> import torch, allstep
        >>> hook = ddp_hook(allstep.Synchronous(compression="int8"))
        >>> def distribute(model: torch.nn.Module):
        ...     model = torch.nn.parallel.DistributedDataParallel(model)
        ...     model.register_comm_hook(model, hook)
        ...     return model
    """
    checked = check_policy(policy)
    if comm is not None:
        check_type("comm", comm, Communicator, "that of `allstep.init()`; or leave it out")
    return DDPCommHook(checked, comm)


class DDPCommHook(CommHook):
    """Exchanges DDP's buckets; made by `ddp_hook`, one for each DDP model.

    With staleness the first steps leave `p.grad` None, so that an optimizer does nothing in
    them; call `flush` after the last. A GradScaler must unscale a gradient with the scale under
    which it was computed; with staleness, only `allstep.attach` supports it.

    Args:
        policy: how to exchange.
        comm: the workers.
    """

    def __init__(self, policy: ExchangePolicy, comm: Communicator | None) -> None:
        self.__name__ = self.__qualname__ = "allstep.ddp_hook"  # DDP asks for them
        super().__init__(policy)
        self._comm = comm
        self._step: Gradients = {}  # of the backward pass under way
        self._exchanged: tuple[str, ...] = ()  # all parameters of DDP's buckets
        self._works: list[Work[None]] = []
        self._waiting: list[tuple[BucketLayout, Tensor, torch.futures.Future[Tensor]]] = []
        self._ddp: weakref.ref[DistributedDataParallel] | None = None  # if it can be found
        self._of_ddp: frozenset[Tensor] = frozenset()  # its parameters
        self._finds_unused = True
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[Tensor, str] = {}

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Called by DDP when a bucket's gradients are ready.

        Args:
            state: the model, so that messages can name its parameters; anything else is accepted.
            bucket: DDP's bucket.
        """
        flat = bucket.buffer()
        self._check_ddp(bucket.parameters())
        # Made at the first bucket, when there is a process group for sure.
        reducer = self._reducer or self._begin(flat.device)
        names = self._name(bucket.parameters(), state)
        if flat.layout != torch.strided:
            raise UsageError(sparse_gradient_message(names[0]))
        layout = BucketLayout.of([(name, self._parameters[name]) for name in names])
        future = new_future(flat.device)
        scale = self._scale(reducer.comm)
        if not self._policy.staleness:
            flat.mul_(scale)
            if bucket.index() == 0:
                self._waiting.clear()  # of a pass that had no last one
            reducer.start(Bucket(layout, flat), then=partial(_resolve, future, flat))
            self._waiting.append((layout, flat, future))
            if bucket.is_last():
                self._end_prompt_step()
            return future
        if self._waiting and bucket.index() == 0:
            # DDP calls none of them the last, and waits for each before it goes on.
            raise UsageError(_STATIC_GRAPH.format(steps=self._policy.staleness))
        own = flat * scale
        self._step |= zip(names, layout.views(own), strict=True)
        self._works.append(reducer.start(Bucket(layout, own)))
        self._waiting.append((layout, flat, future))
        if bucket.is_last():
            self._end_step()
        return future

    def flush(self) -> Iterator[None]:
        """Puts gradients that are in flight in `p.grad`, one step's after the other.

        Make an update for each. There are none without staleness, nor between `load_state_dict` and
        the next backward pass.
        """
        steps = self._steps_of("")
        while steps:
            due = steps.pop()
            for name in self._exchanged:
                self._parameters[name].grad = due.get(name)
            yield

    def _check_ddp(self, parameters: list[Tensor]) -> None:
        """Raises if DDP is used in a way that can't be exchanged; called for each bucket."""
        if self._reducer is None:
            self._take_ddp(find_ddp(parameters, hook=self))
        elif self._ddp is not None and (self._ddp() is None or parameters[0] not in self._of_ddp):
            self._take_next_ddp(find_ddp(parameters, hook=self))
        ddp = None if self._ddp is None else self._ddp()
        joins = not is_in_backward() or (ddp is not None and is_joining(ddp))
        if joins and self._policy.staleness:
            raise UsageError(
                f"`steps` (={self._policy.staleness}) of `Stale` has gradients under way when a"
                " worker has no more batches, and `join()` of DistributedDataParallel lets the"
                " others go on without it: leave `join` out, with as many batches on each worker,"
                " or pass `Synchronous()`."
            )

    def _take_ddp(self, ddp: DistributedDataParallel | None) -> None:
        if ddp is not None:
            self._ddp, self._of_ddp = weakref.ref(ddp), frozenset(ddp.parameters())
            self._finds_unused = ddp.find_unused_parameters

    def _take_next_ddp(self, ddp: DistributedDataParallel | None) -> None:
        """Follows a new DDP wrapper of the same model, made when the model has grown."""
        if ddp is not None and self._ddp is not None and self._ddp() is not None:
            raise UsageError(
                f"`allstep.ddp_hook` is called for a second model ({type(ddp.module).__name__}),"
                " whose gradients would meet those of the first in what it keeps: make a hook for"
                " each DistributedDataParallel."
            )
        self._take_ddp(ddp)

    def _begin(self, device: torch.device) -> Reducer:
        ddp = None if self._ddp is None else self._ddp()
        group = None if ddp is None else ddp.process_group
        comm = self._comm or init(process_group=group, device=device)
        if group is not None:
            _check_group(comm, group)
        return self._meet(comm)

    def _name(self, parameters: list[Tensor], state: object) -> list[str]:
        for p in parameters:
            if p not in self._names:
                self._learn_names(state)
            if p not in self._names:
                self._names[p] = f"number {len(self._names)}"
                self._parameters[self._names[p]] = cast(nn.Parameter, p)
        return [self._names[p] for p in parameters]

    def _learn_names(self, state: object) -> None:
        model = state.module if isinstance(state, DistributedDataParallel) else state
        if isinstance(model, nn.Module):
            self._parameters |= dict(model.named_parameters())
            self._names |= {p: name for name, p in model.named_parameters()}

    def _end_prompt_step(self) -> None:
        """Waits for the sums, and sets the gradients of parameters that DDP takes as unused."""
        waiting, self._waiting = self._waiting, []
        if not is_in_backward():
            return  # a worker without batches, whose zeros join the others' gradients
        # Before DDP's own end of the pass, which knows no errors but its own.
        Variable._execution_engine.queue_callback(partial(_wait, [end for _, _, end in waiting]))
        if self._finds_unused and keeps_unsent(self._policy.wire_format):
            after_engine(partial(self._set_sums, waiting))

    def _set_sums(
        self, sums: list[tuple[BucketLayout, Tensor, torch.futures.Future[Tensor]]]
    ) -> None:
        """Sets `p.grad` to the sums, also where DDP won't, as no worker has used a parameter."""
        for layout, flat, _ in sums:
            for name, view in zip(layout.names, layout.views(flat), strict=True):
                p = self._parameters[name]
                if p.grad is not None:
                    p.grad.copy_(view)
                elif view.any():
                    p.grad = view.clone()

    def _end_step(self) -> None:
        """Passes the gradients of an earlier step to DDP, or makes `p.grad` None."""
        steps = self._steps_of("")
        step, unused = self._step, set[str]()
        *works, last = self._works
        steps.push(step, [*works, JoinedWork([last], partial(_drop_unused, step, unused))])
        self._step, self._works, self._exchanged = {}, [], tuple(step)
        due = steps.pop_due() or {}
        waiting, self._waiting = self._waiting, []
        for layout, flat, future in waiting:
            for name, view in zip(layout.names, layout.views(flat), strict=True):
                if name in due:
                    view.copy_(due[name])
                else:
                    view.zero_()
            future.set_result(flat)
        # DDP queues the end of its work after this one, and that sets `p.grad`.
        after_engine(partial(self._set_gradients, due, unused))

    def _set_gradients(self, due: Gradients, unused: set[str]) -> None:
        """Sets `p.grad` of parameters that only one of two steps has used: this and the due one.

        Args:
            due: gradients of the step that is due; none in the first steps.
            unused: receives the parameters that no worker has used in this step, for which DDP
                leaves `p.grad` None.
        """
        for name in self._exchanged:
            p = self._parameters[name]
            if p.grad is None:
                unused.add(name)
            if name not in due:
                p.grad = None
            elif p.grad is None:
                p.grad = due[name].clone()
            else:
                p.grad.copy_(due[name])


def _check_group(comm: Communicator, group: dist.ProcessGroup) -> None:
    """Checks that `comm` has DDP's workers. Collective."""
    ranks = comm.all_gather_object(dist.get_rank())
    of_ddp = dist.get_process_group_ranks(group)
    if sorted(ranks) != sorted(of_ddp):
        raise UsageError(
            f"`comm` is of the ranks {ranks}, and DistributedDataParallel of {of_ddp}: leave `comm`"
            " out of `ddp_hook`, or pass `allstep.init(process_group=...)` of DDP's group."
        )


def _drop_unused(step: Gradients, unused: set[str]) -> None:
    """Drops the gradients of parameters that no worker has used, once a step's sums are made.

    As without staleness, they have no gradient, unless residuals of earlier gradients were sent.
    """
    for name in unused:
        if not step[name].any():
            del step[name]


def _resolve(
    future: torch.futures.Future[Tensor], result: Tensor, error: BaseException | None
) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)  # type: ignore[arg-type]


def _wait(futures: list[torch.futures.Future[Tensor]]) -> None:
    for future in futures:
        future.wait()
