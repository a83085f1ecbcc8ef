"""How gradients are exchanged, and what the exchange has cost so far."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeGuard

from allstep.comm import Communicator
from allstep.comm.algorithms import AllReduce, check_algorithm
from allstep.errors import CheckpointError, UsageError
from allstep.exchange.outer import Nesterov
from allstep.exchange.wires import WireFormat, make_wire

__all__ = ["ExchangePolicy", "ExchangeStats"]


@dataclass(frozen=True, kw_only=True)
class ExchangePolicy:
    """How gradients are exchanged.

    Args:
        reduction: "mean" makes `p.grad` the mean of the workers' gradients, "sum" their sum.
        wire: what travels: "fp32" (gradients in their own dtype), "bf16", "fp16", "int8",
            "powersgd", "topk", "exact", or a format such as `PowerSGD(rank=2)`.
        staleness: `p.grad` is the mean of this many steps ago, so that an exchange may take
            whole steps; 1 is double buffering. The first steps make no update. [Note: stale
            timeline]
        algorithm: how sums are taken: "native" (torch's), "ring", "halving_doubling",
            "recursive_doubling", "hierarchical", "two_dimensional", "shared_memory", "dummy",
            "auto" (the fastest as measured at `attach`), what makes one of a communicator (for
            gradients alone), or None for what suits the machines: see `default_algorithm`.
        bucket_bytes: gradients are sent in pieces of about this size, while the backward pass
            still makes others; "auto" measures the first steps and chooses; None for 8 MiB, and
            32 MiB where fp32 is summed in shared memory.
        every: workers take the mean of their parameters after this many global batches, in full
            precision, and none of gradients between (local SGD); needs `attach(…, optimizer=…)`.
        after: global batches before the first local one, whose gradients are exchanged
            (post-local SGD).
        outer: how a round's mean is used, such as DiLoCo's `Nesterov()`; None takes it as it is.
        average_optimizer_state: whether the optimizer's moments become their mean, too.
        overlap: False sends everything at the end of the backward pass.
        plain: one native all-reduce a tensor at the end of the backward pass; the
            specification of everything else, which it excludes.
        first_timeout_s: how long the first exchange may take, if the communicator's timeout is
            longer; a mistake shows there first.

    Raises:
        UsageError: if an argument is unknown or out of range.

    >>> ExchangePolicy(wire="fp16", staleness=1).staleness
    1
    """

    reduction: Literal["mean", "sum"] = "mean"
    wire: str | WireFormat = "fp32"
    staleness: int = 0
    algorithm: str | Callable[[Communicator], AllReduce] | None = None
    bucket_bytes: int | Literal["auto"] | None = None
    every: int = 1
    after: int = 0
    outer: Nesterov | None = None
    average_optimizer_state: bool = False
    overlap: bool = True
    plain: bool = False
    first_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f'`reduction` (={self.reduction!r}) must be "mean" or "sum".')
        if not _is_int(self.staleness) or self.staleness < 0:
            raise UsageError(f"`staleness` (={self.staleness!r}) must be an int of 0 or more.")
        if self.bucket_bytes not in ("auto", None) and (
            not _is_int(self.bucket_bytes) or self.bucket_bytes < 1
        ):
            raise UsageError(
                f'`bucket_bytes` (={self.bucket_bytes!r}) must be a positive int, "auto" or None.'
            )
        if not self.first_timeout_s > 0:
            raise UsageError(
                f"`first_timeout_s` (={self.first_timeout_s!r}) must be a positive number."
            )
        for name, smallest in (("every", 1), ("after", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < smallest:
                raise UsageError(f"`{name}` (={value!r}) must be an int of {smallest} or more.")
        if self.is_local and self.staleness:
            raise UsageError(
                f"Local SGD (`every`={self.every}, `outer`={self.outer!r}) and `staleness`"
                f" (={self.staleness}) exclude each other:"
                " local steps have nothing to wait for."
            )
        if not make_wire(self.wire).is_lossless and self.is_local and not self.after:
            raise UsageError(
                f"`wire` (={self.wire!r}) is for gradients, and with `every` (={self.every}) and no"
                " `after` none are exchanged: parameters are averaged in full precision. Leave"
                " `wire` out."
            )
        if isinstance(self.algorithm, str):
            check_algorithm(self.algorithm)
        if self.plain and (self.wire != "fp32" or self.staleness or self.algorithm is not None):
            raise UsageError(
                "`plain` (=True) is one native fp32 all-reduce a tensor; leave `wire`, `staleness`"
                " and `algorithm` alone, or drop `plain`."
            )

    @property
    def is_local(self) -> bool:
        """Whether workers take steps alone."""
        return self.every > 1 or self.outer is not None

    @property
    def wire_format(self) -> WireFormat:
        """The format that `wire` means."""
        return make_wire(self.wire)

    @property
    def in_words(self) -> dict[str, str]:
        """Field -> its value, in words that are the same in every process.

        >>> ExchangePolicy(wire="int8").in_words["wire"]
        'Int8(block=256, error_feedback=True)'
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["wire"] = self.wire_format
        return {name: _in_words(value) for name, value in values.items()}

    def state_dict(self) -> dict[str, str]:
        """What gradients in flight, and those not sent yet, depend on."""
        return {name: self.in_words[name] for name in ("wire", "staleness", "reduction")}

    def check_state_dict(self, saved: Mapping[str, str]) -> None:
        """Checks that an exchange can go on where `saved` was taken.

        Raises:
            CheckpointError: if another policy made those gradients.
        """
        for name, value in self.state_dict().items():
            if saved.get(name) != value:
                was = f"was {saved[name]}" if name in saved else "is not told"
                raise CheckpointError(
                    f"`{name}` (={value}) {was} in the checkpoint, so that its gradients mean"
                    f" something else; attach with the `{name}` of the checkpoint, or start the"
                    " exchange anew, without `load_state_dict`."
                )


def _in_words(value: object) -> str:
    """Its repr, unless that tells where it lies in memory."""
    if not callable(value) and type(value).__repr__ is not object.__repr__:
        return repr(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class ExchangeStats:
    """What an exchange has done since `attach`; seconds are the host's.

    Attributes:
        num_exchanges: exchanges of gradients.
        sent_bytes: bytes that this worker sent; with the native algorithm, which doesn't tell,
            those of a ring: 2 (size - 1) / size of the payload.
        collective_s: seconds in collectives, encoding and decoding.
        exposed_s: seconds of those in which the worker did nothing else.
    """

    num_exchanges: int = 0
    sent_bytes: int = 0
    collective_s: float = 0.0
    exposed_s: float = 0.0
