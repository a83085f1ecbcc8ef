"""The report of the recipe `cots` on its neurons: a table, and pictures of their best stimuli."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import allstep
from allstep.recipes.cots_faces import Best, FaceTest, parts_of

_TEMPLATE_SEED = 700_000
_MOST_FILTERS = 400
_ZOOM = 3
_FACE = (80, 220, 100)
_DISTRACTOR = (60, 60, 60)


def table_of_neurons(
    stages: "list[allstep.nn.AutoencoderStage]",
    untrained: "list[allstep.nn.AutoencoderStage]",
    test: FaceTest,
    photographs: list[list[Tensor]],
    run_dir: Path,
    seed: int,
) -> list[dict[str, Any]]:
    """A table of each layer's best neuron and of baselines. Collective.

    Args:
        stages: the trained net.
        untrained: an untrained net with the same layers.
        test: the test of the neurons.
        photographs: photographs from which random templates are cut.
        run_dir: folder in which rank 0 writes the pictures of filters and best stimuli.
        seed: seed of the random templates.

    Returns:
        The rows; [] on ranks other than 0.
    """
    trained = [test.layer(name, part) for name, part in parts_of(stages)]
    random = [test.layer(f"{name}, untrained", part) for name, part in parts_of(untrained)]
    filters = _some_filters(stages[0])
    if test.grid.rank != 0:
        return []
    _save_filters(run_dir / "filters.png", filters, test.form.channels)
    _save_stimuli(run_dir / "best_stimuli.png", [test.shown(best) for best in trained])
    rows: list[Best] = []
    for best, other in zip(trained, random, strict=True):
        generator = torch.Generator().manual_seed(seed + _TEMPLATE_SEED)
        rows += [best, other, test.random_templates(best.num_neurons, photographs, generator)]
    rows.append(test.feature("brightness", lambda x: x.float().mean((1, 2))[:, None]))
    rows.append(test.feature("contrast", lambda x: x.float().std((1, 2))[:, None]))
    rows.append(test.mean_face())
    all_negative = {"name": "never a face", "accuracy": test.all_negative, "auc": 0.5}
    return [*(best.as_dict() for best in rows), all_negative]


def show(report: dict[str, Any], run_dir: Path) -> None:
    """Prints the report."""
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


def _some_filters(stage: "allstep.nn.AutoencoderStage") -> Tensor:
    """Up to a few hundred filters, spread over the whole layer. Collective."""
    layer = stage.filtering
    num_filters = math.prod(layer.block_layout.shape) * layer.weight.shape[2]
    numbers = torch.linspace(0, num_filters - 1, min(num_filters, _MOST_FILTERS)).long()
    return stage.some_filters(numbers)


def _save_filters(path: Path, filters: Tensor, channels: int) -> None:
    """Saves filters [num_filters, kernel * kernel * channels] as a sheet in which zero is grey."""
    flat = filters.float()
    side = round((flat.shape[1] / channels) ** 0.5)
    tiles = flat.view(-1, side, side, channels)
    tiles = 127.5 + 127.5 * tiles / tiles.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
    tiles = tiles.expand(-1, -1, -1, 3).to(torch.uint8)
    border = torch.tensor((0, 0, 0), dtype=torch.uint8)
    _save(path, [_framed(tile, border) for tile in tiles], columns=20)


def _save_stimuli(path: Path, rows: list[tuple[Tensor, Tensor]]) -> None:
    """Saves a sheet with a row per neuron, in which faces have a green frame.

    `rows` are each neuron's best stimuli, uint8 [num, side, side], and which are faces, [num].
    """
    colours = {True: _FACE, False: _DISTRACTOR}
    tiles = [
        _framed(
            picture[:, :, None].expand(-1, -1, 3),
            torch.tensor(colours[bool(is_face)], dtype=torch.uint8),
        )
        for pictures, are_faces in rows
        for picture, is_face in zip(pictures, are_faces, strict=True)
    ]
    _save(path, tiles, columns=len(rows[0][0]))


def _framed(tile: Tensor, colour: Tensor) -> Tensor:
    height, width, _ = tile.shape
    framed = colour.expand(height + 2, width + 2, 3).clone()
    framed[1:-1, 1:-1] = tile
    return framed


def _save(path: Path, tiles: list[Tensor], *, columns: int) -> None:
    from PIL import Image

    missing = [torch.zeros_like(tiles[0])] * (-len(tiles) % columns)
    rows = torch.stack([*tiles, *missing]).view(-1, columns, *tiles[0].shape)
    sheet = rows.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [height, width, colour]
    image = Image.fromarray(sheet.numpy())
    image.resize((_ZOOM * image.width, _ZOOM * image.height), Image.Resampling.NEAREST).save(path)
