"""A small transformer that predicts tokens, from all others or from those before."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import allstep
from allstep import Communicator

if TYPE_CHECKING:  # its import takes seconds
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture in each block; see `allstep.nn.MixtureOfExperts`.

    Args:
        comm: the workers that they are divided over.
        num: of a block, on all workers together.
        top_k: experts of a token.
        capacity_factor: says how many tokens of a micro-batch an expert takes; None for all.
    """

    comm: Communicator
    num: int
    top_k: int
    capacity_factor: float | None


class Transformer(nn.Module):
    """Pre-norm blocks on learned positions; the logits use the tokens' own embeddings.

        x = embedding[token] + position_embedding
        x = x + attention(norm(x)); x = x + mlp(norm(x))    (depth times)
        logits = norm(x) @ embedding.T

    With `experts` each mlp is a mixture of them, each of 1 / top_k of its hidden features, so that
    a token takes as many operations; a call then returns the mean of the blocks' balance losses,
    too.

    Args:
        vocab_size: number of different tokens.
        sequence_length: the most tokens of a sequence.
        width: features of a token.
        depth: number of blocks.
        heads: of the attention; divide the width.
        dropout: probability of dropping a feature after the embedding and each half of a block.
        causal: let a token see itself and those before it only.
        experts: what the blocks' experts are, and on which workers; None for a single mlp.

    Source: Vaswani et al., 2017, arXiv:1706.03762; norm, GELU and initial weights as in
    Radford et al., 2019 (GPT-2).
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        sequence_length: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
        causal: bool,
        experts: Experts | None = None,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Parameter(torch.empty(sequence_length, width))
        self.dropout = nn.Dropout(dropout)
        mlps = [_make_mlp(width, depth, experts) for _ in range(depth)]
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout, causal, mlp) for mlp in mlps))
        self.norm = nn.LayerNorm(width)
        self._initialize(depth)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of every token, or only of those at some positions.

        Args:
            tokens: int64 [batch, token].
            positions: int64 [batch, predicted], or None for all.

        Returns:
            [batch, predicted, vocab_size]; with experts and the balance loss, a scalar.
        """
        x = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]]
        x = self.dropout(x)
        balance_losses = []
        for block in self.blocks:
            x, *balance_loss = block(x)
            balance_losses += balance_loss
        if positions is not None:
            x = x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return (logits, torch.stack(balance_losses).mean()) if balance_losses else logits

    def _initialize(self, depth: int) -> None:
        """Small normal weights; smaller where they add to the residual path."""
        nn.init.normal_(self.position_embedding, std=0.02)
        for module in _outside_experts(self):
            _initialize_small(module)
        for block in self.blocks:
            assert isinstance(block, _Block)
            _initialize_residual(block.attention.output, depth)
            if isinstance(block.mlp, _MLP):  # experts are drawn where they are made
                _initialize_residual(block.mlp.output, depth)


class _Block(nn.Module):
    def __init__(
        self, width: int, heads: int, dropout: float, causal: bool, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        found = self.mlp(self.mlp_norm(x))
        y, *balance_loss = found if isinstance(found, tuple) else (found,)
        return x + self.dropout(y), *balance_loss


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self._head_width = width // heads
        self._causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(each(x)) for each in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self._causal)
        y: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, head, token, feature], of this worker's heads."""
        batch, num_tokens, _ = x.shape
        return x.view(batch, num_tokens, -1, self._head_width).transpose(1, 2)


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(F.gelu(self.hidden(x)))
        return y


def tensor_parallel_plan(model: Transformer) -> dict[str, "ParallelStyle"]:
    """How torch's `parallelize_module` divides each block's heads and its mlp's hidden features.

    Between the blocks' halves everything is whole: norms, embeddings, the dropout of features.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
    )

    plan: dict[str, ParallelStyle] = {}
    for i in range(len(model.blocks)):
        attention, mlp = f"blocks.{i}.attention", f"blocks.{i}.mlp"
        # Their gradients are added before they are summed over the workers, in one message.
        plan[attention] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        )
        plan |= {f"{attention}.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {f"{attention}.output": RowwiseParallel()}
        plan |= {f"{mlp}.hidden": ColwiseParallel(), f"{mlp}.output": RowwiseParallel()}
    return plan


def _make_mlp(width: int, depth: int, experts: Experts | None) -> nn.Module:
    if experts is None:
        return _MLP(width, 4 * width)

    def make_expert() -> nn.Module:
        expert = _MLP(width, 4 * width // experts.top_k)
        for module in expert.modules():
            _initialize_small(module)
        _initialize_residual(expert.output, depth)
        return expert

    return allstep.nn.MixtureOfExperts(
        make_expert,
        experts.comm,
        width,
        experts.num,
        top_k=experts.top_k,
        capacity_factor=experts.capacity_factor,
        seed=int(torch.randint(2**62, ()).item()),
    )


def _outside_experts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all in it, but for what a mixture of experts draws itself."""
    if isinstance(module, allstep.nn.MixtureOfExperts):
        return
    yield module
    for child in module.children():
        yield from _outside_experts(child)


def _initialize_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _initialize_residual(layer: nn.Linear, depth: int) -> None:
    """Where it adds to the residual path, which has two such layers a block."""
    nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
