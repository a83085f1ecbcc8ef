"""Table and plot of the study, from the points that there are."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from critical import fit_steps, mean_curve, steps_to
from points import Plan, Point
from rich.console import Console
from space import METHODS

__all__ = ["write_report"]

LOWEST = 75  # of the plot, in per cent
ROOT = Path(__file__).parent.parent.parent
Results = Mapping[str, Point]


def write_report(plan: Plan, results: Results, folder: Path | None = None) -> None:
    """Writes large_batch.md and large_batch.png in the docs, or in `folder`; prints the table."""
    table = folder or ROOT / "docs" / "tables"
    picture = folder or ROOT / "docs" / "guides"
    text = "\n".join(_sections(plan, results))
    (table / "large_batch.md").write_text(text)
    Console(highlight=False).print(text)
    if any(point["part"] == "search" for point in results.values()):
        _plot(plan, results, picture / "large_batch.png")


def _sections(plan: Plan, results: Results) -> list[str]:
    num_planned = len(plan.batches) * len(plan.methods) * plan.num_points
    num_done = len(_of(results, "search"))
    num_fashion = sum("texts" not in point for point in results.values())
    lines = [
        f"{num_fashion:,} trainings of `fashion` with `--width {plan.width}`, micro-batches of 32,"
        f" and {len(results) - num_fashion:,} of `text`."
        f" The search: {plan.num_points} Sobol points for each method and batch,"
        f" {plan.search_epochs} epochs, judged on 10,000 held-out training samples;"
        f" {num_done} of its {num_planned} points are done.",
        "",
    ]
    sections = (
        _final, _shipped, _naive, _control, _critical, _norms, _akiba, _text, _search, _own
    )  # fmt: skip
    for section in sections:
        lines += section(plan, results)
    return lines


def _of(results: Results, part: str, **fields: Any) -> list[Point]:
    return [
        point
        for point in results.values()
        if point["part"] == part and all(point[name] == value for name, value in fields.items())
    ]


def _accuracy(points: Sequence[Point]) -> str:
    """Mean and standard deviation in per cent, with what diverged."""
    reached = [100 * point["accuracy"] for point in points if point["accuracy"] is not None]
    diverged = len(points) - len(reached)
    if not reached:
        return "diverged" if diverged else "-"
    spread = f" ± {statistics.stdev(reached):.2f}" if len(reached) > 1 else ""
    note = f" ({diverged} diverged)" if diverged else ""
    return f"{statistics.mean(reached):.2f}{spread}{note}"


def _mean(points: Sequence[Point], name: str) -> str:
    values = [point[name] for point in points if point.get(name) is not None]
    return f"{statistics.mean(values):.3g}" if values else "-"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(row)} |" for row in lines] + [""]


def _ranked(points: Sequence[Point], rank: int) -> list[Point]:
    """The seeds of the search's best setting (0) or its second best (1)."""
    return [point for point in points if f"-best{rank}-" in point["id"]]


def _final(plan: Plan, results: Results) -> list[str]:
    rows = []
    for batch in plan.batches:
        for method in plan.methods:
            points = _of(results, "final", method=method, batch=batch)
            best = _ranked(points, 0)
            if best:
                tried = len(_of(results, "search", method=method, batch=batch))
                second = _accuracy(_ranked(points, 1))
                shown = [_mean(best, name) for name in ("top_eigenvalue", "loss_rise")]
                cells = [_accuracy(best), second, str(len(best)), str(tried), *shown]
                rows.append([f"{batch:,}", method, *cells])
    header = ["batch", "method", "best setting, %", "second, %", "seeds", "points tried"]
    header += ["top eigenvalue", "loss rise"]
    title = f"**Tuned, {plan.final_epochs} epochs, test set** (settings as ranked by the search)"
    residuals = [point["residual"] for point in _of(results, "final") if "residual" in point]
    told = f"Residuals of the eigenvalues: {_median_and_worst(residuals)}." if residuals else ""
    return [title, "", *_table(header, rows), told, ""] if rows else []


def _median_and_worst(residuals: Sequence[float]) -> str:
    return f"median {statistics.median(residuals):.1%}, worst {max(residuals):.0%}"


def _critical(plan: Plan, results: Results) -> list[str]:
    """The batch at which steps and samples to a target are both twice their least."""
    curves: dict[int, list[Any]] = {batch: [] for batch in plan.batches}
    for batch, method, rank in product(plan.batches, plan.methods, range(plan.num_best)):
        points = _ranked(_of(results, "final", method=method, batch=batch), rank)
        if points:
            curves[batch].append(mean_curve(points))
    if not all(curves.values()):
        return []
    reached = min(max(max(accuracies) for _, accuracies in own) for own in curves.values())
    target = math.floor(200 * reached) / 200  # whole half per cents
    steps = {batch: min(steps_to(target, curve) for curve in own) for batch, own in curves.items()}
    least_steps, least_samples = fit_steps(steps)
    rows = []
    for batch in plan.batches:
        points = _of(results, "final", batch=batch)
        fitted = least_steps + least_samples / batch
        cells = [f"{steps[batch]:,.0f}", f"{batch * steps[batch]:,.0f}", f"{fitted:,.0f}"]
        rows.append([f"{batch:,}", *cells, _mean(points, "mean_noise_scale")])
    header = ["batch", "steps", "samples", "steps by the fit", "noise scale, mean over the run"]
    found = f"{least_samples / least_steps:,.0f}" if least_steps > 0 else "beyond these batches"
    return [
        f"**The critical batch: steps of the fastest setting to {target:.1%}**",
        "",
        *_table(header, rows),
        f"Found: {found}, by steps = least steps + least samples / batch; the noise scale is what"
        " predicts it.",
        "",
    ]


def _shipped(plan: Plan, results: Results) -> list[str]:
    points = _of(results, "shipped")
    names = dict.fromkeys((p["epochs"], p["batch"], p["method"]) for p in points)
    references = {
        epochs: _of(results, "shipped", batch=plan.small, epochs=epochs) for epochs, *_ in names
    }
    rows = []
    for epochs, batch, method in sorted(names):
        own = _of(results, "shipped", batch=batch, epochs=epochs, method=method)
        cells = [_accuracy(own), _gap(references[epochs], own), str(len(own))]
        rows.append([str(epochs), f"{batch:,}", f"`{method}`", *cells])
    header = ["epochs", "batch", "recipe", "accuracy, %", "points lost", "seeds"]
    title = f"**Recipes as they are shipped, beside the best of all at {plan.small}**"
    return [title, "", *_table(header, rows)] if rows else []


def _gap(reference: Sequence[Point], points: Sequence[Point]) -> str:
    """By how many points of accuracy the means differ."""
    means = [
        statistics.mean(100 * (point["accuracy"] or 0.0) for point in own)
        for own in (reference, points)
        if own
    ]
    return f"{means[0] - means[1]:.2f}" if len(means) == 2 else "-"


def _naive(plan: Plan, results: Results) -> list[str]:
    words = {
        "unscaled": "the rate of batch 128",
        "linear": "linear scaling, no warm-up",
        "linear-warmup": "linear scaling and warm-up, nothing tuned again",
    }
    rows = []
    for batch in plan.batches[1:]:
        for kind, name in words.items():
            own = _of(results, "naive", method=kind, batch=batch)
            if own:
                eigenvalue = _mean(own, "top_eigenvalue")
                rows.append([f"{batch:,}", name, _accuracy(own), str(len(own)), eigenvalue])
    header = ["batch", "SGD with", "accuracy, %", "seeds", "top eigenvalue"]
    title = f"**What one does first, {plan.final_epochs} epochs**"
    return [title, "", *_table(header, rows)] if rows else []


def _control(plan: Plan, results: Results) -> list[str]:
    points = _of(results, "control")
    rows = []
    for batch, method, steps in sorted(
        {(p["batch"], p["method"], p["steps"] or 0) for p in points}
    ):
        own = [p for p in points if (p["batch"], p["method"]) == (batch, method)]
        cells = [_accuracy(own), str(len(own)), _mean(own, "top_eigenvalue")]
        rows.append([f"{batch:,}", method, f"{steps:,}", *cells])
    header = ["batch", "method", "steps", "accuracy, %", "seeds", "top eigenvalue"]
    title = (
        f"**Equal steps: batch {plan.small:,} in as few as {plan.large:,} makes, and"
        f" {plan.large:,} in as many as {plan.batches[-2]:,} makes**"
    )
    return [title, "", *_table(header, rows)] if rows else []


def _norms(plan: Plan, results: Results) -> list[str]:
    rows = []
    for method in ("lars", "lamb"):
        points = {norm: _of(results, "norms", method=f"{method} {norm}") for norm in ("l1", "linf")}
        if any(points.values()):
            points["l2"] = _ranked(_of(results, "final", method=method, batch=plan.large), 0)
        rows += [
            [f"{method} {norm}", _accuracy(own), str(len(own))]
            for norm, own in sorted(points.items())
            if own
        ]
    title = f"**Norms, batch {plan.large:,}, {plan.final_epochs} epochs**"
    return [title, "", *_table(["method", "accuracy, %", "seeds"], rows)] if rows else []


def _akiba(plan: Plan, results: Results) -> list[str]:
    kinds = dict.fromkeys(point["method"] for point in _of(results, "akiba"))
    points = [(kind, _of(results, "akiba", method=kind)) for kind in kinds]
    rows = [[kind, _accuracy(own), str(len(own))] for kind, own in points]
    title = "**`akiba_15min` in small, batch 2,048, and with one piece replaced**"
    return [title, "", *_table(["", "accuracy, %", "seeds"], rows)] if rows else []


def _text(plan: Plan, results: Results) -> list[str]:
    """The held-out loss at the best of the rates, with other seeds there, and at each."""
    rows = []
    keys = dict.fromkeys((p["batch"], p["method"]) for p in _of(results, "text"))
    for batch, method in sorted(keys):
        points = _of(results, "text", batch=batch, method=method)
        losses = [point["loss"] for point in points if point["loss"] is not None]
        again = _of(results, "text_seeds", batch=batch, method=method)
        each = ", ".join(
            f"{point['settings']['lr']:.2g}: {_loss(point)}"
            for point in sorted(points, key=lambda point: point["settings"]["lr"])
        )
        best = f"{min(losses):.3f}" if losses else "-"
        rows.append([f"{batch:,}", method, best, ", ".join(map(_loss, again)) or "-", each])
    title = f"**`text`, hidden tokens, two stages, {plan.text_epochs} epochs: held-out loss, nats**"
    header = ["batch", "method", "best", "another seed", "rate: loss"]
    return [title, "", *_table(header, rows)] if rows else []


def _loss(point: Point) -> str:
    return "diverged" if point["loss"] is None else f"{point['loss']:.3f}"


def _search(plan: Plan, results: Results) -> list[str]:
    rows = []
    for batch in plan.batches:
        for method in plan.methods:
            points = _of(results, "search", method=method, batch=batch)
            reached = sorted(points, key=lambda point: point["accuracy"] or 0.0)
            if reached:
                values = [100 * (point["accuracy"] or 0.0) for point in reached]
                failed = sum(point["accuracy"] is None for point in points)
                lr = reached[-1]["settings"]["lr"]
                cells = [f"{values[-1]:.2f}", f"{statistics.median(values):.2f}"]
                cells += [f"{lr:.3g}{_edge(method, batch, lr)}", str(len(points)), str(failed)]
                rows.append([f"{batch:,}", method, *cells])
    header = ["batch", "method", "best, %", "median, %", "best's rate", "points", "diverged"]
    title = (
        f"**The search, {plan.search_epochs} epochs, held-out samples** (▲ ▼: within a tenth of the"
        " range of rates from its end)"
    )
    return [title, "", *_table(header, rows)] if rows else []


def _own(plan: Plan, results: Results) -> list[str]:
    """The best first."""
    points = sorted(
        _of(results, "own"), key=lambda p: (p["batch"], p["epochs"], -(p["accuracy"] or 0.0))
    )
    rows = []
    for point in points:
        settings = point["settings"]
        numbers = [f"{settings[name]:.3g}" for name in ("lr", "momentum", "weight_decay")]
        warmup = f"{settings['warmup_epochs'] / point['epochs']:.0%}"
        cells = [f"{point['batch']:,}", str(point["epochs"]), settings["lr_schedule"], *numbers]
        rows.append([*cells, warmup, _accuracy([point])])
    header = ["batch", "epochs", "schedule", "lr", "momentum", "decay", "warm-up", "accuracy, %"]
    title = "**What `lamb_fashion` was chosen from: LAMB near the search's best two, held out**"
    return [title, "", *_table(header, rows)] if rows else []


def _edge(method: str, batch: int, lr: float) -> str:
    share = METHODS[method].share_of_range(batch, lr)
    return " ▲" if share > 0.9 else " ▼" if share < 0.1 else ""


def _plot(plan: Plan, results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "search": f"search, {plan.search_epochs} epochs",
        "final": f"test set, {plan.final_epochs} epochs",
    }
    shown = {part: title for part, title in titles.items() if _of(results, part)}
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(5 * len(shown), 4), sharey=True, squeeze=False
    )
    for axis, (part, title) in zip(axes[0], shown.items(), strict=True):
        for index, method in enumerate(plan.methods):
            points = _of(results, part, method=method)
            xs = [p["batch"] * 1.06 ** (index - 2.5) for p in points]
            ys = [100 * (p["accuracy"] or 0.0) for p in points]
            color = f"C{index}"
            axis.plot(xs, ys, ".", color=color, alpha=0.4)
            below = [x for x, y in zip(xs, ys, strict=True) if y < LOWEST]
            axis.plot(below, [LOWEST + 0.2] * len(below), "v", color=color, alpha=0.4)
            lines = [(batch, _line(part, points, batch)) for batch in plan.batches]
            drawn = [(batch, value) for batch, value in lines if value is not None]
            axis.plot(*zip(*drawn, strict=True), color=color, label=method)
        axis.set(title=title, xlabel="global batch", xscale="log", ylim=(LOWEST, 94))
        axis.set_xticks(plan.batches, [f"{batch:,}" for batch in plan.batches], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy, % (triangles: below)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _line(part: str, points: Sequence[Point], batch: int) -> float | None:
    """The search's best point; of the final trainings the mean over the best setting's seeds."""
    own = [point for point in points if point["batch"] == batch]
    own = own if part == "search" else _ranked(own, 0)
    values = [100 * (point["accuracy"] or 0.0) for point in own]
    if not values:
        return None
    return max(values) if part == "search" else statistics.mean(values)
