"""How gradients might be exchanged, as far as time and bytes are concerned."""

from dataclasses import dataclass, replace

from allstep.errors import UsageError, check_choice, check_integer
from allstep.plan.algorithms import ALGORITHMS
from allstep.plan.compression import COMPRESSIONS

MIB = 2**20
# allstep's own first bucket, where others are larger.
FIRST_BUCKET_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """An exchange; names are those of the flags of `allstep train`.

    Args:
        name: for tables.
        compression: format of what crosses the network.
        algorithm: one of the all-reduce algorithms, or "auto" for the fastest of them.
        bucket_bytes: of a bucket; None for a single one at the end of backward,
            "auto" for the fastest of several.
        first_bucket_bytes: a smaller first bucket; None for one like the others.
        staleness: the age of the gradients in steps; 0 waits for this step's.
        sync_every: steps between exchanges; above 1 it is local SGD, which averages parameters.
        copies_back: whether means are copied from buckets to gradients that lie elsewhere.

    Raises:
        UsageError: for unknown names, or numbers that don't go together.
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
        """Whether nothing is left to choose."""
        return "auto" not in (self.algorithm, self.bucket_bytes)

    @property
    def in_code(self) -> str:
        """What a user writes for it.

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
        """This policy with what was left to choose settled; the first bucket is a small one."""
        settled = replace(self, algorithm=algorithm) if self.algorithm == "auto" else self
        if self.bucket_bytes != "auto":
            return settled
        first_bytes = None if bucket_bytes is None else min(bucket_bytes, FIRST_BUCKET_BYTES)
        return replace(settled, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bytes)


# torch's DistributedDataParallel as it is: without `gradient_as_bucket_view`.
DDP = PolicySpec(
    name="DDP",
    algorithm="native",
    bucket_bytes=25 * MIB,
    first_bucket_bytes=MIB,
    copies_back=True,
)

# The simplest first: of two that are as fast, the earlier is recommended.
POLICIES = (
    DDP,
    PolicySpec(name="fp32"),
    PolicySpec(name="fp16", compression="fp16"),
    PolicySpec(name="int8", compression="int8"),
    PolicySpec(name="fp16 + staleness 1", compression="fp16", staleness=1),
    PolicySpec(name="local SGD, H = 16", sync_every=16),
)
