import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from allstep.recipes.transformer import Transformer, TransformerConfig


def make(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "vocab_size": 50,
        "sequence_length": 12,
        "width": 16,
        "depth": 2,
        "heads": 4,
        "dropout": 0.0,
        "causal": True,
    }
    return Transformer(TransformerConfig(**arguments | changes)).double()


def tokens() -> torch.Tensor:
    return torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(1))


def changed_at(position: int) -> torch.Tensor:
    changed = tokens()
    changed[:, position] = (changed[:, position] + 1) % 50
    return changed


@pytest.mark.parametrize("position", [1, 5, 11])
def test_transformer_causal_mask(position: int) -> None:
    model = make()
    before, after = model(tokens()), model(changed_at(position))
    assert torch.equal(before[:, :position], after[:, :position])
    assert (before[:, position:] != after[:, position:]).any(-1).all()


def test_transformer_control_without_the_causal_mask() -> None:
    model = make(causal=False)
    different = model(tokens()) != model(changed_at(11))
    assert different.any(-1).all()


def test_transformer_logits_at_positions() -> None:
    model = make(causal=False)
    positions = torch.tensor([[0, 3], [5, 11], [7, 8]])
    everything = model(tokens())
    expected = torch.stack([everything[i, positions[i]] for i in range(3)])
    torch.testing.assert_close(model(tokens(), positions), expected, rtol=0, atol=1e-14)


def test_transformer_of_shorter_sequences() -> None:
    model = make()
    torch.testing.assert_close(model(tokens()[:, :5]), model(tokens())[:, :5], rtol=0, atol=1e-12)


def test_transformer_ties_its_embeddings() -> None:
    model = make()
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes.count((50, 16)) == 1
    assert [name for name, p in model.named_parameters() if 50 in p.shape] == [
        "token_embedding.weight"
    ]
    # A token that no sample holds gets a gradient as a wrong answer, the others as input too.
    inputs = torch.zeros(1, 4, dtype=torch.int64)
    F.cross_entropy(model(inputs)[0], torch.ones(4, dtype=torch.int64)).backward()
    gradient = model.token_embedding.weight.grad
    assert gradient is not None
    assert (gradient != 0).any(1).all()


def test_transformer_number_of_parameters() -> None:
    width, depth = 16, 2
    block = 12 * width**2 + 13 * width
    expected = (50 + 12) * width + depth * block + 2 * width
    assert sum(p.numel() for p in make().parameters()) == expected


def test_transformer_first_guess_is_about_uniform() -> None:
    logits = make()(tokens()).flatten(0, 1)
    targets = tokens().roll(1, dims=0).flatten()
    assert F.cross_entropy(logits, targets).item() == pytest.approx(math.log(50), abs=0.1)


def test_transformer_dropout_in_training_only() -> None:
    model = make(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_transformer_attention_against_the_formula() -> None:
    model = make(heads=2)
    attention = model.blocks[0].attention
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    query, key, value = attention.query(x), attention.key(x), attention.value(x)
    parts = []
    for head in range(2):
        own = slice(8 * head, 8 * head + 8)
        scores = query[..., own] @ key[..., own].transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
        parts.append(scores.softmax(-1) @ value[..., own])
    expected = attention.output(torch.cat(parts, -1))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-13)
