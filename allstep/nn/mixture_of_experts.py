"""Mixture of experts: a layer whose experts are divided over the workers."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # imports what `torch.compiler.disable` does, but late
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from allstep.comm import Communicator, DividedModules, fsdp_modules
from allstep.comm.agreement import agree
from allstep.comm.autograd import all_to_all
from allstep.comm.ddp import is_in_ddp
from allstep.comm.layout import dtype_name, dtype_of_name
from allstep.device import drawn_seed
from allstep.errors import UsageError, check_type, nearest_multiples
from allstep.nn.chain import seeded
from allstep.nn.expert_workers import ExpertWorkers
from allstep.nn.replicated import agreed_seed, seed_at


class MixtureOfExperts(nn.Module):
    """Sends each token to the `top_k` experts that a router chooses, on whichever worker they are.

    With p = softmax(W x) over the experts and T(x) the `top_k` largest of them

        y = sum_{i in T(x)} g_i(x) E_i(x),    g_i = p_i                          for top_k = 1
                                              g_i = p_i / sum_{j in T(x)} p_j    above

    Each worker has copies * num_experts / size consecutive experts; the router is on all of them.
    Tokens go to the workers that have their experts and come back, their gradients too: two
    `all_to_all` in the forward pass, two in backward, among the size / copies workers with
    consecutive ranks that have a copy of all experts.

    [Note: experts and micro-batches] The model is the same on any number of workers. An expert is
    called once for each call of the layer on any worker, with that call's tokens only: its results
    and random numbers (dropout) depend on the micro-batch and the expert. The capacity and the
    balance loss are computed from the call's own tokens. An expert's gradient is that of the sum of
    all workers' losses; it exists only on the workers that have the expert
    [Note: divided parameters].

    All workers construct the layer; those of a copy call it equally often and in the same order. In
    `steps` and the `Evaluator` micro-batches need not divide evenly: a worker with fewer of them
    runs its experts for the others [Note: rounds without samples]; then each layer must be called
    once, in the order in which the model holds the layers.

    The names of the parameters, such as `experts.3.weight`, have the expert's number among all, so
    that the union of the workers' state dicts is the state dict of one worker's model.

    Args:
        expert: makes an expert, which maps [tokens, in_features] to the same shape; called for
            this worker's experts only, each under a random state of its number.
        comm: the workers; pass the same to `attach`.
        in_features: number of features of a token.
        num_experts: number of different experts; a multiple of the number of workers in a copy.
        top_k: number of experts per token.
        capacity_factor: limits an expert to ceil(capacity_factor * top_k * tokens / num_experts)
            tokens of a call, first choices before second ones, then in the tokens' order; the
            others are dropped, which leaves g_i E_i(x) out of the sum. None for no limit.
        copies: number of copies of each expert, on different workers; a divisor of the number of
            workers. Use more than one for more workers than experts, or to keep tokens within a
            host.
        seed: seed of the initial values; drawn from torch's generator on rank 0 if None.
        seeded: sets the random state of an expert: (seed, device) -> context manager.

    Attributes:
        experts: this worker's experts, by number.
        num_dropped: number of this worker's tokens in the last call for which an expert had no
            room, counted once per expert.

    Raises:
        UsageError: if the experts can't be divided equally, a number is out of range, or an expert
            has batch norm with running statistics, a lazy parameter, or a parameter of another
            expert.
        DisagreementError: if the arguments differ between workers.

    Example:
        >>> comm = Communicator.single_process()
        >>> layer = MixtureOfExperts(lambda: nn.Linear(4, 4), comm, 4, num_experts=8, top_k=2)
        >>> y, balance_loss = layer(torch.randn(3, 5, 4))
        >>> y.shape
        torch.Size([3, 5, 4])
        >>> loss = y.square().mean() + 0.01 * balance_loss

    Sources: Fedus et al., 2021, arXiv:2101.03961 (eq. 2 to 4); Lepikhin et al., 2020,
    arXiv:2006.16668 (two experts, order of the capacity); Jiang et al., 2024, arXiv:2401.04088
    (weights of more than one).
    """

    def __init__(
        self,
        expert: Callable[[], nn.Module],
        comm: Communicator,
        in_features: int,
        num_experts: int,
        *,
        top_k: int = 1,
        capacity_factor: float | None = None,
        copies: int = 1,
        seed: int | None = None,
        seeded: Callable[[int, torch.device], AbstractContextManager[None]] = seeded,
    ) -> None:
        super().__init__()
        check_type("comm", comm, Communicator, "that of `allstep.init()`, or of an axis of a mesh")
        details = [
            ("in_features", str(in_features)),
            ("num_experts", str(num_experts)),
            ("top_k", str(top_k)),
            ("capacity_factor", str(capacity_factor)),
            ("copies", str(copies)),
        ]
        fault = _fault(expert, in_features, num_experts, top_k, capacity_factor, copies, comm.size)
        agree(comm, "make a MixtureOfExperts", details, fault=fault)
        self.in_features, self.num_experts, self.top_k = in_features, num_experts, top_k
        self.capacity_factor = capacity_factor
        self.num_dropped = 0
        self._is_serving = False
        workers = ExpertWorkers.of(comm, copies)
        self._rounds = workers.rounds
        self._number = self._rounds.new_number()
        self._seeded = seeded
        seed = agreed_seed(comm, seed)
        own = workers.comm or comm
        num_local = num_experts // own.size
        self._numbers = range(own.rank * num_local, (own.rank + 1) * num_local)
        with seeded(seed_at(seed, "router"), comm.device):
            self.router = nn.Linear(in_features, num_experts, bias=False)
        names = [str(number) for number in range(num_experts)]
        self.experts = DividedModules(own, names, workers=comm, copies=workers.copies)
        for number in self._numbers:
            with seeded(seed_at(seed, number), comm.device):
                made = expert()
            check_type("expert()", made, nn.Module, "return the module that the function makes")
            self.experts[str(number)] = made
        _check_experts(self.experts)

    @_disable_dynamo
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the layer; all workers call it.

        Args:
            x: [*, in_features]; may have no tokens.

        Returns:
            y, of x's shape; and the balance loss, a scalar that is 1 if the experts are used evenly
            and larger if not. With f_i the share of the call's choices that fall on expert i,
            including dropped ones, and P_i the mean of p_i over its tokens

                balance_loss = num_experts * sum_i f_i P_i

            Add a small multiple of it, such as 0.01, to the loss.

        Raises:
            UsageError: if x has another number of features, an expert changes the shape, or the
                layer is inside DDP.
            DisagreementError: if another worker calls another layer, or calls it in another mode.
        """
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise UsageError(
                f"`x` has shape {tuple(x.shape)}; its last dimension must be `in_features`"
                f" (={self.in_features})."
            )
        if self.experts.comm.size > 1 and is_in_ddp(self):
            raise UsageError(
                "A MixtureOfExperts was called by a DistributedDataParallel around it, which"
                " averages the experts of different workers: call `allstep.attach(model, comm)`"
                " in place of DDP."
            )
        if self._is_serving:
            none = x.reshape(-1, self.in_features)[:0]
            # FSDP2 sums the router's gradient over all workers, or over none.
            zero = self.router(none).sum()  # first, as for tokens: FSDP2 may shard it by itself
            zero = zero + self._serve(none)
            return x + zero, 1 + zero
        tokens = x.reshape(-1, self.in_features)
        logits = self.router(tokens)
        p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, choices = p.topk(self.top_k)  # [tokens, top_k]
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        num_taken, places, counts = self._in_order_of_experts(choices)
        seed = drawn_seed()
        # A place for each choice, first choices first: no sum, here or in backward, whose order
        # threads would choose.
        copies = tokens.expand(self.top_k, *tokens.shape).reshape(-1, self.in_features)
        found = self._through_experts(copies[places], num_taken, seed)
        factors = weights.t().reshape(-1, 1)[places].to(found.dtype)
        chosen = found.new_zeros(self.top_k * len(tokens), self.in_features)
        y = chosen.index_copy(0, places, found * factors).view(self.top_k, *tokens.shape)
        return y.sum(0).view(x.shape), _balance_loss(p, counts)

    def extra_repr(self) -> str:
        """The module's settings."""
        return (
            f"in_features={self.in_features}, num_experts={self.num_experts}, top_k={self.top_k},"
            f" capacity_factor={self.capacity_factor}"
        )

    def serve(self) -> Tensor:
        """Takes part in other workers' call of the layer, without tokens of its own.

        Returns:
            A zero to call `backward` on.
        """
        return self._serve(self.router.weight.new_zeros(0, self.in_features))

    def _serve(self, no_tokens: Tensor) -> Tensor:
        return self._through_experts(no_tokens, [0] * self.num_experts, seed=0).sum()

    def _in_order_of_experts(self, choices: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """The choices that are not dropped, in the order of the experts.

        Args:
            choices: expert numbers, [tokens, top_k].

        Returns:
            The number of tokens that each expert takes; their indices among all choices (first
            choices first), in the order of the experts; and how often each expert was chosen.
        """
        chosen = choices.t().reshape(-1)
        counts = chosen.bincount(minlength=self.num_experts)
        places = chosen.argsort(stable=True)
        if self.capacity_factor is None:
            taken = counts
        else:
            share = self.capacity_factor * chosen.numel() / self.num_experts
            taken = counts.clamp(max=math.ceil(share))
            starts = (counts.cumsum(0) - counts)[chosen[places]]
            has_room = torch.arange(len(places), device=places.device) - starts < math.ceil(share)
            places = places[has_room]
        self.num_dropped = chosen.numel() - len(places)
        return taken.tolist(), places, counts

    def _through_experts(self, sent: Tensor, num_sent: Sequence[int], seed: int) -> Tensor:
        """The experts' outputs for tokens, on whichever workers the experts are. Collective.

        Args:
            sent: [tokens, in_features], in the order of the experts.
            num_sent: number of tokens for each expert.
            seed: seed of the experts' random numbers.

        Returns:
            [tokens, in_features], in the same order.
        """
        calls = self._meet(_Call.of(num_sent, seed, sent.device))
        num_local = len(self._numbers)
        sizes = [sum(num_sent[i : i + num_local]) for i in range(0, self.num_experts, num_local)]
        received = all_to_all(self._rounds.channel, torch.split(sent, sizes))
        made = [self._run(rank, call, received[rank]) for rank, call in enumerate(calls)]
        return torch.cat(all_to_all(self._rounds.channel, made))

    def _meet(self, own: "_Call") -> list["_Call"]:
        """All workers' calls, by rank. Collective if there are several."""
        if self.experts.comm.size == 1:
            return [own]
        place = f"MixtureOfExperts {self._number}"
        place += " in train mode" if self.training else " in eval mode"
        place += " with gradients" if torch.is_grad_enabled() else " without gradients"
        told = (list(own.num_sent), own.seed, own.autocast)
        return [_Call(*other) for other in self._rounds.gather(place, told)]

    def _run(self, rank: int, call: "_Call", tokens: Tensor) -> Tensor:
        """This worker's experts on the tokens of one call; [Note: experts and micro-batches]."""
        parts = torch.split(tokens, [call.num_sent[number] for number in self._numbers])
        made = []
        for number, part in zip(self._numbers, parts, strict=True):
            y = part
            if len(part):
                with call.context(self._seeded, number, part.device):
                    # A product of few rows has other last bits where memory begins elsewhere.
                    y = self.experts.call(str(number), part.clone(), rank)
            _check_output(y, part)
            made.append(y.to(part.dtype))
        return torch.cat(made)


@dataclass(frozen=True)
class _Call:
    """A worker's description of its call of a layer, for the other workers.

    Attributes:
        num_sent: number of tokens for each expert.
        seed: seed of the experts' random numbers.
        autocast: name of the dtype of the call's autocast; None without autocast.
    """

    num_sent: Sequence[int]
    seed: int
    autocast: str | None

    @classmethod
    def of(cls, num_sent: Sequence[int], seed: int, device: torch.device) -> "_Call":
        """The description of a call in the current autocast context."""
        autocast = None
        if torch.is_autocast_enabled(device.type):
            autocast = dtype_name(torch.get_autocast_dtype(device.type))
        return cls(num_sent, seed, autocast)

    @contextmanager
    def context(
        self,
        seeded: Callable[[int, torch.device], AbstractContextManager[None]],
        expert: int,
        device: torch.device,
    ) -> Iterator[None]:
        """The context in which an expert runs as on the worker that makes the call."""
        dtype = None if self.autocast is None else dtype_of_name(self.autocast)
        with ExitStack() as stack:
            stack.enter_context(seeded(seed_at(self.seed, expert), device))
            stack.enter_context(torch.autocast(device.type, dtype, enabled=dtype is not None))
            yield


def _layers(model: nn.Module) -> list[MixtureOfExperts]:
    """The layers whose experts are on several workers."""
    modules = (m for m in model.modules() if isinstance(m, MixtureOfExperts))
    return [layer for layer in modules if layer.experts.comm.size > 1]


def serve_others(
    model: nn.Module, num_calls: int, begin_micro_batch: Callable[[], None] = lambda: None
) -> None:
    """Runs this worker's experts for calls that only others make. Collective if there are any.

    [Note: rounds without samples] Workers meet in each call of a layer with experts. Those with
    fewer micro-batches begin with calls without samples, so that all reach their last micro-batch,
    with which the exchange overlaps, in the same round. If FSDP2 has sharded the model they end
    with calls of the whole model. [Note: fully sharded models]

    Args:
        model: the same on all workers; in grad mode its backward pass runs, too.
        num_calls: number of calls that this worker is about to make.
        begin_micro_batch: called before the calls of each micro-batch.
    """
    layers = _layers(model)
    if not layers or fsdp_modules(model):
        return
    told = layers[0]._rounds.gather("the beginning of a global batch or evaluation", num_calls)
    for _ in range(max(told) - num_calls):
        begin_micro_batch()
        delegates = [layer.serve() for layer in layers]
        for delegate in reversed(delegates):
            if delegate.requires_grad:
                delegate.backward()  # type: ignore[no-untyped-call]


@contextmanager
def serving(model: nn.Module) -> Iterator[None]:
    """Encloses a call in which layers only run their experts for other workers' calls.

    The layers return the call's own samples unchanged. [Note: rounds without samples]
    """
    layers = _layers(model)
    for layer in layers:
        layer._is_serving = True
    try:
        yield
    finally:
        for layer in layers:
            layer._is_serving = False


def _balance_loss(p: Tensor, counts: Tensor) -> Tensor:
    """num_experts * sum_i f_i P_i; 0 without tokens."""
    f = counts.to(p.dtype) / counts.sum().clamp(min=1)
    return p.shape[-1] * (f * p.sum(0)).sum() / max(1, len(p))


def _check_output(y: object, x: Tensor) -> None:
    if isinstance(y, Tensor) and y.shape == x.shape:
        return
    what = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
    raise UsageError(
        f"`expert` returned {what} for shape {tuple(x.shape)}; make one that returns a tensor of"
        " the same shape."
    )


def _check_experts(experts: DividedModules) -> None:
    owners = Counter(id(p) for expert in experts.values() for p in expert.parameters())
    if any(num_owners > 1 for num_owners in owners.values()):
        raise UsageError(
            "`expert` returned modules with the same parameters; have it make a new one each time."
        )
    for name, p in experts.named_parameters():
        if is_lazy(p):
            raise UsageError(
                f"`expert` has a parameter without a shape ({name}), which it would get with its"
                " first token; use modules that know theirs."
            )
    for name, module in experts.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise UsageError(
                f"`expert` has batch norm with running statistics ({name}), which would be of other"
                " samples on each worker; use layer norm."
            )


def _fault(
    expert: object,
    in_features: int,
    num_experts: int,
    top_k: int,
    capacity_factor: float | None,
    copies: int,
    size: int,
) -> str | None:
    """The error message for wrong arguments."""
    if isinstance(expert, nn.Module) or not callable(expert):
        return (
            f"`expert` (a {type(expert).__name__}) must be a function that makes an expert, such as"
            f" `lambda: nn.Linear({in_features}, {in_features})`."
        )
    for name, value in (
        ("in_features", in_features),
        ("num_experts", num_experts),
        ("top_k", top_k),
        ("copies", copies),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"`{name}` (={value!r}) must be an int of at least 1."
    if size % copies:
        return f"`copies` (={copies}) must divide the number of workers, {size}."
    if num_experts % (size // copies):
        of_a_copy = f"{size // copies} workers" + (" of a copy" if copies > 1 else "")
        nearest = nearest_multiples(num_experts, size // copies)
        least = size // math.gcd(num_experts, size)
        return (
            f"`num_experts` (={num_experts}) must be a multiple of the {of_a_copy}; nearest:"
            f" {nearest}. Or take `copies={least}`, of each expert."
        )
    if top_k > num_experts:
        return f"`top_k` (={top_k}) must be at most `num_experts` (={num_experts})."
    if capacity_factor is not None and not (
        isinstance(capacity_factor, (int, float)) and 0 < capacity_factor < math.inf
    ):
        return (
            f"`capacity_factor` (={capacity_factor!r}) must be positive, 1.25 say, or None for no"
            " limit."
        )
    return None
