"""Table and plot of the study, from the points that there are."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from points import Plan, Point
from rich.console import Console

__all__ = ["write_report"]

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
    lines = [
        f"{len(results):,} trainings of `fashion` with `--width {plan.width}`, micro-batches of 32."
        f" The search: {plan.num_points} Sobol points for each method and batch,"
        f" {plan.search_epochs} epochs, judged on 10,000 held-out training samples;"
        f" {num_done} of its {num_planned} points are done.",
        "",
    ]
    sections = (_final, _shipped, _naive, _control, _norms, _akiba, _text, _search)
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


def _best_rank(points: Sequence[Point]) -> list[Point]:
    """The points of the better of the settings that were trained to the end, by their mean."""
    by_rank: dict[str, list[Point]] = {}
    for point in points:
        by_rank.setdefault(point["id"].split("-")[-2], []).append(point)
    return max(
        by_rank.values(),
        key=lambda own: statistics.mean(point["accuracy"] or 0.0 for point in own),
        default=[],
    )


def _final(plan: Plan, results: Results) -> list[str]:
    rows = []
    for batch in plan.batches:
        for method in plan.methods:
            points = _of(results, "final", method=method, batch=batch)
            best = _best_rank(points)
            if best:
                tried = len(_of(results, "search", method=method, batch=batch))
                measures = ("top_eigenvalue", "loss_rise", "noise_scale")
                shown = [_mean(best, name) for name in measures]
                seeds = str(len(best))
                rows.append([f"{batch:,}", method, _accuracy(best), seeds, str(tried), *shown])
    header = ["batch", "method", "accuracy, %", "seeds", "points tried"]
    header += ["top eigenvalue", "loss rise", "noise scale"]
    title = f"**Tuned, {plan.final_epochs} epochs, test set** (the better of the two best settings)"
    return [title, "", *_table(header, rows)] if rows else []


def _shipped(plan: Plan, results: Results) -> list[str]:
    points = _of(results, "shipped")
    names = dict.fromkeys((p["batch"], p["epochs"], p["method"]) for p in points)
    rows = []
    for batch, epochs, method in sorted(names):
        own = _of(results, "shipped", batch=batch, epochs=epochs, method=method)
        rows.append([f"{batch:,}", str(epochs), f"`{method}`", _accuracy(own), str(len(own))])
    header = ["batch", "epochs", "recipe", "accuracy, %", "seeds"]
    title = "**Published recipes by their own rules, untuned**"
    return [title, "", *_table(header, rows)] if rows else []


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
    rows = []
    few = plan.num_steps(plan.large, plan.final_epochs)
    middle = plan.num_steps(plan.batches[-2], plan.final_epochs)
    own = _of(results, "control", batch=plan.small)
    if own:
        name = f"batch {plan.small:,} in as few steps as batch {plan.large:,} makes"
        eigenvalue = _mean(own, "top_eigenvalue")
        rows.append([name, str(few), _accuracy(own), str(len(own)), eigenvalue])
    for point in _of(results, "control", batch=plan.large):
        name = f"batch {plan.large:,}, {point['method']}, in as many steps as {plan.batches[-2]:,}"
        rows.append([name, str(middle), _accuracy([point]), "1", _mean([point], "top_eigenvalue")])
    header = ["control", "steps", "accuracy, %", "seeds", "top eigenvalue"]
    return ["**Equal steps**", "", *_table(header, rows)] if rows else []


def _norms(plan: Plan, results: Results) -> list[str]:
    methods = dict.fromkeys(point["method"] for point in _of(results, "norms"))
    points = [(method, _of(results, "norms", method=method)) for method in methods]
    rows = [[method, _accuracy(own), str(len(own))] for method, own in points]
    title = f"**Norms, batch {plan.large:,}, {plan.final_epochs} epochs**"
    return [title, "", *_table(["method", "accuracy, %", "seeds"], rows)] if rows else []


def _akiba(plan: Plan, results: Results) -> list[str]:
    kinds = dict.fromkeys(point["method"] for point in _of(results, "akiba"))
    points = [(kind, _of(results, "akiba", method=kind)) for kind in kinds]
    rows = [[kind, _accuracy(own), str(len(own))] for kind, own in points]
    title = "**`akiba_15min` in small, batch 2,048, and with one piece replaced**"
    return [title, "", *_table(["", "accuracy, %", "seeds"], rows)] if rows else []


def _text(plan: Plan, results: Results) -> list[str]:
    """The held-out loss at the best of the rates, and at each."""
    rows = []
    keys = dict.fromkeys((p["batch"], p["method"]) for p in _of(results, "text"))
    for batch, method in sorted(keys):
        points = _of(results, "text", batch=batch, method=method)
        losses = [point["loss"] for point in points if point["loss"] is not None]
        each = ", ".join(
            f"{point['settings']['lr']:.2g}: {_loss(point)}"
            for point in sorted(points, key=lambda point: point["settings"]["lr"])
        )
        rows.append([f"{batch:,}", method, f"{min(losses):.3f}" if losses else "-", each])
    title = f"**`text`, hidden tokens, two stages, {plan.text_epochs} epochs: held-out loss, nats**"
    header = ["batch", "method", "best", "rate: loss"]
    return [title, "", *_table(header, rows)] if rows else []


def _loss(point: Point) -> str:
    return "diverged" if point["loss"] is None else f"{point['loss']:.3f}"


def _search(plan: Plan, results: Results) -> list[str]:
    rows = []
    for batch in plan.batches:
        for method in plan.methods:
            points = _of(results, "search", method=method, batch=batch)
            reached = sorted(100 * point["accuracy"] for point in points if point["accuracy"])
            if reached:
                median = statistics.median(reached)
                failed = sum(point["accuracy"] is None for point in points)
                cells = [f"{reached[-1]:.2f}", f"{median:.2f}", str(len(points)), str(failed)]
                rows.append([f"{batch:,}", method, *cells])
    header = ["batch", "method", "best, %", "median, %", "points", "diverged"]
    title = f"**The search, {plan.search_epochs} epochs, held-out samples**"
    return [title, "", *_table(header, rows)] if rows else []


def _plot(plan: Plan, results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    titles = (f"search, {plan.search_epochs} epochs", f"test set, {plan.final_epochs} epochs")
    for axis, part, title in zip(axes, ("search", "final"), titles, strict=True):
        for index, method in enumerate(plan.methods):
            points = [p for p in _of(results, part, method=method) if p["accuracy"]]
            color = f"C{index}"
            axis.plot(
                [p["batch"] * 1.06 ** (index - 2.5) for p in points],
                [100 * p["accuracy"] for p in points],
                ".",
                color=color,
                alpha=0.4,
            )
            batches = sorted({p["batch"] for p in points})
            best = [max(100 * p["accuracy"] for p in points if p["batch"] == b) for b in batches]
            axis.plot(batches, best, color=color, label=method)
        axis.set(title=title, xlabel="global batch", xscale="log", ylim=(75, 94))
        axis.set_xticks(plan.batches, [f"{batch:,}" for batch in plan.batches], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, %")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
