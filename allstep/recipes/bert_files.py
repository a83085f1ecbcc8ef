"""A BERT as a folder that transformers reads and writes: config.json and model.safetensors."""

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
_USUAL = {  # what a file may leave out
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_TIED = {  # what a file may hold twice
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_NOT_WEIGHTS = {"bert.embeddings.position_ids"}


def save_bert(model: BertForPreTraining, folder: Path, vocabulary: Sequence[str] = ()) -> None:
    """Writes config.json and model.safetensors, as transformers' BertForPreTraining does.

    `transformers.BertForPreTraining.from_pretrained(folder)` reads them, as do its classes for
    other tasks.

    Args:
        model: of the recipe `bert`, or from `load_bert`.
        folder: made if it is missing; files of these names are overwritten.
        vocabulary: the tokens in the order of their numbers, for vocab.txt; none if empty.

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
    """A BERT with both of its heads, from files as transformers writes them.

    Args:
        folder: with config.json and model.safetensors.

    Returns:
        The model in float32, in training mode as any new module.

    Raises:
        CheckpointError: if a file is missing or damaged, if the model is no BERT or of a kind that
            isn't here, or if weights are missing; names what it is.
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
    # What TensorFlow called them, in the first files that were published.
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
