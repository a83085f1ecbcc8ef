"""The corpus: trainings that are sound, and trainings with one silent bug and its cause."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        net: which model and data; one of `NETS`.
        loop: "ddp", each worker runs its part of a batch, or "steps".
        optimizer: its class in `torch.optim`.
        options: of the optimizer.
        schedule: None, "epoch" (StepLR), "cosine" (each step), "plateau".
        sampler: how workers share samples; a key of `SAMPLERS`.
        does: whatever else the loop does, or does wrongly.
    """

    net: str = "mlp"
    loop: str = "ddp"
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    schedule: str | None = None
    sampler: str = "shared"
    does: frozenset[str] = frozenset()


def case(*does: str, **fields: Any) -> Case:
    return Case(does=frozenset(does), **fields)


_ADAM = {"optimizer": "AdamW", "options": {"lr": 1e-3}}
_ADADELTA = {"optimizer": "Adadelta", "options": {"lr": 1.0}, "schedule": "epoch"}
_HIGH_RATE = {**_ADADELTA, "options": {"lr": 30.0}}
_MOMENTUM = {"options": {"lr": 0.05, "momentum": 0.9}}

SOUND = {
    "mlp": case(**_MOMENTUM, schedule="cosine"),
    "mlp_float64": case("float64", **_MOMENTUM),
    "mlp_clip": case("clip"),
    "mlp_accumulation": case("accumulation"),
    "mlp_autocast": case("autocast"),
    "mlp_gradscaler": case("scaler"),
    "mlp_plateau": case("plateau_of_mean", schedule="plateau"),
    "mlp_frozen_layer": case("freeze", **_ADAM),
    "mlp_two_groups": case("two_groups", **_ADAM),
    "mlp_weighed_shards": case("weighs", sampler="unequal"),
    "mlp_seeds_alike": case("seed", **_ADAM),
    "mlp_high_rate": case(options={"lr": 1.5}),
    "cnn_adadelta": case(net="cnn", **_ADADELTA),
    "lstm_with_state": case(net="lstm", options={"lr": 1.0}, sampler="columns"),
    "gru_with_state_clip": case("clip", net="gru", options={"lr": 1.0}, sampler="columns"),
    "transformer": case(net="transformer", **_ADAM),
    "siamese": case(net="siamese", **_ADADELTA),
    "super_resolution": case(net="super_resolution", **_ADAM),
    "gan_noise_of_step": case("noise_of_step", net="gan", **_ADAM),
    "mlp_steps": case(loop="steps", **_MOMENTUM, schedule="cosine"),
    "mlp_steps_exact": case("exact", loop="steps", **_MOMENTUM),
    "mlp_steps_epochs": case(loop="steps", schedule="epoch"),
    "mlp_steps_autocast": case("autocast", loop="steps"),
    "mlp_steps_augmented": case("augment_each", loop="steps"),
    "mlp_steps_rmsprop": case(loop="steps", optimizer="RMSprop", options={"lr": 0.01}),
    "mlp_steps_plateau": case("plateau_of_mean", loop="steps", schedule="plateau"),
    "mlp_steps_class_weights": case("class_weights", loop="steps"),
    "dropnet_steps": case(net="dropnet", loop="steps"),
    "bnnet_steps": case(net="bnnet", loop="steps", **_MOMENTUM),
    "mnist_steps": case(net="mnist", loop="steps", **_ADADELTA),
    "mnist_steps_high_rate": case("long_epochs", net="mnist", loop="steps", **_HIGH_RATE),
    "cnn_high_rate": case("long_epochs", net="cnn", **_HIGH_RATE),
    "stale_steps": case("stale", loop="steps"),
    "cnn_steps_clip": case("clip", net="cnn", loop="steps", **_ADADELTA),
    "transformer_steps": case(net="transformer", loop="steps", **_ADAM),
    "vae_steps": case(net="vae", loop="steps", **_ADAM),
    "gan_steps": case(net="gan", loop="steps", **_ADAM),
    "siamese_steps": case(net="siamese", loop="steps", **_ADADELTA),
    "padded_steps": case(net="tokens", loop="steps"),
}

# Not of the corpus, as it is large: PyTorch's MNIST example with another data set.
LARGE = {"fashion_steps": case(net="fashion", loop="steps", **_ADADELTA)}

# The exchange finds these itself: the script fails on several workers, and this is said.
REFUSED = {"noise_in_parameters": ("`values of ", case("noise_by_rank"))}

BUGS = {
    "rate_by_workers": ("learning rate scaled", case("scales_rate")),
    "rate_by_root_of_workers": ("learning rate scaled", case("scales_rate_by_root", **_ADAM)),
    "rate_of_one_group": ("learning rate scaled", case("two_groups", "scales_one_rate", **_ADAM)),
    "rate_by_workers_in_steps": ("learning rate scaled", case("scales_rate", loop="steps")),
    "schedule_in_samples": ("scheduler", case("steps_schedule_often", schedule="cosine")),
    "schedule_over_parts": ("scheduler", case("short_schedule", schedule="linear")),
    "sum_of_losses": ("loss summed", case("sum")),
    "divided_twice": ("loss summed", case("divides_loss")),
    "accumulation_undivided": ("loss summed", case("accumulation", "undivided")),
    "sum_in_steps": ("loss summed", case("multiplies_loss", loop="steps")),
    "dropout": ("random state", case(net="dropnet")),
    "dropout_seeds_by_rank": ("random state", case("seed_by_rank", net="dropnet")),
    "mnist_in_plain_loop": ("random state", case(net="mnist", **_ADADELTA)),
    "augmentation_of_torch": ("random state", case("augment")),
    "augmentation_of_numpy": ("random state", case("augment_numpy")),
    "augmentation_of_python": ("random state", case("augment_python")),
    "augmentation_by_rank": ("random state", case("augment_by_rank", loop="steps")),
    "vae_in_plain_loop": ("random state", case(net="vae", **_ADAM)),
    "gan_noise_of_worker": ("random state", case(net="gan", **_ADAM)),
    "unequal_parts": ("unequal shards", case(sampler="unequal")),
    "short_last_batch": ("unequal shards", case(sampler="short_last")),
    "means_of_tokens": ("unequal amounts", case(net="tokens")),
    "class_weights": ("unequal amounts", case("class_weights")),
    "nearly_equal_weights": ("unequal amounts", case("nearly_equal_weights")),
    "weights_and_still_batch_norm": (
        "unequal amounts",
        case("nearly_equal_weights", net="still_bnnet"),
    ),
    "batch_norm": ("batch norm", case(net="bnnet")),
    "batch_norm_in_steps": ("batch norm", case("micro_by_workers", net="bnnet", loop="steps")),
    "no_sampler": ("data not sharded", case(sampler="none")),
    "same_rank_everywhere": ("data not sharded", case(sampler="rank_0")),
    "own_shuffle": ("data not sharded", case(sampler="seed_by_rank")),
    "batch_a_worker": ("global batch", case(sampler="whole_batch")),
    "batch_rounded_down": ("global batch", case(sampler="rounded_down")),
    "padded_sampler": ("samples repeated", case(sampler="padded")),
    "blocks_of_the_data": ("other batches", case(sampler="blocks")),
    "seed_by_rank": ("seed depends on rank", case("seed_by_rank", sampler="drawn")),
    "seed_by_rank_of_numpy": (
        "seed depends on rank",
        case("numpy_seed_by_rank", sampler="drawn_by_numpy"),
    ),
    "seed_by_rank_made_data": ("seed depends on rank", case("seed_by_rank", sampler="made")),
    "int8": ("exchange policy", case("int8")),
    "local_sgd": ("exchange policy", case("local_sgd")),
    "weight_decay": ("optimizer options", case("scales_decay")),
    "momentum": ("optimizer options", case("changes_momentum")),
    "other_optimizer": ("optimizer options", case("adam_on_several")),
    "initial_scale": ("initial parameters", case("scales_init")),
    "seed_of_init_by_size": ("initial parameters", case("seeds_init_by_size")),
    "averages_again": ("gradient changed", case("averages_again")),
    "clips_by_workers": ("gradient changed", case("clip", "clips_by_workers")),
    "autocast_on_several": ("number format", case("autocast_on_several")),
    "never_exchanged": ("workers apart", case("no_sync")),
}
