"""The parts of the study, and the points of each; later parts follow from earlier results."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space import METHODS, sobol_settings

from allstep.optim import rescale

__all__ = ["PARTS", "Plan", "best_settings", "read_results"]

NUM_TRAIN, NUM_HELD_OUT = 60_000, 10_000
Point = dict[str, Any]
_LOWEST_TEXT_RATES = {"lamb": 2e-3, "adamw": 1e-3}  # at a batch of 1,024


@dataclass(frozen=True)
class Plan:
    """How large the study is; `quick` is only to see that it works."""

    batches: tuple[int, ...] = (128, 1024, 4096)
    methods: tuple[str, ...] = tuple(METHODS)
    num_points: int = 12
    search_epochs: int = 5
    final_epochs: int = 15
    num_best: int = 2
    num_seeds: int = 3
    num_train_samples: int | None = None
    width: int = 16
    texts: str | None = None
    text_epochs: int = 10
    num_text_seeds: int = 2

    @classmethod
    def quick(cls) -> "Plan":
        return cls((128, 1024), ("nesterov", "lamb"), 2, 1, 2, 1, 1, 4096, 4)

    @property
    def small(self) -> int:
        return self.batches[0]

    @property
    def large(self) -> int:
        return self.batches[-1]

    def num_steps(self, batch: int, epochs: int) -> int:
        """Of a final training."""
        return epochs * math.ceil((self.num_train_samples or NUM_TRAIN) / batch)

    def point(self, part: str, name: str, **fields: Any) -> Point:
        """A point with defaults for what it doesn't say."""
        point = {
            "id": f"{part}/{name}",
            "part": part,
            "epochs": self.final_epochs,
            "seed": 0,
            "is_search": False,
            "num_train_samples": self.num_train_samples,
            "measures": False,
            "width": self.width,
        }
        return point | fields


def read_results(folder: Path) -> dict[str, Point]:
    """All points that are done, by id."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*/*.json"))]
    return {result["id"]: result for result in results}


def best_points(plan: Plan, results: Mapping[str, Point], method: str, batch: int) -> list[Point]:
    """The search's points, the best first, of those that ended with a number.

    Raises:
        LookupError: if the search isn't done.
    """
    wanted = [f"search/{method}-{batch}-{index:02}" for index in range(plan.num_points)]
    missing = [name for name in wanted if name not in results]
    if missing:
        raise LookupError(f"{missing[0]} is missing")
    done = [results[name] for name in wanted if results[name]["accuracy"] is not None]
    return sorted(done, key=lambda result: -result["accuracy"])


def best_settings(
    plan: Plan, results: Mapping[str, Point], method: str, batch: int
) -> list[Mapping[str, Any]]:
    """The settings of `best_points`."""
    return [point["settings"] for point in best_points(plan, results, method, batch)]


def search(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """Every method at every batch, on a held-out part of the training set; point by point."""
    for index in range(plan.num_points):
        for batch in reversed(plan.batches):
            for name in plan.methods:
                all_settings = sobol_settings(
                    METHODS[name],
                    batch=batch,
                    epochs=plan.search_epochs,
                    num_points=plan.num_points,
                )
                yield plan.point(
                    "search",
                    f"{name}-{batch}-{index:02}",
                    method=name,
                    batch=batch,
                    epochs=plan.search_epochs,
                    settings=all_settings[index],
                    is_search=True,
                )


def final(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """The best of each search, longer, on the test set."""
    for seed in range(plan.num_seeds):
        for batch in plan.batches:
            for name in plan.methods:
                best = best_settings(plan, results, name, batch)[: plan.num_best]
                for rank, settings in enumerate(best):
                    yield plan.point(
                        "final",
                        f"{name}-{batch}-best{rank}-seed{seed}",
                        method=name,
                        batch=batch,
                        settings=_longer(plan, settings),
                        seed=seed,
                        measures=True,
                    )


def naive(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """What one does first: the small batch's rate, and that rate scaled without a warm-up."""
    base = _longer(plan, best_settings(plan, results, "nesterov", plan.small)[0])
    for seed in range(plan.num_seeds):
        for batch in plan.batches[1:]:
            scaled = base["lr"] * batch / plan.small
            kinds = {
                "unscaled": base,
                "linear": base | {"lr": scaled, "warmup_epochs": 0.0},
                "linear-warmup": base | {"lr": scaled},
            }
            for kind, settings in kinds.items():
                name = f"{kind}-{batch}-seed{seed}"
                fields = {"method": kind, "batch": batch, "settings": settings, "seed": seed}
                yield plan.point("naive", name, measures=True, **fields)


def best_of_all(plan: Plan, results: Mapping[str, Point], batch: int) -> Point:
    """The search's best point at a batch, whatever the method.

    Raises:
        LookupError: if the search isn't done.
    """
    points = [p for name in plan.methods for p in best_points(plan, results, name, batch)]
    return max(points, key=lambda point: point["accuracy"])


def own(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """LAMB around the best two of its search, at the goals' epochs, on held-out samples.

    What `lamb_fashion` is made of.
    """
    for batch, epochs in reversed(_goals(plan)):
        for rank, best in enumerate(best_settings(plan, results, "lamb", batch)[:2]):
            settings = _longer(plan, best, epochs)
            for factor in (1.0, 1.4):
                for schedule in ("linear", "cosine"):
                    changed = {"lr": factor * settings["lr"], "lr_schedule": schedule}
                    yield plan.point(
                        "own",
                        f"best{rank}-{factor:g}-{schedule}-{batch}",
                        method=f"lamb {schedule}",
                        batch=batch,
                        epochs=epochs,
                        settings=settings | changed,
                        is_search=True,
                    )


def shipped(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """The recipes by their own rules, untuned; beside the best of all at 128."""
    best = best_of_all(plan, results, plan.small)
    for seed in range(plan.num_seeds):
        for epochs in (plan.search_epochs, plan.final_epochs):
            yield plan.point(
                "shipped",
                f"tuned-{plan.small}-{epochs}-seed{seed}",
                method=f"tuned {best['method']}",
                batch=plan.small,
                epochs=epochs,
                settings=_longer(plan, best["settings"], epochs),
                seed=seed,
            )
    recipes = ("lamb_fashion", "goyal_1h", "akiba_15min", "lars_32k", "lamb_imagenet")
    for seed in range(plan.num_seeds):
        for batch, epochs in _goals(plan):
            for recipe in recipes:
                yield plan.point(
                    "shipped",
                    f"{recipe}-{batch}-{epochs}-seed{seed}",
                    method=recipe,
                    batch=batch,
                    epochs=epochs,
                    settings=_published(recipe, batch, epochs),
                    seed=seed,
                )


def _goals(plan: Plan) -> list[tuple[int, int]]:
    """Batch and epochs at which recipes are to come near the small batch."""
    return [(plan.batches[1], plan.search_epochs), (plan.large, plan.final_epochs)]


def control(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """Equal steps: the small batch with as few as the large one, and the large one with more."""
    few = plan.num_steps(plan.large, plan.final_epochs)
    small = best_settings(plan, results, "nesterov", plan.small)[0]
    share = small["warmup_epochs"] / plan.search_epochs
    for seed in range(plan.num_seeds):
        yield plan.point(
            "control",
            f"few-steps-{plan.small}-seed{seed}",
            method="nesterov",
            batch=plan.small,
            epochs=1,
            num_train_samples=few * plan.small,
            settings=small | {"warmup_epochs": share},
            seed=seed,
            measures=True,
        )
    middle, factor = plan.batches[-2], plan.large // plan.batches[-2]
    epochs = plan.final_epochs * factor  # as many steps as the middle batch makes
    for seed in range(plan.num_seeds):
        for name in ("nesterov", "lamb"):
            best = _longer(plan, best_settings(plan, results, name, plan.large)[0], epochs)
            yield plan.point(
                "control",
                f"steps-of-{middle}-{name}-{plan.large}-seed{seed}",
                method=name,
                batch=plan.large,
                epochs=epochs,
                settings=best,
                seed=seed,
                measures=True,
            )


def norms(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """Layer-wise rates by the L1 and Linf norm; by the L2 norm, `final` has them."""
    for seed in range(plan.num_seeds):
        for method in ("lars", "lamb"):
            if method not in plan.methods:
                continue
            best = _longer(plan, best_settings(plan, results, method, plan.large)[0])
            for norm in ("l1", "linf"):
                name = f"{method}-{norm}-{plan.large}-seed{seed}"
                fields = {"batch": plan.large, "settings": best | {"norm": norm}, "seed": seed}
                yield plan.point("norms", name, method=f"{method} {norm}", **fields)


def akiba(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """The 15-minute recipe in small, 64 micro-batches of 32, and without each of its pieces."""
    batch = 2048
    whole = _published("akiba_15min", batch, plan.final_epochs) | {"last_statistics": True}
    warm = {"optimizer": "sgd", "warmup_epochs": plan.final_epochs * 5 / 90}
    kinds = {
        "whole": whole,
        "gradual warm-up for RMSprop's": whole | warm,
        "no warm-up": whole | {"optimizer": "sgd", "warmup_epochs": 0.0},
        "steps for slow start": whole | {"lr_schedule": "step"},
        "moving averages": whole | {"last_statistics": False},
    }
    for seed in range(plan.num_seeds):
        for index, (kind, settings) in enumerate(kinds.items()):
            fields = {"method": kind, "batch": batch, "settings": settings, "seed": seed}
            yield plan.point("akiba", f"{index}-seed{seed}", **fields)


def text(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """LAMB and AdamW on hidden tokens in two stages, at rates that follow the root.

    The smallest batch and the largest try six; between them the two lowest are left out.

    Raises:
        LookupError: if no folder with texts was given.
    """
    for batch, name, index in _text_rates():
        lr = _LOWEST_TEXT_RATES[name] * 2**index * (batch / 1024) ** 0.5
        yield _text_point(plan, "text", f"{name}-{batch}-{index}", name, batch, lr)


def text_seeds(plan: Plan, results: Mapping[str, Point]) -> Iterator[Point]:
    """The best rate of each, with other seeds.

    Raises:
        LookupError: if a rate hasn't been tried, or no folder with texts was given.
    """
    tried: dict[tuple[int, str], list[Point]] = {}
    for batch, name, index in _text_rates():
        if f"text/{name}-{batch}-{index}" not in results:
            raise LookupError(f"text/{name}-{batch}-{index} is missing")
        tried.setdefault((batch, name), []).append(results[f"text/{name}-{batch}-{index}"])
    for seed in range(1, plan.num_text_seeds):
        for (batch, name), points in tried.items():
            done = [point for point in points if point["loss"] is not None]
            if done:
                lr = min(done, key=lambda point: point["loss"])["settings"]["lr"]
                point_name = f"{name}-{batch}-seed{seed}"
                yield _text_point(plan, "text_seeds", point_name, name, batch, lr, seed)


def _text_rates() -> Iterator[tuple[int, str, int]]:
    """(batch, method, how often the lowest rate is doubled)."""
    for batch in (32, 1024, 128, 512):  # the ends first
        for index in range(6) if batch in (32, 1024) else range(2, 6):
            for name in _LOWEST_TEXT_RATES:
                yield batch, name, index


def _text_point(
    plan: Plan, part: str, point_name: str, method: str, batch: int, lr: float, seed: int = 0
) -> Point:
    if plan.texts is None:
        raise LookupError("give a folder of texts with --texts")
    settings = {
        "optimizer": method,
        "lr": lr,
        "weight_decay": 0.01,
        "lr_schedule": "linear",
        "warmup_epochs": 0.2843 * (plan.text_epochs - 1),
        "second_lr_share": 4 / 6,
        "second_warmup_epochs": 0.128,
    }
    fields = {"epochs": plan.text_epochs, "texts": plan.texts, "settings": settings, "seed": seed}
    return plan.point(part, point_name, method=method, batch=batch, **fields)


PARTS = {
    "search": search,
    "own": own,
    "shipped": shipped,
    "naive": naive,
    "final": final,
    "control": control,
    "norms": norms,
    "akiba": akiba,
    "text": text,
    "text_seeds": text_seeds,
}


def _longer(plan: Plan, settings: Mapping[str, Any], epochs: int | None = None) -> dict[str, Any]:
    """Settings of a search for another number of epochs; the warm-up's share stays."""
    factor = (epochs or plan.final_epochs) / plan.search_epochs
    return dict(settings) | {"warmup_epochs": settings["warmup_epochs"] * factor}


def _published(recipe: str, batch: int, epochs: int) -> dict[str, Any]:
    settings = rescale(recipe, global_batch=batch, epochs=epochs).settings
    names = ("optimizer", "lr", "momentum", "weight_decay", "lr_schedule")
    fields = {name: getattr(settings, name) for name in (*names, "warmup_epochs", "warmup_start")}
    return fields | {"last_statistics": recipe == "akiba_15min"}
