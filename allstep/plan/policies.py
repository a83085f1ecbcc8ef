"""Ways to exchange gradients, described by what determines their time and bytes."""

from dataclasses import dataclass, replace

from allstep.errors import UsageError, check_choice, check_integer
from allstep.plan.algorithms import ALGORITHMS
from allstep.plan.compression import COMPRESSIONS

MIB = 2**20
# The size of allstep's first bucket, if others are larger.
FIRST_BUCKET_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """A way to exchange gradients; arguments are named as the flags of `allstep train`.

    Args:
        name: name to show in tables.
        compression: format in which gradients are sent.
        algorithm: one of the all-reduce algorithms, or "auto" for the fastest of them.
        bucket_bytes: size of a bucket; None for a single bucket at the end of backward, "auto" for
            the fastest of several sizes.
        first_bucket_bytes: size of a smaller first bucket; None for one like the others.
        staleness: age of the gradients in steps; 0 waits for this step's.
        sync_every: steps between exchanges; above 1 it is local SGD, which averages parameters.
        copies_back: whether means are copied from the buckets back to separate gradients.

    Raises:
        UsageError: for unknown names, or numbers that exclude each other.
    """

    name: str
    compression: str = "fp32"
    algorithm: str = "auto"
    bucket_bytes: int | str | None = "auto"
    first_bucket_bytes: int | None = None
    staleness: int = 0
    sync_every: int = 1
    copies_back: bool = False

    def __post_init__(self) -> None:
        check_choice("compression", self.compression, COMPRESSIONS)
        check_choice("algorithm", self.algorithm, (*ALGORITHMS, "auto"))
        if isinstance(self.bucket_bytes, str) and self.bucket_bytes != "auto":
            raise UsageError(f'`bucket_bytes` (={self.bucket_bytes!r}) must be bytes or "auto".')
        if isinstance(self.bucket_bytes, int):
            check_integer("bucket_bytes", self.bucket_bytes)
        check_integer("staleness", self.staleness, 0)
        check_integer("sync_every", self.sync_every)
        if self.sync_every > 1 and self.staleness:
            raise UsageError(
                f"`sync_every` (={self.sync_every}) and `staleness` (={self.staleness}) exclude"
                " each other: parameters that are averaged have no age."
            )

    @property
    def is_settled(self) -> bool:
        """Whether no argument is "auto"."""
        return "auto" not in (self.algorithm, self.bucket_bytes)

    @property
    def in_code(self) -> str:
        """The Python code for this policy.

        >>> print(PolicySpec(name="", compression="fp16", staleness=1).in_code)
        allstep.Stale(steps=1, compression="fp16", algorithm="auto", bucket_bytes="auto")
        """
        if self.sync_every > 1:
            return f"allstep.LocalSGD(sync_every={self.sync_every})"
        if self.algorithm == "native":
            return "torch.nn.parallel.DistributedDataParallel, or allstep.Synchronous()"
        kind = f"Stale(steps={self.staleness}, " if self.staleness else "Synchronous("
        compression = "" if self.compression == "fp32" else f'compression="{self.compression}", '
        return f'allstep.{kind}{compression}algorithm="auto", bucket_bytes="auto")'

    def with_choice(self, algorithm: str, bucket_bytes: int | None) -> "PolicySpec":
        """This policy with values for arguments that are "auto"; the first bucket is small."""
        settled = replace(self, algorithm=algorithm) if self.algorithm == "auto" else self
        if self.bucket_bytes != "auto":
            return settled
        first_bytes = None if bucket_bytes is None else min(bucket_bytes, FIRST_BUCKET_BYTES)
        return replace(settled, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bytes)


# torch's DistributedDataParallel by default, without `gradient_as_bucket_view`.
DDP = PolicySpec(
    name="DDP",
    algorithm="native",
    bucket_bytes=25 * MIB,
    first_bucket_bytes=MIB,
    copies_back=True,
)

# The simplest first: of two equally fast ones, the earlier one is recommended.
POLICIES = (
    DDP,
    PolicySpec(name="fp32"),
    PolicySpec(name="fp16", compression="fp16"),
    PolicySpec(name="int8", compression="int8"),
    PolicySpec(name="fp16 + staleness 1", compression="fp16", staleness=1),
    PolicySpec(name="local SGD, H = 16", sync_every=16),
)
