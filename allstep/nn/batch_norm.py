"""Batch norm over fixed groups of samples, independent of the workers."""

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from allstep.comm import Communicator
from allstep.errors import UsageError, check_integer, check_multiple, nearest_multiples
from allstep.nn.batch_norm_across import batch_norm_across, per_channel, statistics_dtype


def convert_batch_norm(
    model: nn.Module,
    comm: Communicator,
    group_size: int,
    *,
    micro_batch: int,
    global_batch: int | None = None,
) -> nn.Module:
    """Replaces each batch norm by one with statistics over groups of `group_size` samples.

    [Note: groups of samples] A group is `group_size` consecutive samples of the global batch, so
    that the model is the same on any number of workers:

    - `group_size` up to `micro_batch` (ghost batch norm): groups within a micro-batch. Nothing is
      sent.
    - `group_size` above it: groups of group_size / micro_batch micro-batches, of consecutive
      workers, which must all run at the same time. So each worker has to have one micro-batch in
      each step, and short steps, in which some have none, can't be: train with `drop_last=True`.
      A worker that calls the model without samples is fine. The result is that of
      `micro_batch=group_size` on fewer workers.

    The last group may be short. A call's statistics in the running ones are the mean over its
    groups, weighted by samples.

    Args:
        model: changed in place; parameters and buffers stay the same tensors.
        comm: the workers; all of them must call this.
        group_size: samples that share statistics.
        micro_batch: samples that a worker puts through the model at once.
        global_batch: samples of one optimizer step; needed if `group_size` exceeds `micro_batch`.

    Returns:
        The model; another module only if it is itself a batch norm.

    Raises:
        UsageError: if groups of `group_size` would depend on the workers, or if a batch norm has
            no shape yet, or is more than torch's own.

    Call it before `attach`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> comm = Communicator.single_process()
    >>> convert_batch_norm(model, comm, group_size=16, micro_batch=32)[1].group_size
    16

    Source: Hoffer et al., 2017, arXiv:1705.08741 (ghost batch norm).
    """
    check_integer("group_size", group_size)
    check_integer("micro_batch", micro_batch)
    for name, module in model.named_modules():
        if isinstance(module, _LazyNormBase):
            raise UsageError(
                f"`model`: {name or 'the module'} is a {type(module).__name__} without a shape;"
                " call the model once on a batch first."
            )
        if isinstance(module, _BatchNorm):
            _refuse_what_would_be_lost(name or "the module", module)
    peers = _peers(comm, group_size, micro_batch, global_batch)
    return _converted(model, peers, group_size, micro_batch, {})


class GroupedBatchNorm(_BatchNorm):
    """Batch norm over groups of samples [Note: groups of samples]; `convert_batch_norm` makes it.

    Args:
        norm: whose parameters, buffers and settings it takes over.
        group_size: samples that share statistics.
        micro_batch: most samples in a training call.
        peers: the workers of this worker's group, if groups are larger than a micro-batch.
    """

    def __init__(
        self, norm: _BatchNorm, group_size: int, micro_batch: int, peers: Communicator | None
    ) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, affine=False, device="meta")
        self.affine, self.track_running_stats = norm.affine, norm.track_running_stats
        self._parameters.update(norm._parameters)
        self._buffers.update(norm._buffers)
        self.training = norm.training
        self.group_size = group_size
        self._micro_batch = micro_batch
        self._across = None if peers is None else _Across(peers)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x (samples, channels, *)."""
        self._check_input_dim(x)
        if not self.training:
            mean, var = self.running_mean, self.running_var
            if mean is None:  # without running statistics evaluation is as training is
                return self._within(x)
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        if len(x) > self._micro_batch:
            raise UsageError(
                f"A training batch has {len(x)} samples, but `micro_batch` of `convert_batch_norm`"
                f" is {self._micro_batch}; give it what goes through the model at once."
            )
        if self._across is None:
            return self._within(x)
        y, mean, var, count = self._across(x, self.weight, self.bias, self.eps)
        self._take_in(mean, var, count.clamp(max=1))
        return y

    @property
    def has_peers(self) -> bool:
        """Whether a group has samples of several workers."""
        return self._across is not None

    def leave_peers(self) -> None:
        """Makes groups of this worker's samples only, to call the module on one worker."""
        self._across = None

    def extra_repr(self) -> str:
        """The module's settings."""
        given: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{given}, group_size={self.group_size}"

    def _within(self, x: Tensor) -> Tensor:
        """Normalises the groups within this call in turn, since torch's kernels take no groups."""
        channels, dtype = self.num_features, statistics_dtype(x)
        total = x.new_zeros(2, channels, dtype=dtype)
        weight = None if self.weight is None else self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        ys = []
        for group in torch.split(x, self.group_size):
            last = x.new_zeros(2, channels, dtype=dtype)
            mean, var = last
            if group.numel() == channels:
                mean.copy_(group.detach().view(-1))
                ys.append(_normalised_alone(group, weight, bias))
            else:
                ys.append(F.batch_norm(group, mean, var, weight, bias, True, 1.0, self.eps))
            if len(x):
                total.add_(last, alpha=len(group) / len(x))
        if len(x):
            self._take_in(total[0], total[1])
        return torch.cat(ys)

    def _take_in(self, mean: Tensor, var: Tensor, weight: Tensor | float = 1.0) -> None:
        """Updates the running statistics by torch's rule, one step of an exponential average.

        The `weight` is 0 where no worker of a group had samples: that was no step.
        """
        if self.running_mean is None or self.running_var is None or not self.track_running_stats:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(weight.long() if isinstance(weight, Tensor) else 1)
            if momentum is None:
                momentum = 1 / max(1, int(self.num_batches_tracked))
        with torch.no_grad():
            share = (momentum or 0.0) * weight
            for running, last in ((self.running_mean, mean), (self.running_var, var)):
                running.mul_(1 - share).add_(last * share)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"The input's shape is {tuple(input.shape)}; expected (samples,"
                f" {self.num_features}, …)."
            )


class _Across:
    """`batch_norm_across` with the peers, which copies of the model share."""

    def __init__(self, peers: Communicator) -> None:
        self._peers = peers

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return batch_norm_across(self._peers, x, weight, bias, eps)

    def __deepcopy__(self, _memo: object) -> "_Across":
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "A batch norm whose groups span workers can't be pickled with its connections: save"
            " the model's `state_dict()`, or call `leave_peers()` on each `GroupedBatchNorm` of a"
            " copy."
        )


def _refuse_what_would_be_lost(name: str, norm: _BatchNorm) -> None:
    """Raises UsageError unless the module is no more than one of torch's own batch norms."""
    kind = type(norm).__name__
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward, GroupedBatchNorm.forward)
    if type(norm).forward not in known:
        raise UsageError(
            f"`model`: {name} is a {kind}, whose own `forward` would be lost; make it one of"
            " torch's batch norms, followed by what it does besides."
        )
    if norm._modules:
        raise UsageError(
            f"`model`: {name} ({kind}) has modules of its own ({', '.join(norm._modules)}), which"
            " would be lost; take them off first, as by `parametrize.remove_parametrizations`."
        )
    if any(hooks for name, hooks in vars(norm).items() if name.endswith("_hooks")):
        raise UsageError(
            f"`model`: {name} ({kind}) has hooks, which would be lost; convert first, before"
            " `attach` as well, and then register them."
        )


def _normalised_alone(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The normalised group of one value per channel, which torch's kernel refuses."""
    y = x - x if weight is None else (x - x) * per_channel(weight, x)
    y = y if bias is None else y + per_channel(bias, x)
    return y.to(x.dtype)


def _peers(
    comm: Communicator, group_size: int, micro_batch: int, global_batch: int | None
) -> Communicator | None:
    """The workers whose micro-batches form a group; None if a micro-batch is enough."""
    if group_size <= micro_batch:
        if micro_batch % group_size:
            divisors = [n for n in range(1, micro_batch + 1) if micro_batch % n == 0]
            below = max(n for n in divisors if n < group_size)
            above = min(n for n in divisors if n > group_size)
            raise UsageError(
                f"`group_size` (={group_size}) must divide `micro_batch` (={micro_batch}); nearest:"
                f" {below}, {above}."
            )
        return None
    check_multiple("group_size", group_size, "micro_batch", micro_batch)
    if global_batch != comm.size * micro_batch:
        raise UsageError(
            f"`group_size` (={group_size}) exceeds `micro_batch` (={micro_batch}), so that each"
            f" worker must have one micro-batch in each step: `global_batch` (={global_batch}) must"
            f" be {comm.size} x {micro_batch} = {comm.size * micro_batch}. Or take `micro_batch`"
            f" = {group_size}."
        )
    num_peers = group_size // micro_batch
    if comm.size % num_peers:
        raise UsageError(
            f"`group_size` (={group_size}) takes {num_peers} workers at `micro_batch`"
            f" (={micro_batch}), and {comm.size} workers don't divide in such groups;"
            f" nearest numbers of workers: {nearest_multiples(comm.size, num_peers)}."
        )
    # Its own channel, for in a backward pass the exchange may be using the given one.
    return comm.split(color=comm.rank // num_peers)


def _converted(
    module: nn.Module,
    peers: Communicator | None,
    group_size: int,
    micro_batch: int,
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    """The module with its batch norms replaced; one that is used twice stays one."""
    if module not in done:
        if isinstance(module, _BatchNorm):
            done[module] = GroupedBatchNorm(module, group_size, micro_batch, peers)
        else:
            done[module] = module
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = _converted(child, peers, group_size, micro_batch, done)
    return done[module]
