"""Published large-batch trainings as data, with the source of each number."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from allstep.optim.settings import OptimizerName, ScheduleName

Trust = Literal["verified", "partly verified", "unverified", "measured here"]


@dataclass(frozen=True, kw_only=True)
class MixedBatch:
    """LAMB's second stage: longer sequences in smaller batches.

    Attributes:
        epochs_share: of the run, at its end.
        batch_share: its batch over the first stage's.
        length_factor: its sequence length over the first stage's.
        lr_share: its peak rate over the first stage's.
        warmup_share: of the stage.
    """

    epochs_share: float
    batch_share: float
    length_factor: int
    lr_share: float
    warmup_share: float


@dataclass(frozen=True)
class ReferencePoint:
    """The published numbers for another batch; fields as in `PublishedRecipe`."""

    global_batch: int
    micro_batch: int | None
    epochs: int
    lr: float
    warmup_epochs: float
    momentum: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class PublishedRecipe:
    """A published training.

    Attributes:
        name: what it is called here.
        workload: what was trained.
        optimizer, lr, momentum, weight_decay, lr_schedule, warmup_epochs, warmup_start: as in
            `Settings`.
        global_batch, micro_batch, epochs: samples of a step, samples of a worker (None if
            unknown), passes.
        lr_rule: how its rate follows the batch, "linear" or "sqrt".
        others: what the same source says of other batches.
        warmup_grows: whether its warm-up's epochs grow as the batch does.
        exclusions: what has no weight decay, and no layer-wise rate.
        last_statistics: whether batch norm evaluates with the last step's statistics.
        mixed: the second stage, or None.
        source: of the settings; `trust` says how sure they are.
        sources: of single fields that have another source.
        expected: its row of the published table; `expected_source`, `expected_trust` likewise.
    """

    name: str
    workload: str
    optimizer: OptimizerName
    global_batch: int
    micro_batch: int | None
    epochs: int
    lr: float
    lr_rule: Literal["linear", "sqrt"]
    others: Sequence[ReferencePoint] = ()
    momentum: float = 0.9
    weight_decay: float
    lr_schedule: ScheduleName
    warmup_epochs: float
    warmup_start: float = 0.0
    warmup_grows: bool = False
    exclusions: str
    last_statistics: bool = False
    mixed: MixedBatch | None = None
    source: str
    trust: Trust
    sources: Mapping[str, str] = field(default_factory=dict)
    expected: str
    expected_source: str
    expected_trust: Trust

    def nearest(self, global_batch: int) -> "PublishedRecipe":
        """The published numbers for the batch nearest to this one, by ratio."""

        def ratio(batch: int) -> float:
            return max(batch / global_batch, global_batch / batch)

        point = min(self.others, key=lambda point: ratio(point.global_batch), default=None)
        if point is None or ratio(self.global_batch) <= ratio(point.global_batch):
            return self
        return replace(self, **asdict(point))


_GOYAL = PublishedRecipe(
    name="goyal_1h",
    workload="ResNet-50 on ImageNet",
    optimizer="sgd",
    global_batch=8192,
    micro_batch=32,
    epochs=90,
    lr=3.2,
    lr_rule="linear",
    weight_decay=1e-4,
    lr_schedule="step",
    warmup_epochs=5.0,
    warmup_start=256 / 8192,
    exclusions="no decay of batch norm; here none of biases either",
    source="Goyal et al., 2017, arXiv:1706.02677, sections 2 and 5.1",
    trust="verified",
    expected="top-1 error 23.74 % +- 0.09 (at a batch of 256: 23.60 +- 0.12)",
    expected_source="the same, table 1",
    expected_trust="verified",
)

_AKIBA = PublishedRecipe(
    name="akiba_15min",
    workload="ResNet-50 on ImageNet",
    optimizer="rmsprop_warmup",
    global_batch=32768,
    micro_batch=32,
    epochs=90,
    lr=12.8,
    lr_rule="linear",
    weight_decay=1e-4,
    lr_schedule="slow_start",
    warmup_epochs=10.0,
    exclusions="no decay of batch norm (unverified); here none of biases either",
    last_statistics=True,
    source="Akiba et al., 2017, arXiv:1711.04325, section 2, its transition corrected",
    trust="partly verified",
    expected="top-1 74.9 % (5 runs: 74.94 +- 0.09, unverified)",
    expected_source="the same, abstract",
    expected_trust="verified",
)

_LARS = PublishedRecipe(
    name="lars_32k",
    workload="ResNet-50 on ImageNet",
    optimizer="lars",
    global_batch=32768,
    micro_batch=128,
    epochs=57,
    lr=21.2,
    lr_rule="linear",
    momentum=0.94,
    weight_decay=2e-5,
    lr_schedule="poly",
    warmup_epochs=16.0,
    exclusions="neither decay nor layer-wise rate for biases and batch norm",
    others=(  # as the fields of `ReferencePoint`: batch, group of batch norm, epochs, rate, ...
        ReferencePoint(2048, 64, 39, 8.5, 5, 0.9, 2e-3),
        ReferencePoint(4096, 64, 42, 10.0, 5, 0.9, 2e-3),
        ReferencePoint(8192, 64, 44, 17.0, 5, 0.9, 2e-4),
        ReferencePoint(13056, None, 47, 12.8, 9, 0.94, 2.5e-5),
        ReferencePoint(65536, 128, 86, 24.699, 31, 0.951807, 1e-4),
    ),
    source="MLPerf v1.0 reference convergence points (variant mlperf)",
    trust="verified",
    sources={
        "lr": "the same points; between them linear scaling, You et al., 2017, arXiv:1708.03888",
        "epochs": "the most that the reference needed to its target; not a setting",
    },
    expected="top-1 75.9 % (unverified) after 55 to 57 epochs",
    expected_source="the same",
    expected_trust="partly verified",
)

_LAMB = PublishedRecipe(
    name="lamb_imagenet",
    workload="ResNet-50 on ImageNet",
    optimizer="lamb",
    global_batch=32768,
    micro_batch=32,
    epochs=90,
    lr=0.04,
    lr_rule="sqrt",
    weight_decay=0.01,
    lr_schedule="linear",
    warmup_epochs=20.0,
    warmup_grows=True,
    exclusions="neither decay nor layer-wise rate for biases and batch norm",
    source="You et al., 2020, arXiv:1904.00962, section 4.2 and its table of rates",
    trust="unverified",
    sources={"weight_decay": "the default of the same, Algorithm 2"},
    expected="top-1 76.4 %",
    expected_source="the same",
    expected_trust="partly verified",
)

_BERT = PublishedRecipe(
    name="lamb_bert_76min",
    workload="BERT-Large, 128 then 512 tokens",
    optimizer="lamb",
    global_batch=65536,
    micro_batch=64,
    epochs=40,
    lr=6e-3,
    lr_rule="sqrt",
    weight_decay=0.01,
    lr_schedule="linear",
    warmup_epochs=0.2843 * 36,
    warmup_grows=True,
    exclusions="neither decay nor layer-wise rate for biases and layer norm",
    mixed=MixedBatch(
        epochs_share=1 / 10,
        batch_share=1 / 2,
        length_factor=4,
        lr_share=4e-3 / 6e-3,
        warmup_share=0.128,
    ),
    source="You et al., 2020, arXiv:1904.00962, section 4.1; rates and warm-ups of open"
    " reimplementations, as the paper prints none for this run",
    trust="partly verified",
    sources={
        "epochs": "about 512 million sequences; 7,037 steps of 65,536 and 1,562 of 32,768",
        "lr": "open reimplementations (unverified), scaled with the root of the batch",
        "warmup_epochs": "0.2843 of the first stage, from open reimplementations (unverified);"
        " linear in the batch, the paper's section 4",
    },
    expected="SQuAD v1.1 F1 90.584 after 8,599 steps (AdamW at 512: 90.395)",
    expected_source="You et al., arXiv:1904.00962 version 1, table 1",
    expected_trust="verified",
)

_FASHION = PublishedRecipe(
    name="lamb_fashion",
    workload="`fashion` with `--width 16`",
    optimizer="lamb",
    global_batch=4096,
    micro_batch=32,
    epochs=15,
    lr=0.0476,
    lr_rule="sqrt",
    momentum=0.876,
    weight_decay=0.014,
    lr_schedule="linear",
    warmup_epochs=1.07,
    exclusions="neither decay nor layer-wise rate for biases and batch norm",
    others=(ReferencePoint(1024, 32, 5, 0.0359, 0.281, 0.759, 2.23e-3),),
    source="allstep's own study, benchmarks/large_batch: the best of 20 trainings at each batch on"
    " held-out samples",
    trust="measured here",
    sources={"lr": "the same; between its two batches LAMB's square root"},
    expected="test accuracy 91.4 % +- 0.1 at 4,096 after 15 epochs, 91.1 % +- 0.1 at 1,024 after"
    " 5 (batch 128, tuned: 92.2 and 91.8)",
    expected_source="the same, docs/tables/large_batch.md",
    expected_trust="measured here",
)

PUBLISHED: Mapping[str, PublishedRecipe] = {
    recipe.name: recipe for recipe in (_GOYAL, _AKIBA, _LARS, _LAMB, _BERT, _FASHION)
}
"""By name."""
