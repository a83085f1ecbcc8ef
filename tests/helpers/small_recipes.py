"""The recipes at the size of a test, on data that is on every machine."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from PIL import Image

from allstep.recipes import save_bert
from allstep.recipes.bert import Bert
from allstep.recipes.bert_data import learn_vocabulary
from allstep.recipes.bert_model import BertForPreTraining
from allstep.recipes.digits import Digits
from allstep.recipes.fashion import Fashion
from allstep.recipes.finetune import FineTune
from allstep.recipes.gru import Gru
from allstep.recipes.images import Images
from allstep.recipes.text import Text
from tests.helpers.texts import write_topics


def write_sentences(folder: Path) -> Path:
    """Short sentences in documents of unequal lengths: samples hide more tokens or fewer."""
    folder.mkdir()
    for number, name in enumerate(sorted(topics)[:12]):
        words = re.findall(r"[a-z]+", topics[name])[: 40 + 6 * number]
        text = " ".join(f"{word}." if place % 2 else word for place, word in enumerate(words))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def write_classes(folder: Path) -> Path:
    """Three classes of unequally many lines of unequal lengths, of three pages of Python's."""
    folder.mkdir()
    for number, name in enumerate(sorted(topics, key=lambda name: -len(topics[name]))[:3]):
        words = re.findall(r"[a-z]+", topics[name])
        lines = [" ".join(words[start : start + 1 + start % 5]) for start in range(0, 400, 9)]
        kept = lines[: 15 + 5 * number]
        (folder / f"{number}.{name}.txt").write_text("\n".join(kept), encoding="utf-8")
    return folder


def write_pretrained(folder: Path, classes: Path) -> Path:
    """A folder as transformers reads it, of a small BERT whose every weight counts."""
    vocabulary = learn_vocabulary([path.read_text() for path in classes.iterdir()], 120)
    config = replace(
        Bert(vocab_size=120, second_sequence_length=None).config,
        hidden_size=16,
        intermediate_size=24,
        max_position_embeddings=20,
    )
    torch.manual_seed(0)
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    save_bert(model, folder, vocabulary)
    return folder


def write_pictures(folder: Path) -> Path:
    """Two classes: dark and bright noise."""
    generator = np.random.default_rng(0)
    for name, level in (("dark", 60), ("bright", 190)):
        (folder / name).mkdir(parents=True)
        for index in range(24):
            pixels = generator.integers(level - 40, level + 40, (20, 24, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.jpg")
    return folder


def write_clothes(folder: Path) -> Path:
    """In the files of Fashion-MNIST, 20 and 10 pictures of noise."""
    folder.mkdir(exist_ok=True)
    for part, count in (("train", 20), ("t10k", 10)):
        sizes = [count, 28, 28]
        pixels = np.random.default_rng(0).integers(0, 255, sizes, np.uint8)
        for kind, values in (("images-idx3", pixels), ("labels-idx1", np.arange(count) % 10)):
            header = bytes([0, 0, 8, values.ndim])
            header += b"".join(n.to_bytes(4, "big") for n in values.shape)
            content = header + values.astype(np.uint8).tobytes()
            (folder / f"{part}-{kind}-ubyte").write_bytes(content)
    return folder


_OF_TEXTS: dict[str, Any] = {
    "epochs": 1,
    "global_batch": 24,
    "micro_batch": 4,
    "precision": "float64",
}


def small_images(folder: Path, **changes: Any) -> Images:
    arguments: dict[str, Any] = {
        "folder": folder,
        "epochs": 2,
        "warmup_epochs": 0.0,
        "global_batch": 8,
        "micro_batch": 4,
        "loader_workers": 0,
        "image_size": 8,
        "depth": 18,
        "stem": "small",
        "val_fraction": 0.3,
        "lr": 0.01,
    }
    return Images(**arguments | changes)


def small_text(folder: Path, **changes: Any) -> Text:
    usual: dict[str, Any] = {
        "micro_batch": 6,
        "lr": 3e-3,
        "vocab_size": 300,
        "sequence_length": 16,
        "width": 16,
        "depth": 1,
        "heads": 2,
        "dropout": 0.0,
    }
    return Text(**_OF_TEXTS | usual | {"folder": folder} | changes)


def small_bert(folder: Path, **changes: Any) -> Bert:
    usual: dict[str, Any] = {
        "held_out": 0.3,
        "epochs": 2,
        "vocab_size": 200,
        "sequence_length": 24,
        "second_sequence_length": 48,
    }
    return Bert(**_OF_TEXTS | usual | {"folder": folder} | changes)


def small_finetune(folder: Path, pretrained: Path, **changes: Any) -> FineTune:
    usual: dict[str, Any] = {"epochs": 2, "sequence_length": 12}
    return FineTune(**_OF_TEXTS | usual | {"folder": folder, "pretrained": pretrained} | changes)


def small_gru(folder: Path, **changes: Any) -> Gru:
    usual: dict[str, Any] = {"layers": 2, "width": 6, "sequence_length": 10}
    return Gru(**_OF_TEXTS | usual | {"folder": folder} | changes)


def _text_of(objective: str, **changes: Any) -> Callable[[Path], Text]:
    changes = {"objective": objective, "dropout": 0.1, "train_share": 0.1} | changes
    return lambda folder: small_text(write_topics(folder / "texts", 5), **changes)


def _digits(folder: Path) -> Digits:
    return Digits(epochs=1, global_batch=300, micro_batch=50, width=8, train_share=0.5)


def _fashion(folder: Path) -> Fashion:
    return Fashion(folder=write_clothes(folder), epochs=1, global_batch=9, micro_batch=3)


def _images(folder: Path) -> Images:
    return small_images(write_pictures(folder / "pictures"), epochs=1, global_batch=12)


def _gru(folder: Path) -> Gru:
    return small_gru(write_topics(folder / "texts", 3, num_characters=700), train_share=0.35)


def _finetune(folder: Path) -> FineTune:
    classes = write_classes(folder / "classes")
    return small_finetune(classes, write_pretrained(folder / "pretrained", classes))


SMALL_RECIPES: dict[str, Callable[[Path], Any]] = {
    "digits": _digits,
    "fashion": _fashion,
    "images": _images,
    "text masked": _text_of("masked"),
    "text causal": _text_of("causal"),
    "text paragraphs": _text_of(
        "causal", samples="paragraphs", sequence_length=40, train_share=0.2
    ),
    "bert": lambda folder: small_bert(
        write_sentences(folder / "sentences"), train_share=0.4, held_out=0.1
    ),
    "finetune": _finetune,
    "gru": _gru,
}
"""name -> what makes a recipe, with its data in an empty folder."""
