"""A small transformer that predicts tokens, from all others or from those before."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Transformer(nn.Module):
    """Pre-norm blocks on learned positions; the logits use the tokens' own embeddings.

        x = embedding[token] + position_embedding
        x = x + attention(norm(x)); x = x + mlp(norm(x))    (depth times)
        logits = norm(x) @ embedding.T

    Args:
        vocab_size: number of different tokens.
        sequence_length: the most tokens of a sequence.
        width: features of a token.
        depth: number of blocks.
        heads: of the attention; divide the width.
        dropout: probability of dropping a feature after the embedding and each half of a block.
        causal: let a token see itself and those before it only.

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
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Parameter(torch.empty(sequence_length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout, causal) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self._initialize(depth)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of every token, or only of those at some positions.

        Args:
            tokens: int64 [batch, token].
            positions: int64 [batch, predicted], or None for all.

        Returns:
            [batch, predicted, vocab_size].
        """
        x = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]]
        x = self.blocks(self.dropout(x))
        if positions is not None:
            x = x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))
        return F.linear(self.norm(x), self.token_embedding.weight)

    def _initialize(self, depth: int) -> None:
        """Small normal weights; smaller where they add to the residual path."""
        nn.init.normal_(self.position_embedding, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, _Block)
            for layer in (block.attention.output, block.mlp.output):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = _MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self._heads = heads
        self._causal = causal
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, num_tokens, width = x.shape
        heads = self.query_key_value(x).view(batch, num_tokens, 3, self._heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [batch, head, token, feature] each
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self._causal)
        y: Tensor = self.output(seen.transpose(1, 2).reshape(batch, num_tokens, width))
        return y


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(F.gelu(self.hidden(x)))
        return y
