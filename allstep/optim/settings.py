"""Settings of an optimizer and its schedule as plain data, for recipes and published recipes."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from allstep.errors import (
    UsageError,
    check_choice,
    check_integer,
    check_not_negative,
    check_positive,
    check_share,
)
from allstep.optim.compose import chain, gradual_warmup
from allstep.optim.schedules import (
    Schedule,
    constant,
    cosine,
    poly,
    slow_start,
    step_decay,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from allstep.optim.optimizer import Nonfinite


OptimizerName = Literal["sgd", "adamw", "lars", "lamb", "rmsprop_warmup"]
ScheduleName = Literal["cosine", "poly", "linear", "step", "slow_start", "constant"]

# Where the rate falls to a tenth, as shares of the run.
_MILESTONES = (30 / 90, 60 / 90, 80 / 90)


@dataclass(frozen=True, kw_only=True)
class SecondStage:
    """The end of a run with other batches, for which the rate warms up again from 0.

    Args:
        epochs: the last ones of the run.
        lr: its peak rate.
        warmup_epochs: of these.

    Raises:
        UsageError: if a number is out of range.
    """

    epochs: int
    lr: float
    warmup_epochs: float

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UsageError(f"`epochs` (={self.epochs}) of the second stage must be at least 1.")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"`lr` (={self.lr}) of the second stage must be positive and finite.")
        if not 0 <= self.warmup_epochs <= self.epochs:
            raise UsageError(
                f"`warmup_epochs` (={self.warmup_epochs}) of the second stage must be 0 or more,"
                f" and no more than its `epochs` (={self.epochs})."
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Optimizer, rate and schedule; makes the optimizer and the schedule for any model and run.

    Args:
        optimizer: "sgd" (Nesterov), "adamw", "lars" (MLPerf's form), "lamb" or "rmsprop_warmup".
        lr: peak rate, for the whole global batch.
        momentum: or Adam's first beta.
        weight_decay: of weights; biases and normalisation have none.
        lr_schedule: "cosine", "poly" (quadratic), "linear", "step" (a tenth after 30, 60 and 80
            ninetieths of the run), "slow_start" or "constant". The first three decay from the end
            of the warm-up on; milestones stay where they are.
        warmup_epochs: in which the rate grows linearly to its peak; for "rmsprop_warmup" those
            until RMSprop and SGD have the same weight, in place of a growing rate.
        warmup_start: where the rate's growth begins, as a share of the peak.
        second: another stage at the end, or None.

    Raises:
        UsageError: if a name or a number is out of range.

    >>> settings = Settings(lr=0.1, lr_schedule="linear", warmup_epochs=0.5)
    >>> schedule = settings.make_schedule(epochs=2, steps_per_epoch=4)
    >>> [round(schedule(step), 2) for step in range(8)]
    [0.5, 1.0, 1.0, 0.83, 0.67, 0.5, 0.33, 0.17]
    """

    optimizer: OptimizerName = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    lr_schedule: ScheduleName = "cosine"
    warmup_epochs: float = 0.0
    warmup_start: float = 0.0
    second: SecondStage | None = None

    def __post_init__(self) -> None:
        for name, valid in (("optimizer", OptimizerName), ("lr_schedule", ScheduleName)):
            check_choice(name, getattr(self, name), get_args(valid))
        check_positive("lr", self.lr, "0.1 is usual for SGD")
        check_share("momentum", self.momentum, "[0, 1)", "0.9 is usual")
        check_not_negative("weight_decay", self.weight_decay, "1e-4 is usual for SGD")
        check_not_negative("warmup_epochs", self.warmup_epochs, "0 for no warm-up")
        check_share("warmup_start", self.warmup_start, cure="it is a share of `lr`")
        if self.optimizer == "rmsprop_warmup" and not self.warmup_epochs:
            raise UsageError(
                f"`warmup_epochs` (={self.warmup_epochs}) must be positive for the optimizer"
                " `rmsprop_warmup`; a ninth of the run is usual."
            )

    def make_optimizer(
        self,
        model: "nn.Module",
        steps_per_epoch: int | None = None,
        nonfinite: "Nonfinite" = "raise",
    ) -> "Optimizer":
        """The optimizer over the model's parameters, in the groups of `allstep.optim.groups`.

        Args:
            model: on its device.
            steps_per_epoch: optimizer steps of an epoch; only "rmsprop_warmup" needs to know.
            nonfinite: what "lars", "lamb" and "rmsprop_warmup" do about a gradient that is not
                finite; "propagate" where somebody else looks.

        Raises:
            UsageError: if it is needed and missing.
        """
        from torch.optim import SGD, AdamW

        from allstep.optim.grouping import groups
        from allstep.optim.lamb import LAMB
        from allstep.optim.lars import LARS
        from allstep.optim.rmsprop_warmup import RMSpropWarmup

        parameters = groups(model, weight_decay=self.weight_decay)
        lr, momentum = self.lr, self.momentum
        if self.optimizer == "sgd":
            return SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)
        if self.optimizer == "adamw":
            return AdamW(parameters, lr=lr, betas=(momentum, 0.999))
        if self.optimizer == "lars":
            return LARS(parameters, lr, momentum, variant="mlperf", nonfinite=nonfinite)
        if self.optimizer == "lamb":
            return LAMB(parameters, lr, (momentum, 0.999), nonfinite=nonfinite)
        if steps_per_epoch is None:
            raise UsageError(
                "`steps_per_epoch` (=None) must be given for the optimizer `rmsprop_warmup`, whose"
                " transition is counted in steps."
            )
        center_steps = self.warmup_epochs * steps_per_epoch
        return RMSpropWarmup(
            parameters,
            lr,
            momentum=momentum,
            center_steps=center_steps,
            period_steps=center_steps / 2,  # 10 and 5 of 90 epochs
            nonfinite=nonfinite,
        )

    def make_schedule(
        self, *, epochs: int, steps_per_epoch: int, second_steps_per_epoch: int | None = None
    ) -> Schedule:
        """The multiplier of `lr` over the whole run.

        Args:
            epochs: of the run, both stages together.
            steps_per_epoch: optimizer steps of an epoch, in the second stage
                `second_steps_per_epoch`.

        Raises:
            UsageError: if a number is below 1 or not whole, or if stages or warm-up don't fit in
                the epochs.
        """
        check_integer("epochs", epochs)
        check_integer("steps_per_epoch", steps_per_epoch)
        if (self.second is None) != (second_steps_per_epoch is None):
            raise UsageError(
                f"`second_steps_per_epoch` (={second_steps_per_epoch}) must be given where there is"
                f" a second stage, and only there; here `second` is {self.second}."
            )
        if second_steps_per_epoch is not None:
            check_integer("second_steps_per_epoch", second_steps_per_epoch)
        warmup, start = self.warmup_epochs * steps_per_epoch, self.warmup_start
        if self.second is None or second_steps_per_epoch is None:
            self._refuse_long_warmup(epochs)
            return self._one_stage(epochs * steps_per_epoch, warmup, start)
        first_epochs = epochs - self.second.epochs
        if first_epochs < 1:
            raise UsageError(
                f"`epochs` (={epochs}) must hold one or more of the first stage and"
                f" {self.second.epochs} of the second."
            )
        self._refuse_long_warmup(first_epochs)
        first_steps = first_epochs * steps_per_epoch
        second_steps = self.second.epochs * second_steps_per_epoch
        second_warmup = self.second.warmup_epochs * second_steps_per_epoch
        first = self._one_stage(first_steps, warmup, start)
        second = self._one_stage(second_steps, second_warmup, 0.0)
        factor = self.second.lr / self.lr
        return chain([(first_steps, first), (second_steps, lambda step: factor * second(step))])

    def _refuse_long_warmup(self, epochs: int) -> None:
        if self.optimizer != "rmsprop_warmup" and self.warmup_epochs > epochs:
            raise UsageError(
                f"`warmup_epochs` (={self.warmup_epochs:g}) must be no more than the {epochs}"
                " epochs that it is part of."
            )

    def _one_stage(self, total_steps: int, warmup: float, start: float) -> Schedule:
        if self.optimizer == "rmsprop_warmup":
            warmup = 0  # it replaces a growing rate
        warmup_steps = min(round(warmup), total_steps - 1)
        if self.lr_schedule in ("slow_start", "step", "constant"):
            # Milestones stay where they are, however long the warm-up.
            return gradual_warmup(self._schedule(total_steps), warmup_steps, start)
        line = gradual_warmup(constant(), warmup_steps, start)
        decay = self._schedule(total_steps, warmup_steps)
        return lambda step: line(step) if step < warmup_steps else decay(step)

    def _schedule(self, total_steps: int, warmup_steps: int = 0) -> Schedule:
        """The schedule without its warm-up; a decay begins at the end of the warm-up."""
        if self.lr_schedule == "constant":
            return constant()
        if self.lr_schedule == "slow_start":
            return slow_start(total_steps)
        if self.lr_schedule == "step":
            return step_decay(sorted({max(1, round(share * total_steps)) for share in _MILESTONES}))
        if self.lr_schedule == "cosine":
            return cosine(total_steps, warmup_steps)
        return poly(total_steps, warmup_steps, power=2.0 if self.lr_schedule == "poly" else 1.0)
