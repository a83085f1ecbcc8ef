"""The `images` recipe's pipeline against bare decoding of the same JPEG files.

    python benchmarks/bench_images.py [--quick]

A training sample is decoded, cropped at random, resized and made a tensor; bare decoding opens
the file and converts it to RGB at full size. Prints a table, writes
benchmarks/results/bench_images.json, ends with one line of JSON: `decode_share`, the pipeline's
images per second over bare decoding's (at least 0.9 is the aim).
"""

import argparse
import tempfile
from pathlib import Path

import skimage.data
import sklearn.datasets
import torch
from common import interleave, print_headline, ratio, write_results
from PIL import Image
from rich.console import Console
from rich.table import Table

import allstep
from allstep import Communicator
from allstep.data.image_folder import ImageFolder, center_crop, random_crop

SIZE = 224
BATCH = 8


def write_photographs(folder: Path) -> list[tuple[Path, int]]:
    """The photographs of two packages as JPEG files of their own sizes."""
    names = ("astronaut", "chelsea", "coffee", "rocket", "camera", "grass", "gravel")
    pictures = [getattr(skimage.data, name)() for name in names]
    pictures += sklearn.datasets.load_sample_images().images
    images = []
    for index, pixels in enumerate(pictures):
        path = folder / f"{index}.jpg"
        Image.fromarray(pixels).convert("RGB").save(path, quality=90)
        images.append((path, 0))
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pictures a repeat")
    passes = 4 if parser.parse_args().quick else 16
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        images = write_photographs(Path(folder)) * passes

        def decode() -> None:
            for path, _ in images:
                with Image.open(path) as image:
                    image.convert("RGB")

        def load(crop_name: str) -> None:
            crop = {"random": random_crop, "center": center_crop}[crop_name]
            loader = allstep.data.loader(
                ImageFolder(images, size=SIZE, crop=crop),
                Communicator.lone(),
                global_batch=BATCH,
                micro_batch=BATCH,
            )
            for batch in loader.global_batches():
                list(batch.micro_batches)

        seconds = interleave(
            {
                "bare decoding": decode,
                "training pipeline": lambda: load("random"),
                "evaluation pipeline": lambda: load("center"),
            },
            repeats=9,
        )
    table = Table("what", "images/s", "share of bare decoding")
    shares = {}
    for name, values in seconds.items():
        shares[name] = ratio(seconds["bare decoding"], values)
        table.add_row(
            name, f"{len(images) / sorted(values)[len(values) // 2]:.0f}", str(shares[name])
        )
    Console().print(table)
    headline = shares["training pipeline"].median
    write_results(
        "bench_images",
        {
            "num_images": len(images),
            "size": SIZE,
            "seconds": seconds,
            "decode_share": headline,
            "decode_share_interval": [
                shares["training pipeline"].low,
                shares["training pipeline"].high,
            ],
        },
    )
    print_headline(decode_share=headline)


if __name__ == "__main__":
    main()
