"""Policies of exchanging gradients, and statistics of an exchange."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from allstep.comm import Communicator
from allstep.comm.algorithms import AllReduce, check_algorithm
from allstep.errors import CheckpointError, UsageError, check_choice, check_integer
from allstep.exchange.outer_optimizer import Nesterov
from allstep.exchange.wires import WireFormat, make_wire


@dataclass(frozen=True, kw_only=True)
class ExchangePolicy(ABC):
    """The base of the policies `Synchronous`, `Stale` and `LocalSGD`, with their common options.

    Args:
        reduction: "mean" makes `p.grad` the mean of the workers' gradients, "sum" their sum.
        compression: the format in which gradients are sent: "fp32" (their own dtype), "bf16",
            "fp16", "int8", "powersgd", "topk", "exact", or an object such as `PowerSGD(rank=2)`.
        algorithm: the all-reduce algorithm: "native" (torch's), "ring", "halving_doubling",
            "recursive_doubling", "hierarchical", "two_dimensional", "shared_memory", "dummy",
            "auto" (the fastest as measured at `attach`), a function that makes one for a
            communicator (only used for gradients), or None for a default that suits the machines.
        bucket_bytes: approximate size of the buckets in which gradients are sent while the backward
            pass computes others; "auto" measures the first steps and chooses; None for 8 MiB, or
            32 MiB if fp32 is summed in shared memory.
        overlap: False sends everything at the end of the backward pass.
        first_timeout_s: timeout of the first exchange, in which most mistakes show, if it is
            shorter than the communicator's.

    Raises:
        UsageError: if an argument is unknown or out of range.
    """

    reduction: Literal["mean", "sum"] = "mean"
    compression: str | WireFormat = "fp32"
    algorithm: str | Callable[[Communicator], AllReduce] | None = None
    bucket_bytes: int | Literal["auto"] | None = None
    overlap: bool = True
    first_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("mean", "sum"))
        make_wire(self.compression)  # checks the name
        if self.bucket_bytes not in ("auto", None):
            check_integer("bucket_bytes", self.bucket_bytes)
        if not self.first_timeout_s > 0:
            raise UsageError(
                f"`first_timeout_s` (={self.first_timeout_s!r}) must be a positive number."
            )
        if isinstance(self.algorithm, str):
            check_algorithm(self.algorithm)

    @property
    @abstractmethod
    def staleness(self) -> int:
        """The age of the mean in `p.grad`, in steps."""

    @property
    def wire_format(self) -> WireFormat:
        """The wire format for `compression`."""
        return make_wire(self.compression)

    @property
    def in_words(self) -> dict[str, str]:
        """The type and each field as text, the same in every process.

        >>> Synchronous(compression="int8").in_words["compression"]
        'Int8(block=256, error_feedback=True)'
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["compression"] = self.wire_format
        words = {name: _in_words(value) for name, value in values.items()}
        return {"policy": type(self).__name__, **words}

    def state_dict(self) -> dict[str, str]:
        """The options that gradients in flight, and those not sent yet, depend on."""
        words = self.in_words
        return {
            "compression": words["compression"],
            "staleness": str(self.staleness),
            "reduction": words["reduction"],
        }

    def check_state_dict(self, saved: Mapping[str, str]) -> None:
        """Checks that an exchange can continue from a state with the policy `saved`.

        Raises:
            CheckpointError: if its gradients can't be used with this policy.
        """
        for name, value in self.state_dict().items():
            if saved.get(name) != value:
                was = f"was {saved[name]}" if name in saved else "is missing"
                raise CheckpointError(
                    f"`{name}` (={value}) {was} in the checkpoint, so that its gradients mean"
                    f" something else; attach with the `{name}` of the checkpoint, or start the"
                    " exchange anew, without `load_state_dict`."
                )


@dataclass(frozen=True, kw_only=True)
class Synchronous(ExchangePolicy):
    """`p.grad` is the mean of this step's gradients.

    Args:
        plain: make one native all-reduce per tensor at the end of the backward pass; this is the
            reference for every other policy. It takes neither `compression` nor `algorithm`.

    Raises:
        UsageError: if an argument is unknown or out of range.
    """

    plain: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plain and (self.compression != "fp32" or self.algorithm is not None):
            raise UsageError(
                "`plain` (=True) is one native fp32 all-reduce a tensor; leave out `compression`"
                f" (={self.compression!r}) and `algorithm` (={self.algorithm!r}), or drop `plain`."
            )

    @property
    def staleness(self) -> int:
        """0: workers wait for the mean."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Stale(ExchangePolicy):
    """`p.grad` is the mean from some steps ago, so that an exchange may take whole steps.

    The first steps make no update. A layer that is frozen, or removed from the model, never gets
    gradients from before that, even if it is trained again later. [Note: stale timeline]

    Args:
        steps: age of the mean in steps, 1 or more; 1 is double buffering.

    Raises:
        UsageError: if an argument is unknown or out of range.

    >>> Stale(compression="fp16").staleness
    1
    """

    steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("steps", self.steps)

    @property
    def staleness(self) -> int:
        """The staleness, which is `steps`."""
        return self.steps


@dataclass(frozen=True, kw_only=True)
class LocalSGD(ExchangePolicy):
    """Workers train independently, and average their parameters every few global batches.

    Needs `attach(…, optimizer=…)`. Parameters are averaged in full precision.

    Args:
        sync_every: global batches between two averages of the parameters, 1 or more.
        local_after_step: number of first global batches whose gradients are exchanged (post-local
            SGD); `compression` applies to these.
        outer_optimizer: optimizer that is applied to a round's mean, such as DiLoCo's `Nesterov()`;
            None to take the mean itself.
        average_optimizer_state: whether the optimizer's moments are averaged, too.

    Raises:
        UsageError: if an argument is unknown or out of range.
    """

    sync_every: int
    local_after_step: int = 0
    outer_optimizer: Nesterov | None = None
    average_optimizer_state: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("sync_every", self.sync_every)
        check_integer("local_after_step", self.local_after_step, 0)
        if not isinstance(self.outer_optimizer, Nesterov | None):
            raise UsageError(
                f"`outer_optimizer` (={self.outer_optimizer!r}) must be None, or an"
                " `allstep.Nesterov`."
            )
        if not self.wire_format.is_lossless and not self.local_after_step:
            raise UsageError(
                f"`compression` (={self.compression!r}) is for gradients, and none are exchanged"
                f" with `local_after_step` (=0): parameters are averaged in full precision. Leave"
                " `compression` out."
            )

    @property
    def staleness(self) -> int:
        """0: workers wait for the mean."""
        return 0


def make_policy(
    *,
    staleness: int = 0,
    sync_every: int | None = None,
    average_optimizer_state: bool = False,
    **transport: Any,
) -> ExchangePolicy:
    """The policy for a set of numbers, such as command-line flags.

    Args:
        staleness: `steps` of `Stale`; 0 for another policy.
        sync_every: `sync_every` of `LocalSGD`; None for another policy.
        average_optimizer_state: as in `LocalSGD`; ignored by other policies.
        transport: the options of `ExchangePolicy`.

    Returns:
        A `Synchronous`, `Stale` or `LocalSGD` policy.

    Raises:
        UsageError: if both `staleness` and `sync_every` are given, or one is out of range.

    >>> make_policy(staleness=1) == Stale(), make_policy(sync_every=16) == LocalSGD(sync_every=16)
    (True, True)
    """
    check_integer("staleness", staleness, 0)
    if staleness and sync_every is not None:
        raise UsageError(
            f"`staleness` (={staleness}) and `sync_every` (={sync_every}) exclude each other:"
            " local steps exchange no gradients that could be late. Leave one of them out."
        )
    if sync_every is not None:
        return LocalSGD(
            sync_every=sync_every, average_optimizer_state=average_optimizer_state, **transport
        )
    return Stale(steps=staleness, **transport) if staleness else Synchronous(**transport)


def _in_words(value: object) -> str:
    """The value's repr, or its qualified name if the repr would contain a memory address."""
    if not callable(value) and type(value).__repr__ is not object.__repr__:
        return repr(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


@dataclass(frozen=True)
class ExchangeStats:
    """Statistics of an exchange since `attach`; seconds are measured on the host.

    Attributes:
        num_exchanges: number of exchanges of gradients.
        sent_bytes: bytes that this worker sent; for the native algorithm, which doesn't report
            them, those of a ring: 2 (size - 1) / size of the payload.
        collective_s: seconds in collectives, encoding and decoding.
        exposed_s: seconds among these in which the worker did nothing else.
        num_completed: exchanges of exact sums with a second message, because some gradient did not
            fit its grid.
    """

    num_exchanges: int = 0
    sent_bytes: int = 0
    collective_s: float = 0.0
    exposed_s: float = 0.0
    num_completed: int = 0
