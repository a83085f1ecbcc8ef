"""The model and its files, by themselves and beside transformers'."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import allstep
from allstep.errors import CheckpointError
from allstep.recipes import load_bert, save_bert
from allstep.recipes.bert import Bert
from allstep.recipes.bert_data import encode, learn_vocabulary
from allstep.recipes.bert_model import (
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
)

SMALL = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=12,
)


def make(config: BertConfig = SMALL, noise: float = 0.3) -> BertForPreTraining:
    """A model whose every weight counts, biases and norms included."""
    torch.manual_seed(0)
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return model.eval()


def inputs(length: int = 12) -> tuple[Tensor, Tensor]:
    """Three samples, one of them with padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 50, (3, length), generator=generator)
    tokens[1, -4:] = 0
    segments = (torch.arange(length) >= length // 2).long().expand(3, -1).clone()
    segments[tokens == 0] = 0
    return tokens, segments


def test_bert_first_guess_is_about_uniform() -> None:
    scores, relations = BertForPreTraining(SMALL).eval()(*inputs())
    targets = inputs()[0]
    loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)
    assert relations.abs().max() < 0.5


def test_bert_sees_all_tokens_but_padding() -> None:
    model, (tokens, segments) = make(), inputs()
    embeddings = model.bert.embeddings.word_embeddings.weight.detach()
    scores, relations = model(tokens, segments)
    embeddings[0].neg_()  # padding's; a norm of the layer would take away what is added to all
    after, related = model(tokens, segments)
    is_seen = tokens != 0
    assert torch.equal(after[is_seen][:, 1:], scores[is_seen][:, 1:])  # its own score is another
    assert torch.equal(related, relations)
    changed = tokens[1, 7]
    embeddings[changed].neg_()
    after, related = model(tokens, segments)
    others = torch.arange(scores.shape[-1]) != changed
    assert ((after[1] - scores[1])[:, others].abs().amax(-1) > 1e-3).all()
    assert ((related[1] - relations[1]).abs() > 1e-4).all()


def test_bert_scores_at_positions() -> None:
    model = make()
    positions = torch.tensor([[0, 3], [5, 2], [11, 11]])
    everything, _ = model(*inputs())
    expected = torch.stack([everything[i, positions[i]] for i in range(3)])
    torch.testing.assert_close(model(*inputs(), positions)[0], expected)


def test_bert_drops_in_training_only() -> None:
    model = make()
    first = model(*inputs())[0]
    assert torch.equal(first, model(*inputs())[0])
    for changes in (
        {"hidden_dropout_prob": 0.0},
        {"attention_probs_dropout_prob": 0.0},
    ):
        dropping = BertForPreTraining(replace(SMALL, **changes)).train()
        assert not torch.equal(dropping(*inputs())[0], dropping(*inputs())[0])


@pytest.mark.parametrize(
    ("size", "millions"),
    [("tiny", 4.4), ("mini", 11.2), ("small", 28.8), ("base", 110), ("large", 335)],
)
def test_bert_sizes_are_those_that_were_published(size: Any, millions: float) -> None:
    """Without the heads: BERT's and the miniatures' numbers of weights."""
    config = Bert(size=size, vocab_size=30522, second_sequence_length=512).config
    with torch.device("meta"):
        encoder = BertForPreTraining(config).bert
    num_weights = sum(parameter.numel() for parameter in encoder.parameters())
    assert num_weights / 1e6 == pytest.approx(millions, rel=0.01)


LAYER = [
    *("attention.self.query", "attention.self.key", "attention.self.value"),
    *("attention.output.dense", "attention.output.LayerNorm"),
    *("intermediate.dense", "output.dense", "output.LayerNorm"),
]
MODULES = [
    *("bert.embeddings.LayerNorm", "bert.pooler.dense", "cls.seq_relationship"),
    *("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    *(f"bert.encoder.layer.{i}.{name}" for i in range(2) for name in LAYER),
]
NAMES = {
    *(f"{module}.{kind}" for module in MODULES for kind in ("weight", "bias")),
    *(f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")),
    "cls.predictions.bias",
}


def test_bert_state_has_the_names_of_its_files(tmp_path: Path) -> None:
    model = make()
    assert set(model.state_dict()) == NAMES
    save_bert(model, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == NAMES


def test_bert_files_bring_back_the_model(tmp_path: Path) -> None:
    model = make(replace(SMALL, hidden_dropout_prob=0.25, layer_norm_eps=1e-6))
    save_bert(model, tmp_path / "new" / "bert", ["[PAD]", "##ä"])
    folder = tmp_path / "new" / "bert"
    assert (folder / "vocab.txt").read_text("utf-8") == "[PAD]\n##ä\n"
    again = load_bert(folder)
    assert again.config == model.config
    assert again.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert torch.equal(model(*inputs())[0], again.eval()(*inputs())[0])


def test_bert_loads_what_older_files_hold(tmp_path: Path) -> None:
    """TensorFlow's names of norms, buffers, tied weights twice, and half precision."""
    model = make()
    save_bert(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["cls.predictions.decoder.weight"] = state[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"].clone()
    state["bert.embeddings.position_ids"] = torch.arange(12)[None]
    renamed = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in state.items()
    }
    assert len(set(renamed) - set(state)) == 12
    save_file(renamed, tmp_path / "model.safetensors")
    again = load_bert(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())

    save_file({n: v.half() for n, v in state.items()}, tmp_path / "model.safetensors")
    assert {value.dtype for value in load_bert(tmp_path).state_dict().values()} == {torch.float32}


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.pop(name)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"model_type": "roberta"}, None, r"`model_type` \(='roberta'\) must be 'bert'"),
        ({"hidden_act": "relu"}, None, r"`hidden_act` \(='relu'\) must be 'gelu'"),
        ({"position_embedding_type": "relative_key"}, None, r"must be 'absolute'"),
        ({"is_decoder": True}, None, r"`is_decoder` \(=True\) must be False"),
        ({"hidden_size": 20}, None, "doesn't hold a BERT with both heads of the size"),
        ({}, _without("bert.pooler.dense.bias"), r"(?s)Missing key.*bert\.pooler\.dense\.bias"),
        ({}, _without("cls.seq_relationship.weight"), r"cls\.seq_relationship\.weight"),
        (
            {},
            lambda state: state.update({"cls.predictions.decoder.bias": torch.ones(50)}),
            r"decoder\.bias must be equal to cls\.predictions\.bias",
        ),
    ],
)
def test_bert_refuses_files_of_another_model(
    config: dict[str, Any],
    change: Callable[[dict[str, Tensor]], object] | None,
    message: str,
    tmp_path: Path,
) -> None:
    save_bert(make(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        state = load_file(tmp_path / "model.safetensors")
        change(state)
        save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_bert(tmp_path)


def test_bert_names_the_file_that_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is no configuration .*FileNotFound"):
        load_bert(tmp_path)
    save_bert(make(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read"):
        load_bert(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    with pytest.raises(CheckpointError, match="KeyError: 'hidden_size'"):
        load_bert(tmp_path)


# Beside transformers


@pytest.fixture
def transformers() -> Any:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed; `make test-slow` does it where it can be had")
    import transformers

    return transformers


def named(tokens: Tensor, segments: Tensor) -> dict[str, Tensor]:
    """The inputs as transformers calls them."""
    is_seen = (tokens != 0).long()
    return {"input_ids": tokens, "token_type_ids": segments, "attention_mask": is_seen}


def theirs(transformers: Any, config: BertConfig, **changes: Any) -> Any:
    return transformers.BertConfig(**asdict(config) | changes)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("size", ["tiny", "mini"])
def test_bert_equals_that_of_transformers(
    transformers: Any, size: Any, implementation: str
) -> None:
    config = Bert(size=size, vocab_size=50, second_sequence_length=256).config
    model = make(config, noise=0.05)
    other_config = theirs(transformers, config, attn_implementation=implementation)
    other = transformers.BertForPreTraining(other_config).eval()
    encoder = transformers.BertModel(other_config).eval()
    missing = other.load_state_dict(model.state_dict(), strict=False)
    assert set(missing.missing_keys) <= {
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    }
    assert not missing.unexpected_keys
    other.tie_weights()
    encoder.load_state_dict(model.bert.state_dict())
    tokens, segments = inputs(length=200)
    given = named(tokens, segments)
    with torch.no_grad():
        hidden, pooled = model.bert(tokens, segments)
        scores, relations = model(tokens, segments)
        their_scores, their_relations = other(**given)[:2]
        their_hidden, their_pooled = encoder(**given)[:2]
    for mine, their in (
        (hidden, their_hidden),
        (pooled, their_pooled),
        (scores, their_scores),
        (relations, their_relations),
    ):
        counts = (tokens != 0) if mine.shape[:2] == tokens.shape else slice(None)
        scale = their[counts].abs().max().clamp(min=1)
        assert (mine[counts] - their[counts]).abs().max() / scale < 1e-5
    without_mask, _ = other(input_ids=tokens, token_type_ids=segments)[:2]
    assert (without_mask[1] - scores[1]).abs().max() > 1e-3  # the control


@pytest.mark.slow
def test_bert_gradient_equals_that_of_transformers(transformers: Any) -> None:
    """Of full sequences, where the mean over tokens and the mean over pairs count the same."""
    model = make()
    other = transformers.BertForPreTraining(theirs(transformers, SMALL)).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    other.tie_weights()
    tokens, segments = inputs()
    positions = torch.tensor([[1, 4], [2, 3], [5, 11]])
    targets, is_random = torch.tensor([[7, 8], [9, 10], [11, 12]]), torch.tensor([0, 1, 1])
    labels = torch.full_like(tokens, -100).scatter(1, positions, targets)
    given = named(tokens, segments)
    their_loss = other(**given, labels=labels, next_sentence_label=is_random).loss
    objective = allstep.recipes.bert.PreTraining(torch.zeros(50))
    total, count = objective.loss(model, (tokens, segments, positions, targets, is_random))
    torch.testing.assert_close(total / count, their_loss)
    (total / count).backward()
    their_loss.backward()
    their_gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = their_gradients[name]
        if name == "bert.embeddings.word_embeddings.weight":
            continue  # theirs gives padding's embedding no gradient as an input
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_bert_classifier_equals_that_of_transformers(transformers: Any) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(SMALL, 3).eval()
    model.bert.load_state_dict(make().bert.state_dict())
    other_config = theirs(transformers, SMALL, num_labels=3)
    other = transformers.BertForSequenceClassification(other_config).eval()
    other.load_state_dict(model.state_dict())
    tokens, segments = inputs()
    found, expected = model(tokens), other(**named(tokens, torch.zeros_like(segments))).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found.std(0) > 1e-4).all()


@pytest.mark.slow
def test_bert_files_travel_to_transformers_and_back(transformers: Any, tmp_path: Path) -> None:
    texts = ["The cat sat on the mat. The dogs sat, too!", "Ä café's naïve menu: 3.50?"]
    vocabulary = learn_vocabulary(texts, 60)
    model = make(replace(SMALL, vocab_size=60))
    save_bert(model, tmp_path / "ours", vocabulary)

    other = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    tokens, segments = inputs()
    given = named(tokens, segments)
    torch.testing.assert_close(other(**given)[0], model(tokens, segments)[0], rtol=1e-5, atol=1e-5)
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path / "ours")
    for text in texts:
        expected = encode(vocabulary, [text]).tokens.tolist()
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected

    other.save_pretrained(tmp_path / "theirs")
    again = load_bert(tmp_path / "theirs")
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
