"""Reads a BERT and its tokens from a run of the recipe `bert`, or from files of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import allstep
from allstep import Communicator, UsageError
from allstep.recipes.base import names_kept
from allstep.recipes.bert import Bert
from allstep.recipes.bert_data import SPECIAL
from allstep.recipes.bert_files import load_bert
from allstep.recipes.bert_model import PADDING_TOKEN, BertForPreTraining
from allstep.recipes.registry import RECIPE_FILE, read_recipe_file

_CONFIG = "config.json"
_CURE = "Give its texts as they were, or files of `save_bert`, which need none."


@dataclass(frozen=True)
class Pretrained:
    """A pre-trained model, from which fine-tuning starts.

    Args:
        model: the model, with both heads of its pre-training.
        vocabulary: its tokens in the order of their ids.
    """

    model: BertForPreTraining
    vocabulary: Sequence[str]


def check_pretrained(path: Path) -> None:
    """Checks that `path` holds a pre-trained model, without reading weights.

    Raises:
        UsageError: if it doesn't.
    """
    if (path / RECIPE_FILE).is_file():
        _check_texts(path)
        if not any((path / "checkpoints").glob("step-*")):
            raise UsageError(f"`pretrained` (={path}) has no checkpoint yet; train it first.")
    elif (path / _CONFIG).is_file():
        _read_vocabulary(path)
    else:
        raise UsageError(
            f"`pretrained` (={path}) is neither a run of the recipe `bert` nor a folder with"
            " config.json, model.safetensors and vocab.txt; make one:"
            f" `allstep train bert --run-dir {path}`."
        )


def load_pretrained(path: Path, comm: Communicator) -> Pretrained:
    """Reads a run's newest checkpoint, or files of `save_bert` or transformers. Collective.

    A run's tokens are learned again from its texts, which must still be in the same folder.

    Args:
        path: the run's folder, or that of the files.
        comm: the workers, each of which reads the model.

    Raises:
        CheckpointError: if a file is missing or damaged, or the texts now give other tokens.
        UsageError: if `path` is neither.
    """
    check_pretrained(path)
    if not (path / RECIPE_FILE).is_file():
        return _checked(path, Pretrained(load_bert(path), _read_vocabulary(path)))
    recipe = _read_recipe(path)
    loaded = allstep.train.Checkpoints(path / "checkpoints", comm).load_latest()
    if loaded is None:
        raise allstep.errors.CheckpointError(
            f"There is no whole checkpoint in {path / 'checkpoints'}: all are damaged. Train anew,"
            " in another folder."
        )
    _, state = loaded
    model = BertForPreTraining(recipe.config)
    model.load_state_dict(state["model"])
    vocabulary = recipe.vocabulary(comm)
    try:
        allstep.train.check_same_data(state, names_kept("vocabulary", vocabulary), _CURE)
    except allstep.errors.CheckpointError as error:
        raise allstep.errors.CheckpointError(f"`pretrained` (={path}): {error}") from None
    return Pretrained(model, vocabulary)


def _read_recipe(run_dir: Path) -> Bert:
    recipe = read_recipe_file(run_dir / RECIPE_FILE)
    if isinstance(recipe, Bert):
        return recipe
    raise UsageError(
        f"`pretrained` (={run_dir}) is a run of the recipe `{recipe.name}`; give one of"
        f" `{Bert.name}`."
    )


def _check_texts(run_dir: Path) -> None:
    try:
        _read_recipe(run_dir).check()
    except UsageError as error:
        raise UsageError(
            f"`pretrained` (={run_dir}) can't be read: {error} A run's tokens are learned from its"
            " texts; `save_bert` writes files that need none."
        ) from None


def _read_vocabulary(folder: Path) -> list[str]:
    """The tokens in vocab.txt, one per line."""
    path = folder / "vocab.txt"
    if not path.is_file():
        raise UsageError(
            f"`pretrained` (={folder}) has no vocab.txt, which lists the tokens: give `save_bert`"
            " the vocabulary, or save transformers' tokenizer there, too."
        )
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def _checked(folder: Path, found: Pretrained) -> Pretrained:
    """Returns `found`, or raises CheckpointError if the tokens don't match the model."""
    num_tokens, vocab_size = len(found.vocabulary), found.model.config.vocab_size
    if num_tokens > vocab_size:
        raise allstep.errors.CheckpointError(
            f"{folder / 'vocab.txt'} has {num_tokens} tokens, but the model has {vocab_size}; save"
            " both together."
        )
    missing = [token for token in SPECIAL if token not in found.vocabulary]
    if missing or found.vocabulary[PADDING_TOKEN] != "[PAD]":
        raise allstep.errors.CheckpointError(
            f"{folder / 'vocab.txt'} must begin with [PAD] and hold {', '.join(SPECIAL)}; give"
            " the vocabulary of a BERT."
        )
    return found
