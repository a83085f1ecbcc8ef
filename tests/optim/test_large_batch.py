"""Published recipes as data, and what their rules make of another batch and other epochs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep.errors import UsageError
from allstep.optim import (
    LAMB,
    LARS,
    PUBLISHED,
    RMSpropWarmup,
    SecondStage,
    Settings,
    rescale,
)

NAMES = [
    "goyal_1h", "akiba_15min", "lars_32k", "lamb_imagenet", "lamb_bert_76min", "lamb_fashion",
]  # fmt: skip
STUDY = Path(__file__).parents[2] / "benchmarks" / "results" / "large_batch"


def test_published_recipes_are_complete() -> None:
    assert list(PUBLISHED) == NAMES
    for name, published in PUBLISHED.items():
        assert published.name == name
        assert published.source and published.expected_source
        assert published.micro_batch <= published.global_batch


@pytest.mark.parametrize("name", NAMES)
def test_rescale_to_its_own_batch_and_epochs_changes_nothing(name: str) -> None:
    published = PUBLISHED[name]
    rescaled = rescale(
        name,
        global_batch=published.global_batch,
        epochs=published.epochs,
        micro_batch=published.micro_batch,
    )
    for change in rescaled.changes:
        if isinstance(change.before, float):
            assert change.after == pytest.approx(change.before), change.name
        else:
            assert change.after == change.before, change.name
        assert change.rule and change.source


def test_rescaled_rates_are_those_of_the_papers_tables() -> None:
    """Goyal's 0.1 * batch / 256, Akiba's 12.8 and LAMB's 4 / (2**2 * 100) at 2,048."""
    assert rescale("goyal_1h", global_batch=256, epochs=90).settings.lr == pytest.approx(0.1)
    assert PUBLISHED["akiba_15min"].lr == pytest.approx(0.1 * 32768 / 256)
    lamb = rescale("lamb_imagenet", global_batch=2048, epochs=90).settings
    assert lamb.lr == pytest.approx(4 / (2**2 * 100))
    assert lamb.warmup_epochs == pytest.approx(1.25)


def test_linear_and_sqrt_rules_differ() -> None:
    """A quarter of the batch: a quarter of the rate by one rule, a half by the other."""
    linear = rescale("akiba_15min", global_batch=8192, epochs=90).settings
    root = rescale("lamb_imagenet", global_batch=8192, epochs=90).settings
    assert linear.lr == pytest.approx(12.8 / 4)
    assert root.lr == pytest.approx(0.04 / 2)
    assert linear.warmup_epochs == pytest.approx(10)
    assert root.warmup_epochs == pytest.approx(20 / 4)


@pytest.mark.parametrize(
    ("batch", "origin", "lr", "momentum", "weight_decay", "warmup"),
    [
        (512, 2048, 8.5 / 4, 0.9, 2e-3, 5 / 39),
        (2048, 2048, 8.5, 0.9, 2e-3, 5 / 39),
        (4096, 4096, 10.0, 0.9, 2e-3, 5 / 42),
        (5000, 4096, 10.0 * 5000 / 4096, 0.9, 2e-3, 5 / 42),
        (8192, 8192, 17.0, 0.9, 2e-4, 5 / 44),
        (13056, 13056, 12.8, 0.94, 2.5e-5, 9 / 47),
        (16384, 13056, 12.8 * 16384 / 13056, 0.94, 2.5e-5, 9 / 47),
        (24576, 32768, 21.2 * 0.75, 0.94, 2e-5, 16 / 57),
        (131072, 65536, 24.699 * 2, 0.951807, 1e-4, 31 / 86),
    ],
)
def test_lars_rescales_from_the_nearest_reference(
    batch: int, origin: Any, lr: Any, momentum: Any, weight_decay: Any, warmup: Any
) -> None:
    rescaled = rescale("lars_32k", global_batch=batch, epochs=10)
    settings, rules = rescaled.settings, {c.name: c.rule for c in rescaled.changes}
    assert settings.lr == pytest.approx(lr)
    assert (settings.momentum, settings.weight_decay) == (momentum, weight_decay)
    assert settings.warmup_epochs == pytest.approx(10 * warmup)
    if origin != 32768:
        assert rules["lr"] == f"linear in the batch, from the one at {origin:,}"
        assert rules["weight_decay"] == f"the one at {origin:,}"


@pytest.mark.parametrize(("batch", "epochs"), [(4096, 15), (1024, 5)])
def test_lamb_fashion_is_the_best_point_of_the_study(batch: int, epochs: int) -> None:
    points = [json.loads(path.read_text()) for path in STUDY.glob(f"own/*-{batch}.json")]
    assert len(points) == 8
    best = max(points, key=lambda point: point["accuracy"])["settings"]
    settings = rescale("lamb_fashion", global_batch=batch, epochs=epochs).settings
    for name, value in best.items():
        rounded = value if isinstance(value, str) else pytest.approx(value, rel=5e-3)
        assert getattr(settings, name) == rounded, name


def test_rescale_reports_the_micro_batch() -> None:
    rescaled = rescale("lars_32k", global_batch=4096, epochs=10, micro_batch=32)
    (change,) = [c for c in rescaled.changes if c.name == "micro_batch"]
    assert (change.before, change.after) == (128, 32)
    names = [c.name for c in rescale("akiba_15min", global_batch=512, epochs=10).changes]
    assert "last_statistics" in names and "micro_batch" not in names


def test_warmup_stays_a_fraction_of_the_run() -> None:
    for name in NAMES:
        published = PUBLISHED[name]
        short = rescale(name, global_batch=published.global_batch, epochs=10).settings
        assert short.warmup_epochs / 10 == pytest.approx(published.warmup_epochs / published.epochs)


@pytest.mark.parametrize("epochs", [2, 3, 5, 40])
@pytest.mark.parametrize("batch", [65536, 4096])
def test_mixed_batch_warmups_are_shares_of_their_stages(epochs: int, batch: int) -> None:
    """Linear in the batch, as all of LAMB's; see table 2 of the paper's version 5."""
    settings = rescale("lamb_bert_76min", global_batch=batch, epochs=epochs).settings
    assert settings.second is not None
    first_epochs, share = epochs - settings.second.epochs, batch / 65536
    assert settings.warmup_epochs == pytest.approx(0.2843 * share * first_epochs)
    assert settings.second.warmup_epochs == pytest.approx(0.128 * share * settings.second.epochs)


def test_warmup_start_is_at_most_the_peak() -> None:
    """Below the small batch, whose rate it begins at."""
    settings = rescale("goyal_1h", global_batch=128, epochs=90).settings
    assert (settings.lr, settings.warmup_start) == (pytest.approx(0.05), 1.0)


def test_second_stage_begins_at_zero() -> None:
    second = SecondStage(epochs=1, lr=0.5, warmup_epochs=1.0)
    settings = Settings(lr=1.0, warmup_epochs=1.0, warmup_start=0.5, second=second)
    schedule = settings.make_schedule(epochs=2, steps_per_epoch=4, second_steps_per_epoch=8)
    assert schedule(0) == pytest.approx(0.5 + 0.5 / 3)
    assert schedule(4) == pytest.approx(0.5 / 7)


def test_growing_warmup_is_at_most_half_the_run() -> None:
    rescaled = rescale("lamb_imagenet", global_batch=2**20, epochs=10)
    assert rescaled.settings.warmup_epochs == 5.0
    (rule,) = [c.rule for c in rescaled.changes if c.name == "warmup_epochs"]
    assert "at most half" in rule


def test_goyal_rates_over_the_whole_run() -> None:
    """From the small batch's rate by a warm-up; a tenth at 30, 60 and 80 epochs."""
    settings = rescale("goyal_1h", global_batch=8192, epochs=90).settings
    schedule = settings.make_schedule(epochs=90, steps_per_epoch=100)
    lr = settings.make_optimizer(nn.Linear(2, 2)).param_groups[0]["lr"]
    rates = [lr * schedule(step) for step in range(9000)]
    assert lr == 3.2
    assert rates[0] == pytest.approx(0.1 + 3.1 / 500)
    assert rates[499] == pytest.approx(3.2)
    assert rates[250] - rates[249] == pytest.approx(3.1 / 500)
    for epoch, expected in ((29, 3.2), (30, 0.32), (60, 0.032), (80, 0.0032)):
        assert rates[100 * epoch] == pytest.approx(expected)


def test_mixed_batch_schedule_warms_up_twice() -> None:
    schedule = rescale("lamb_bert_76min", global_batch=65536, epochs=10).settings.make_schedule(
        epochs=10, steps_per_epoch=1000, second_steps_per_epoch=2000
    )
    peak = round(0.2843 * 9000)
    assert schedule(peak - 1) == pytest.approx(1.0)
    assert schedule(8999) < 0.001 < 0.002 < schedule(9010)
    assert schedule(9000 + round(0.128 * 2000) - 1) == pytest.approx(4 / 6)
    assert schedule(11000) == 0.0


def test_make_optimizer_makes_the_published_kind() -> None:
    kinds = {
        "goyal_1h": torch.optim.SGD,
        "akiba_15min": RMSpropWarmup,
        "lars_32k": LARS,
        "lamb_imagenet": LAMB,
    }
    for name, kind in kinds.items():
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        settings = rescale(name, global_batch=64, epochs=9).settings
        optimizer = settings.make_optimizer(model, steps_per_epoch=2)
        assert type(optimizer) is kind
        assert [group["weight_decay"] > 0 for group in optimizer.param_groups] == [True, False]
        before = model[0].weight.clone()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        assert not torch.equal(before, model[0].weight)


def test_akiba_transition_is_at_a_ninth_of_the_run() -> None:
    settings = rescale("akiba_15min", global_batch=512, epochs=18).settings
    (group, _) = settings.make_optimizer(nn.Linear(2, 2), steps_per_epoch=50).param_groups
    assert (group["center_steps"], group["period_steps"]) == (100, 50)
    schedule = settings.make_schedule(epochs=18, steps_per_epoch=50)
    assert schedule(0) == 0.5  # no growing rate beside RMSprop


def test_rescale_refuses_bad_names_and_numbers() -> None:
    with pytest.raises(UsageError, match=r"`large_batch` \(='goyal'\): did you mean `goyal_1h`"):
        rescale("goyal", global_batch=1, epochs=1)
    with pytest.raises(UsageError, match=r"`global_batch` \(=0\) must be at least 1"):
        rescale("goyal_1h", global_batch=0, epochs=1)
    with pytest.raises(UsageError, match=r"`epochs` \(=0\) must be at least 1"):
        rescale("goyal_1h", global_batch=1, epochs=0)
    with pytest.raises(UsageError, match=r"`large_batch` \(=None\): "):
        rescale(None, global_batch=1, epochs=1)  # type: ignore[arg-type]
    for name, value, rule in (
        ("global_batch", 64.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("micro_batch", -4, "at least 1"),
    ):
        numbers: dict[str, Any] = {"global_batch": 64, "epochs": 2, name: value}
        with pytest.raises(UsageError, match=rf"`{name}` \(={value}\) must be {rule}"):
            rescale("goyal_1h", **numbers)
    with pytest.raises(UsageError, match=r"`epochs` \(=1\) must be at least 2; each of two"):
        rescale("lamb_bert_76min", global_batch=64, epochs=1)
    with pytest.raises(UsageError, match=r"`second_steps_per_epoch` \(=None\) must be given"):
        rescale("lamb_bert_76min", global_batch=64, epochs=2).settings.make_schedule(
            epochs=2, steps_per_epoch=1
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, r"`epochs` \(=0\) of the second stage must be at least 1"),
        ({"lr": -1.0}, r"`lr` \(=-1.0\) of the second stage must be positive"),
        ({"warmup_epochs": -5}, r"`warmup_epochs` \(=-5\) of the second stage must be 0 or more"),
        ({"warmup_epochs": 1.5}, r"no more than its `epochs` \(=1\)"),
        ({"warmup_epochs": math.nan}, r"`warmup_epochs` \(=nan\)"),
    ],
)
def test_second_stage_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SecondStage(**{"epochs": 1, "lr": 0.1, "warmup_epochs": 0.5} | changes)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (Settings(), {"epochs": 0}, r"`epochs` \(=0\) must be at least 1"),
        (Settings(), {"steps_per_epoch": 0}, r"`steps_per_epoch` \(=0\) must be at least 1"),
        (Settings(), {"steps_per_epoch": 3.5}, r"`steps_per_epoch` \(=3.5\) .* a whole number"),
        (
            Settings(second=SecondStage(epochs=1, lr=1.0, warmup_epochs=0.0)),
            {"second_steps_per_epoch": 0},
            r"`second_steps_per_epoch` \(=0\) must be at least 1",
        ),
        (Settings(warmup_epochs=5), {}, r"`warmup_epochs` \(=5\) must be no more than the 2"),
        (
            Settings(warmup_epochs=1.5, second=SecondStage(epochs=1, lr=1.0, warmup_epochs=0.0)),
            {"second_steps_per_epoch": 2},
            r"`warmup_epochs` \(=1.5\) must be no more than the 1",
        ),
        (
            Settings(second=SecondStage(epochs=2, lr=1.0, warmup_epochs=0.0)),
            {"second_steps_per_epoch": 2},
            r"`epochs` \(=2\) must hold one or more of the first stage and 2 of the second",
        ),
        (
            Settings(),
            {"second_steps_per_epoch": 3},
            r"`second_steps_per_epoch` \(=3\) must be given where there is a second stage",
        ),
    ],
)
def test_make_schedule_refuses_what_does_not_fit(
    settings: Settings, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        settings.make_schedule(**{"epochs": 2, "steps_per_epoch": 2} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, r"`lr` \(=0.0\) must be above 0"),
        ({"lr": math.nan}, r"`lr` \(=nan\) must be above 0"),
        ({"momentum": 1.0}, r"`momentum` \(=1.0\)"),
        ({"weight_decay": -1.0}, r"`weight_decay` \(=-1.0\)"),
        ({"warmup_epochs": -1.0}, r"`warmup_epochs` \(=-1.0\)"),
        ({"warmup_start": 2.0}, r"`warmup_start` \(=2.0\)"),
        ({"optimizer": "lar"}, r"`optimizer` \(='lar'\): did you mean `lars`"),
        ({"lr_schedule": "cosin"}, r"`lr_schedule` \(='cosin'\): did you mean `cosine`"),
    ],
)
def test_settings_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**changes)  # type: ignore[arg-type]


def test_rmsprop_warmup_needs_steps_per_epoch_and_a_warmup() -> None:
    with pytest.raises(UsageError, match=r"`steps_per_epoch` \(=None\) must be given"):
        Settings(optimizer="rmsprop_warmup", warmup_epochs=1.0).make_optimizer(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"`warmup_epochs` \(=0.0\) must be positive"):
        Settings(optimizer="rmsprop_warmup")


@pytest.mark.parametrize("name", ["cosine", "poly", "linear", "step", "slow_start", "constant"])
@pytest.mark.parametrize("start", [0.0, 0.25])
def test_make_schedule_warms_up_linearly(name: Any, start: float) -> None:
    """By equal steps up to what it would be without a warm-up, or begins there."""
    settings = Settings(lr_schedule=name, warmup_epochs=1.0, warmup_start=start)
    warm = settings.make_schedule(epochs=10, steps_per_epoch=8)
    cold = Settings(lr_schedule=name).make_schedule(epochs=10, steps_per_epoch=8)
    line = [start + (1 - start) * (step + 1) / 8 for step in range(8)]
    assert [warm(step) / cold(0) for step in range(8)] == pytest.approx(line)


@pytest.mark.parametrize("name", ["step", "slow_start"])
def test_make_schedule_keeps_milestones_in_place(name: Any) -> None:
    """Even those before a long warm-up's end."""
    warm = Settings(lr_schedule=name, warmup_epochs=50.0).make_schedule(
        epochs=90, steps_per_epoch=1
    )
    cold = Settings(lr_schedule=name).make_schedule(epochs=90, steps_per_epoch=1)
    assert warm(45) == pytest.approx(cold(45) * 46 / 50)
    assert [warm(step) for step in range(50, 91)] == [cold(step) for step in range(50, 91)]
