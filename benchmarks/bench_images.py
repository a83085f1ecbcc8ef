"""The `images` recipe's pipeline against bare decoding of the same JPEG files.

    python benchmarks/bench_images.py [--quick]

A training sample is decoded, cropped at random, resized, made a tensor and batched by the loader;
bare decoding opens the file and converts it to RGB at full size. Each is measured in a process of
its own after an epoch to warm up, because large pictures cost page faults as long as the heap is
small: bare decoding gets nearly twice as fast in a process whose heap others have grown.

Without loader processes the clock is the processor's, because a single thread does all the work
and others may use the machine; with two it is the wall's, and bare decoding has two processes as
well. Prints a table, writes benchmarks/results/bench_images.json, ends with one line of JSON:
`decode_share`, the training pipeline's images per second over bare decoding's without loader
processes (at least 0.9 is the aim), and `decode_share_2_processes`.
"""

import argparse
import functools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import skimage.data
import sklearn.datasets
import torch
from common import print_headline, ratio, write_results
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

import allstep
from allstep import Communicator
from allstep.data.image_folder import Crop, ImageFolder, center_crop, random_crop

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


class BareDecoding(Dataset[int]):
    """Opens a file, converts it to RGB at full size, and gives nothing of it."""

    def __init__(self, images: list[tuple[Path, int]]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> int:
        with Image.open(self._images[index][0]) as image:
            image.convert("RGB")
        return index


def decode(images: list[tuple[Path, int]], num_workers: int) -> Iterator[object]:
    """Bare decoding of all images, batch by batch."""
    bare = BareDecoding(images)
    if num_workers:
        yield from DataLoader(bare, BATCH, num_workers=num_workers)
        return
    for first in range(0, len(images), BATCH):
        yield [bare[index] for index in range(first, min(first + BATCH, len(images)))]


def load(
    images: list[tuple[Path, int]], num_workers: int, crop: Callable[[int, int], Crop]
) -> Iterator[object]:
    """An epoch of the recipe's pipeline, batch by batch."""
    loader = allstep.data.loader(
        ImageFolder(images, size=SIZE, crop=crop),
        Communicator.single_process(),
        global_batch=BATCH,
        micro_batch=BATCH,
        num_workers=num_workers,
    )
    with closing(loader):
        for batch in loader.global_batches():
            yield list(batch.micro_batches)


VARIANTS: dict[str, Callable[[list[tuple[Path, int]], int], Iterator[object]]] = {
    "bare decoding": decode,
    "training pipeline": functools.partial(load, crop=random_crop),
    "evaluation pipeline": functools.partial(load, crop=center_crop),
}


def seconds_per_image(variant: str, images: list[tuple[Path, int]], num_workers: int) -> float:
    """Of a variant in this process, from the first to the last batch of its second epoch."""
    torch.set_num_threads(1)
    clock = time.perf_counter if num_workers else time.process_time
    for _ in VARIANTS[variant](images, num_workers):
        pass
    batches = VARIANTS[variant](images, num_workers)
    next(batches)
    start_s = end_s = clock()
    for _ in batches:
        end_s = clock()  # loader processes end later, which is not what we ask for
    return (end_s - start_s) / (len(images) - BATCH)


def in_fresh_process(variant: str, images: list[tuple[Path, int]], num_workers: int) -> float:
    """As `seconds_per_image`, in a process whose heap no other variant has grown."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "PIL.JpegImagePlugin", "allstep.data.image_folder"])
    with ProcessPoolExecutor(1, context) as executor:
        return executor.submit(seconds_per_image, variant, images, num_workers).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="no loader processes")
    is_quick = parser.parse_args().quick
    table = Table("loader processes", "what", "images/s", "share of bare decoding")
    results: dict[str, object] = {"size": SIZE}
    headline = {}
    with tempfile.TemporaryDirectory() as folder:
        photographs = write_photographs(Path(folder))
        for num_workers in (0,) if is_quick else (0, 2):
            images = photographs * (32 if num_workers else 8)
            seconds = interleave_values(
                {
                    name: functools.partial(in_fresh_process, name, images, num_workers)
                    for name in VARIANTS
                },
                repeats=3 if num_workers else 7,
            )
            for name, values in seconds.items():
                share = ratio(seconds["bare decoding"], values)
                speed = 1 / statistics.median(values)
                table.add_row(str(num_workers), name, f"{speed:.0f}", str(share))
                if name == "training pipeline":
                    key = "decode_share" + (f"_{num_workers}_processes" if num_workers else "")
                    headline[key] = share.median
                    results[f"{key}_interval"] = [share.low, share.high]
            results[f"seconds_per_image_{num_workers}_processes"] = seconds
    Console().print(table)
    write_results("bench_images", {**results, **headline})
    print_headline(**headline)


def interleave_values(
    variants: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """What each variant returns in each repeat; all of them take turns, in alternating order."""
    values: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name in list(variants) if repeat % 2 else list(reversed(variants)):
            values[name].append(variants[name]())
    return values


if __name__ == "__main__":
    main()
