"""Reads and writes a BERT in the format of transformers: config.json and model.safetensors."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import allstep
from allstep.files import read_json, replacing, write_json, write_whole
from allstep.recipes.bert_model import PADDING_TOKEN, BertConfig, BertForPreTraining

_MEANING = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "pad_token_id": PADDING_TOKEN,
    "tie_word_embeddings": True,
}
_USUAL = {  # entries that a file may omit
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_TIED = {  # tensors that a file may contain twice
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_NOT_WEIGHTS = {"bert.embeddings.position_ids"}


def save_bert(model: BertForPreTraining, folder: Path, vocabulary: Sequence[str] = ()) -> None:
    """Writes config.json and model.safetensors, as transformers' BertForPreTraining does.

    `transformers.BertForPreTraining.from_pretrained(folder)` reads them, and so do transformers'
    BERT classes for other tasks.

    Args:
        model: the model, from the recipe `bert` or from `load_bert`.
        folder: the folder, created if it is missing; existing files are overwritten.
        vocabulary: the tokens in the order of their ids, for vocab.txt; if empty, the file isn't
            written.

    >>> from tempfile import TemporaryDirectory
    >>> from allstep.recipes.bert import Bert
    >>> model = BertForPreTraining(Bert(vocab_size=50).config)
    >>> with TemporaryDirectory() as folder:
    ...     save_bert(model, Path(folder))
    ...     load_bert(Path(folder)).config == model.config
    True
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _MEANING | {"architectures": ["BertForPreTraining"]} | asdict(model.config)
    write_json(folder / "config.json", config)
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    with replacing(folder / "model.safetensors") as draft:
        save_file(state, draft, metadata={"format": "pt"})
    if vocabulary:
        write_whole(folder / "vocab.txt", "".join(f"{token}\n" for token in vocabulary))


def load_bert(folder: Path) -> BertForPreTraining:
    """Reads a BERT with both of its heads, from files in the format of transformers.

    Args:
        folder: folder with config.json and model.safetensors.

    Returns:
        The model in float32, in training mode as any new module.

    Raises:
        CheckpointError: if a file is missing or damaged, if the model isn't a BERT or of an
            unsupported kind, or if weights are missing; the message says which.
    """
    config = _read_config(folder / "config.json")
    state = _read_state(folder / "model.safetensors")
    with torch.device("meta"):
        model = BertForPreTraining(config)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise allstep.errors.CheckpointError(
            f"{folder / 'model.safetensors'} doesn't hold a BERT with both heads of the size that"
            f" config.json says; save a BertForPreTraining. {error}"
        ) from error
    return model.float()


def _read_config(path: Path) -> BertConfig:
    try:
        found: dict[str, Any] = read_json(path)
        config = BertConfig(**{f.name: found[f.name] for f in fields(BertConfig)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise allstep.errors.CheckpointError(
            f"{path} is no configuration of a BERT ({type(error).__name__}: {error})."
        ) from error
    for name, value in {**_MEANING, **_USUAL}.items():
        if found.get(name, value) != value:
            raise allstep.errors.CheckpointError(
                f"{path}: `{name}` (={found[name]!r}) must be {value!r}; others are not supported."
            )
    return config


def _read_state(path: Path) -> dict[str, Tensor]:
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise allstep.errors.CheckpointError(
            f"{path} can't be read: {error}. Save the model with `safe_serialization=True`."
        ) from error
    # TensorFlow's names, as in the first published files.
    renamed = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    state = {}
    for name, value in found.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        state[name] = value
    for name, original in _TIED.items():
        tied = state.pop(name, None)
        if tied is not None and original in state and not torch.equal(tied, state[original]):
            raise allstep.errors.CheckpointError(
                f"{path}: {name} must be equal to {original}, to which it is tied."
            )
    return {name: value for name, value in state.items() if name not in _NOT_WEIGHTS}
