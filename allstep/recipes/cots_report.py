"""What the recipe `cots` tells of its neurons."""

from pathlib import Path
from typing import Any

import torch

import allstep
from allstep.recipes.cots_faces import Best, parts_of
from allstep.recipes.cots_pictures import save_filters, save_stimuli
from allstep.recipes.cots_sets import PictureSets

__all__ = ["show", "table_of_neurons"]

_TEMPLATE_SEED = 700_000


def table_of_neurons(
    stages: "list[allstep.nn.Stage]",
    untrained: "list[allstep.nn.Stage]",
    sets: PictureSets,
    run_dir: Path,
    seed: int,
) -> list[dict[str, Any]]:
    """Each layer's best neuron and what it is compared with. Collective.

    Args:
        stages: the trained net.
        untrained: another of the same layers.
        sets: the pictures.
        run_dir: where rank 0 writes the pictures of filters and best stimuli.
        seed: of the random templates.

    Returns:
        A row for each; nothing on other ranks than 0.
    """
    test = sets.face_test()
    trained = [test.layer(name, part) for name, part in parts_of(stages)]
    random = [test.layer(f"{name}, untrained", part) for name, part in parts_of(untrained)]
    filters = stages[0].whole_filters()
    if sets.grid.rank != 0:
        return []
    assert filters is not None
    save_filters(run_dir / "filters.png", filters, sets.channels)
    save_stimuli(run_dir / "best_stimuli.png", [test.shown(best) for best in trained])
    rows: list[Best] = []
    for best, other in zip(trained, random, strict=True):
        generator = torch.Generator().manual_seed(seed + _TEMPLATE_SEED)
        photographs = sets.train_photographs
        rows += [best, other, test.random_templates(best.num_neurons, photographs, generator)]
    rows.append(test.feature("brightness", lambda x: x.float().mean((1, 2))[:, None]))
    rows.append(test.feature("contrast", lambda x: x.float().std((1, 2))[:, None]))
    rows.append(test.mean_face())
    all_negative = {"name": "never a face", "accuracy": test.all_negative, "auc": 0.5}
    return [*(best.as_dict() for best in rows), all_negative]


def show(report: dict[str, Any], run_dir: Path) -> None:
    """The report on one screen."""
    if report["interrupted"] is None:
        print(f"{'':32}{'neurons':>8}{'AUC':>8}{'accuracy':>10}   chosen on the other half")
        for row in report["neurons"]:
            count = row.get("num_neurons", "")
            print(f"{row['name']:32}{count:>8}{row['auc']:>8.3f}{row['accuracy']:>10.2%}")
    print(f"parameters: {report['num_parameters']:,} on {report['workers']} worker(s)")
    print(f"speed: {report['samples_per_s']:,.0f} samples/s")
    print(f"run: {run_dir}")
    if report["interrupted"] is not None:
        workers = f" --workers {report['workers']}" if report["workers"] > 1 else ""
        print(f"next: allstep train --resume {run_dir}{workers}")
    else:
        print(f"next: see {run_dir}/filters.png and best_stimuli.png")
