"""Wire formats and staleness for those who train with DistributedDataParallel."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from allstep.comm import Communicator, init
from allstep.exchange.guest import GuestMeans, StaleGradients
from allstep.exchange.layout import BucketLayout
from allstep.exchange.policy import ExchangePolicy, Synchronous

__all__ = ["DDPHook", "ddp_hook"]


def ddp_hook(policy: ExchangePolicy | None = None, comm: Communicator | None = None) -> "DDPHook":
    """A communication hook that exchanges DDP's buckets as a policy says.

    Args:
        policy: its wire format, staleness, reduction and algorithm are used; buckets are DDP's.
        comm: the workers of DDP's process group; None for all workers of torch.distributed.

    Returns:
        What `DistributedDataParallel.register_comm_hook` takes.

    Example:
        >>> import torch, allstep
        >>> hook = ddp_hook(allstep.Synchronous(compression="int8"))
        >>> def distribute(model: torch.nn.Module):
        ...     model = torch.nn.parallel.DistributedDataParallel(model)
        ...     model.register_comm_hook(model, hook)
        ...     return model
    """
    return DDPHook(policy or Synchronous(), comm)


class DDPHook:
    """Exchanges DDP's buckets; made by `ddp_hook`, one for each DDP model.

    With staleness the first steps leave `p.grad` None, so that an optimizer does nothing in
    them; call `flush` after the last. A GradScaler, which must unscale a gradient with the scale
    that it was made under, goes with staleness only in `allstep.attach`.

    Args:
        policy: how to exchange.
        comm: the workers.
    """

    def __init__(self, policy: ExchangePolicy, comm: Communicator | None) -> None:
        self.__name__ = self.__qualname__ = "allstep.ddp_hook"  # DDP asks for them
        self._policy = policy
        self._comm = comm
        self._means: GuestMeans | None = None
        self._stale = StaleGradients(policy.staleness)
        self._waiting: list[tuple[BucketLayout, Tensor, torch.futures.Future[Tensor]]] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[Tensor, str] = {}
        self._loaded: Mapping[str, Any] = {}  # a state that waits for the first bucket

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls when a bucket's gradients are ready.

        Args:
            state: the model, whose parameters' names messages then have; anything else is fine.
            bucket: DDP's.
        """
        flat = bucket.buffer()
        means = self._start(flat.device)
        names = self._name(bucket.parameters(), state)
        layout = BucketLayout.of([(name, self._parameters[name]) for name in names])
        future = _new_future(flat.device)
        if not self._policy.staleness:
            means.start(flat, layout, lambda error: _resolve(future, flat, error))
            return future
        own = flat.clone()
        self._stale.add(means.start(own, layout), dict(zip(names, layout.views(own), strict=True)))
        self._waiting.append((layout, flat, future))
        if bucket.is_last():
            self._end_step()
        return future

    def flush(self) -> Iterator[None]:
        """Leaves what is under way in `p.grad`, one step's gradients after the other's.

        Make an update for each. Nothing is under way without staleness, nor known of it between
        `load_state_dict` and the next backward pass.
        """
        for landed in self._stale.flush():
            for name, gradient in landed.items():
                self._parameters[name].grad = gradient
            yield

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker has sent so far."""
        return 0 if self._means is None else self._means.sent_bytes

    def state_dict(self) -> dict[str, Any]:
        """What the next means depend on, such as what this worker, unlike others, has not sent."""
        if self._means is None:
            return dict(self._loaded)
        return {**self._means.state_dict(), "in_flight": self._stale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, by a worker of the same rank. Collective."""
        self._loaded = state
        if self._means is not None:
            self._load(self._means, state)

    def _load(self, means: GuestMeans, state: Mapping[str, Any]) -> None:
        means.load_state_dict(state)
        self._stale.load_state_dict(state["in_flight"])

    def _start(self, device: torch.device) -> GuestMeans:
        """At the first bucket, when there is a process group for sure."""
        if self._means is None:
            self._means = GuestMeans(self._comm or init(device=device), self._policy)
            if self._loaded:
                self._load(self._means, self._loaded)
        return self._means

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

    def _end_step(self) -> None:
        """Gives DDP the gradients of an earlier step, or has `p.grad` be None."""
        landed = self._stale.end_step()
        waiting, self._waiting = self._waiting, []
        for layout, flat, future in waiting:
            for name, view in zip(layout.names, layout.views(flat), strict=True):
                if landed is not None and name in landed:
                    view.copy_(landed[name])
                else:
                    view.zero_()
            future.set_result(flat)
        # DDP queues the end of its work after this one, and that sets `p.grad`.
        engine = Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(lambda: self._set_gradients(landed)))

    def _set_gradients(self, landed: Mapping[str, Tensor] | None) -> None:
        """DDP leaves alone what it believes unused, which may have been used when it was sent."""
        for name, p in self._parameters.items():
            if landed is None:
                p.grad = None
            elif name in landed and p.grad is not None:
                p.grad.copy_(landed[name])
            elif name in landed and landed[name].any():
                p.grad = landed[name].clone()


def _new_future(device: torch.device) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[device] if device.type == "cuda" else [])


def _resolve(
    future: torch.futures.Future[Tensor], result: Tensor, error: BaseException | None
) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)  # type: ignore[arg-type]
