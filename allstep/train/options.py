"""Options of the training loop, for any recipe; every field is a flag of `allstep train`."""

from dataclasses import dataclass
from typing import Literal, cast

from allstep.data.sampler import check_batches
from allstep.data.shares import SharesArgument
from allstep.errors import UsageError, check_integer
from allstep.exchange import ExchangePolicy, make_policy
from allstep.train.best import BestMetric

_SPARSE = ("powersgd", "topk")  # what they omit is sent in later steps

_AT_LEAST_ONE = (
    "epochs",
    "log_every_steps",
    "evaluate_every_epochs",
    "keep_checkpoints",
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How long, on which batches, in which precision, and what is kept on disk.

    Raises:
        UsageError: if a value is out of range or the batches don't fit each other.
    """

    epochs: int = 5
    """Passes over the training set."""

    global_batch: int = 128
    """Samples of one optimizer step, over all workers together."""

    micro_batch: int = 32
    """Samples that go through the model at once; batch norm and dropout see this unit."""

    drop_last: bool = False
    """Drop an epoch's last incomplete global batch instead of training on it."""

    seed: int = 0
    """Start of every random state: initial weights, order, augmentation, dropout."""

    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Compute dtype; bfloat16 and float16 are autocast, float16 with a gradient scaler."""

    compile: bool = False
    """Compile the model with torch.compile."""

    channels_last: bool = False
    """Keep images and convolution weights in the channels-last layout."""

    clip_norm: float | None = None
    """Largest L2 norm of the global gradient; longer ones are scaled down to it."""

    nonfinite: Literal["raise", "skip", "propagate"] = "raise"
    """What a gradient with NaN or infinity does: stop and name it, leave the step out and count
    it, or nothing. With float16 the gradient scaler leaves such steps out."""

    compression: str = "fp32"
    """How gradients travel: fp32, bf16, fp16, int8, powersgd, topk, or exact: the same bits on any
    number of workers, where gradients are summed (not with `sync_every`)."""

    staleness: int = 0
    """Steps by which gradients may be late; 1 hides the exchange behind a whole step."""

    sync_every: int | None = None
    """Global batches between two averages of the parameters (local SGD); by default gradients are
    exchanged."""

    algorithm: str | None = None
    """How workers sum gradients: native, ring, shared_memory, auto, ...; by default what suits."""

    bucket_bytes: int | Literal["auto"] | None = None
    """Bytes of gradients that travel together; "auto" measures and chooses; by default what
    suits."""

    threads: int | None = None
    """Threads of each worker, which change the last bits of its products. By default
    OMP_NUM_THREADS, else one with exact sums on CPUs, the same on any number of workers, else an
    equal share of the cores."""

    shares: str = "equal"
    """Which part of a global batch's micro-batches each worker runs: equal; measured, by the
    seconds that one takes; or numbers, such as 3,1 where the first is three times as fast."""

    loader_workers: int = 0
    """Processes per worker that read and augment samples; 0 reads in the worker itself."""

    log_every_steps: int = 10
    """Steps between two lines of metrics.jsonl."""

    noise_scale_every_steps: int = 0
    """Steps between two measurements of the gradient noise scale (10 is plenty); 0 for none."""

    evaluate_every_epochs: int = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""

    checkpoint_every_steps: int | None = None
    """Steps between two checkpoints; by default one at the end of every epoch."""

    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay on disk."""

    best_metric: str | None = None
    """A metric of the evaluation; the checkpoint that is best by it stays beside the newest."""

    best_mode: Literal["min", "max"] | None = None
    """Whether more or less of `best_metric` is better."""

    patience: int | None = None
    """Evaluations in a row without a gain in `best_metric` after which training stops early."""

    min_delta: float = 0.0
    """What `best_metric` must be better by to be a gain for `patience`."""

    @property
    def best(self) -> BestMetric | None:
        """Tracks `best_metric` from a run's start; None if no `best_metric` is given.

        Raises:
            UsageError: if the fields for the best metric contradict each other.
        """
        if self.best_metric is not None:
            return BestMetric(
                self.best_metric,
                str(self.best_mode),
                patience=self.patience,
                min_delta=self.min_delta,
            )
        for name, unused in (("best_mode", None), ("patience", None), ("min_delta", 0.0)):
            value = getattr(self, name)
            if value != unused:
                raise UsageError(
                    f"`{name}` (={value!r}) needs `best_metric`: give the name of a metric."
                )
        return None

    @property
    def is_exact(self) -> bool:
        """Whether gradients are summed so that the bits don't depend on the workers' number."""
        return self.compression == "exact" and self.sync_every is None

    @property
    def exchange_policy(self) -> ExchangePolicy:
        """How workers exchange gradients."""
        sums_none = self.compression == "exact" and not self.is_exact  # parameters are averaged
        return make_policy(
            compression="fp32" if sums_none else self.compression,
            staleness=self.staleness,
            sync_every=self.sync_every,
            average_optimizer_state=True,  # a checkpoint holds one worker's
            algorithm=self.algorithm,
            bucket_bytes=self.bucket_bytes,
        )

    @property
    def loader_shares(self) -> SharesArgument:
        """`shares` as `allstep.data.loader` takes it.

        Raises:
            UsageError: if it is not a list of numbers.
        """
        if self.shares in ("equal", "measured"):
            return cast(SharesArgument, self.shares)
        try:
            return [float(share) for share in self.shares.split(",")]
        except ValueError:
            raise UsageError(
                f"`shares` (={self.shares!r}) must be 'equal', 'measured', or a number for each"
                " worker, such as 3,1."
            ) from None

    def __post_init__(self) -> None:
        _ = self.exchange_policy, self.best  # these properties check their own fields
        if self.loader_shares != "equal" and self.sync_every is not None:
            raise UsageError(
                f"`shares` (={self.shares!r}) would have a worker with more micro-batches count for"
                f" more in a local step; leave them equal with `sync_every` (={self.sync_every})."
            )
        for name in _AT_LEAST_ONE:
            check_integer(name, getattr(self, name))
        check_batches(self.global_batch, self.micro_batch)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(
                f"`clip_norm` (={self.clip_norm}) must be positive; leave it out for no clipping."
            )
        if self.threads is not None:
            check_integer("threads", self.threads, cure="leave it out for its default")
        check_integer("loader_workers", self.loader_workers, 0)
        if self.nonfinite == "skip" and self.sync_every is not None:
            raise UsageError(
                f"`nonfinite` (={self.nonfinite!r}) would leave out a step of one worker only, but"
                f" `sync_every` (={self.sync_every}) counts the steps of all; take 'raise'."
            )
        self._check_noise_scale()
        if self.checkpoint_every_steps is not None:
            check_integer(
                "checkpoint_every_steps",
                self.checkpoint_every_steps,
                cure="leave it out for one checkpoint an epoch",
            )

    def _check_noise_scale(self) -> None:
        every = self.noise_scale_every_steps
        check_integer("noise_scale_every_steps", every, 0)
        if not every:
            return
        if self.staleness or self.sync_every is not None:
            name = "staleness" if self.staleness else "sync_every"
            raise UsageError(
                f"`noise_scale_every_steps` (={every}) needs the global gradient of the same step,"
                f" which `{name}` (={getattr(self, name)}) does not give; leave one of them out."
            )
        if self.compression in _SPARSE:
            raise UsageError(
                f"`noise_scale_every_steps` (={every}) needs the whole global gradient, of which"
                f" `compression` (={self.compression!r}) sends a part at a time; measure it with"
                " another one."
            )
        if self.global_batch == self.micro_batch:
            raise UsageError(
                f"`noise_scale_every_steps` (={every}) compares a micro-batch with the global"
                f" batch, but `micro_batch` (={self.micro_batch}) is all of it; take a smaller one."
            )
