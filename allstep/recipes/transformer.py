"""A small transformer that predicts tokens from all others, or from those before."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import allstep
from allstep import Communicator


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Settings of the mixture of experts in each block; see `allstep.nn.MixtureOfExperts`.

    Args:
        comm: the workers among which the experts are divided.
        num: number of experts of a block, copies not counted.
        top_k: experts per token.
        capacity_factor: most tokens that an expert accepts, relative to an equal share; None for no
            limit.
        copies: copies of each expert, on as many workers.
    """

    comm: Communicator
    num: int
    top_k: int
    capacity_factor: float | None
    copies: int


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The size and settings of a transformer.

    Args:
        vocab_size: number of different tokens.
        sequence_length: largest number of tokens of a sequence.
        width: features of a token.
        depth: number of blocks.
        heads: number of attention heads; divides `width`.
        dropout: probability of dropping a feature after the embedding and each half of a block.
        causal: whether tokens attend only to themselves and to those before.
    """

    vocab_size: int
    sequence_length: int
    width: int
    depth: int
    heads: int
    dropout: float
    causal: bool


class Transformer(nn.Module):
    """A transformer with pre-norm blocks, learned positions, and logits tied to the embeddings.

        x = embedding[token] + position_embedding
        x = x + attention(norm(x)); x = x + mlp(norm(x))    (depth times)
        logits = norm(x) @ embedding.T

    With `experts` each MLP is a mixture of experts, each with 1 / top_k of its hidden features, so
    that a token takes as many operations; a call then also returns the mean of the blocks' balance
    losses.

    Args:
        config: size and settings.
        experts: settings of the experts; None for a single MLP in each block.

    Source: Vaswani et al., 2017, arXiv:1706.03762; norm, GELU and initial weights as in
    Radford et al., 2019 (GPT-2).
    """

    def __init__(self, config: TransformerConfig, experts: Experts | None = None) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Parameter(torch.empty(config.sequence_length, config.width))
        self.dropout = nn.Dropout(config.dropout)
        mlps = [_make_mlp(config, experts) for _ in range(config.depth)]
        self.blocks = nn.Sequential(*(Block(config, mlp) for mlp in mlps))
        self.norm = nn.LayerNorm(config.width)
        self.add, self.logits = _Add(), _TiedLogits()  # modules, so that a plan can shard inputs
        self._initialize(config.depth)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of every token, or only of those at some positions.

        Args:
            tokens: int64 [batch, tokens].
            positions: positions to predict, int64 [batch, predicted]; None for all.

        Returns:
            Logits [batch, predicted, vocab_size]; with experts also the balance loss, a scalar.
        """
        x = self.add(self.token_embedding(tokens), self.position_embedding[: tokens.shape[1]])
        x = self.dropout(x)
        balance_losses = []
        for block in self.blocks:
            x, *balance_loss = block(x)
            balance_losses += balance_loss
        chosen = {} if positions is None else {"positions": positions}
        logits = self.logits(self.norm(x), self.token_embedding.weight, **chosen)
        return (logits, torch.stack(balance_losses).mean()) if balance_losses else logits

    def _initialize(self, depth: int) -> None:
        """Sets small normal weights; smaller ones in layers that add to the residual."""
        nn.init.normal_(self.position_embedding, std=0.02)
        for module in _outside_experts(self):
            initialize_small(module)
        for block in self.blocks:
            assert isinstance(block, Block)
            _initialize_block(block, depth)


class TransformerStage(nn.Module):
    """One block for a pipeline; the first one has the embeddings, the last one norm and logits.

    The logits' matrix isn't tied to the embeddings, as these are on another worker.

    With experts, stages also pass on two sums over the blocks so far: of their parts of the mean
    balance loss, and of the dropped choices of experts.

    Args:
        config: size and settings of the whole transformer.
        number: index of the block.
        experts: settings of the experts, as for `Transformer`.
    """

    def __init__(
        self, config: TransformerConfig, number: int, experts: Experts | None = None
    ) -> None:
        super().__init__()
        width, is_last = config.width, number == config.depth - 1
        mlp = _make_mlp(config, experts)
        self.embedding = _Embedding(config) if number == 0 else None
        self.block = Block(config, mlp)
        self.norm = nn.LayerNorm(width) if is_last else None
        self.logits = nn.Linear(width, config.vocab_size, bias=False) if is_last else None
        for module in _outside_experts(self):
            initialize_small(module)
        _initialize_block(self.block, config.depth)
        self._depth = config.depth

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        """The next stage's input; from the last stage logits, with experts also their two sums.

        Args:
            x: tokens int64 [batch, tokens], or features [batch, tokens, width].
            others: the two sums of the experts so far, [2], if there are any; and positions int64
                [batch, predicted], or none for the logits of all tokens.
        """
        mlp = self.block.mlp
        if self.embedding is not None:
            x = self.embedding(x)
        x, *balance_losses = self.block(x)
        use: tuple[Tensor, ...] = ()
        if isinstance(mlp, allstep.nn.MixtureOfExperts):
            balance_loss = balance_losses[0] / self._depth
            own = torch.stack((balance_loss, balance_loss.new_tensor(mlp.num_dropped))).to(x.dtype)
            if self.embedding is None:
                own, others = own + others[0], others[1:]
            use = (own,)
        if self.norm is not None and self.logits is not None:
            x, others = self.logits(self.norm(at_positions(x, *others))), ()
            use = tuple(part for each in use for part in each)
        return (x, *use, *others) if use or others else x


class _Embedding(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(config.sequence_length, config.width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        return x


def at_positions(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Features of the tokens at `positions`, [batch, predicted, width]; of all tokens if None."""
    if positions is None:
        return x
    return x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))


class _Add(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions


class _TiedLogits(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, positions: Tensor | None = None) -> Tensor:
        return F.linear(at_positions(x, positions), weight)


class Block(nn.Module):
    def __init__(self, config: TransformerConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = mlp
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        found = self.mlp(self.mlp_norm(x))
        y, *balance_loss = found if isinstance(found, tuple) else (found,)
        return x + self.dropout(y), *balance_loss


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self._head_width = width // config.heads
        self._causal = config.causal
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
        """The features of this worker's heads, [batch, heads, tokens, features]."""
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


def _make_mlp(config: TransformerConfig, experts: Experts | None) -> nn.Module:
    width = config.width
    if experts is None:
        return _MLP(width, 4 * width)

    def make_expert() -> nn.Module:
        expert = _MLP(width, 4 * width // experts.top_k)
        for module in expert.modules():
            initialize_small(module)
        _initialize_residual(expert.output, config.depth)
        return expert

    return allstep.nn.MixtureOfExperts(
        make_expert,
        experts.comm,
        width,
        experts.num,
        top_k=experts.top_k,
        capacity_factor=experts.capacity_factor,
        copies=experts.copies,
        seed=int(torch.randint(2**62, ()).item()),
    )


def _outside_experts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its submodules, except mixtures of experts, which initialise themselves."""
    if isinstance(module, allstep.nn.MixtureOfExperts):
        return
    yield module
    for child in module.children():
        yield from _outside_experts(child)


def initialize_small(module: nn.Module) -> None:
    """Sets the weights of a module to small normal numbers, and biases to zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _initialize_block(block: Block, depth: int) -> None:
    _initialize_residual(block.attention.output, depth)
    if isinstance(block.mlp, _MLP):  # experts are initialised when they are made
        _initialize_residual(block.mlp.output, depth)


def _initialize_residual(layer: nn.Linear, depth: int) -> None:
    """Sets smaller weights in a layer that adds to the residual; each block has two of these."""
    nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
