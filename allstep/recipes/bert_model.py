"""BERT with modules named as in transformers, so that state dicts match that library's files."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allstep.recipes.transformer import at_positions, initialize_small

PADDING_TOKEN = 0


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The size of a BERT, named as in its config.json.

    Args:
        vocab_size: number of different tokens.
        hidden_size: features of a token.
        num_hidden_layers: blocks of the encoder.
        num_attention_heads: attention heads of each block; their number divides `hidden_size`.
        intermediate_size: features between the two dense layers of a block.
        max_position_embeddings: largest number of tokens of a sequence.
        hidden_dropout_prob: probability of dropping a feature after the embedding and each half of
            a block.
        attention_probs_dropout_prob: probability of dropping an attention weight.
        type_vocab_size: number of segments.
        layer_norm_eps: term added to the variance.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12


class BertForPreTraining(nn.Module):
    """An encoder and two heads: for masked tokens, and for whether the second segment follows.

    Args:
        config: size of the model.

    Source: Devlin et al., 2018, arXiv:1810.04805, section 3 and appendix A.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.cls = _Heads(config)
        self.apply(initialize_small)  # as published

    def forward(
        self, tokens: Tensor, segments: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores of the tokens at some positions, and of the relation of the segments.

        Args:
            tokens: int64 [batch, tokens]; 0 is padding, which is masked in the attention.
            segments: index of each token's segment, int64 [batch, tokens], 0 or 1.
            positions: positions to predict, int64 [batch, predicted]; None for all.

        Returns:
            The tokens' scores, [batch, predicted, vocab_size]; and the segments', [batch, 2]: the
            second segment follows the first, or is a random one.
        """
        hidden, pooled = self.bert(tokens, segments)
        hidden = at_positions(hidden, positions)
        embeddings = self.bert.embeddings.word_embeddings.weight
        scores = F.linear(
            self.cls.predictions.transform(hidden), embeddings, self.cls.predictions.bias
        )
        return scores, self.cls.seq_relationship(pooled)


class BertForSequenceClassification(nn.Module):
    """An encoder and a linear layer on its output for the first token.

        logits = dense(dropout(pooled))

    Args:
        config: size of the model; `hidden_dropout_prob` is also used before the linear layer.
        num_classes: number of outputs.

    Source: Devlin et al., 2018, arXiv:1810.04805, section 4.1; as in transformers.
    """

    def __init__(self, config: BertConfig, num_classes: int) -> None:
        super().__init__()
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, num_classes)
        self.apply(initialize_small)  # as published

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [batch, tokens], in one segment, 0 is padding -> logits [batch, classes]."""
        _, pooled = self.bert(tokens, torch.zeros_like(tokens))
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


class BertModel(nn.Module):
    """The encoder: post-norm blocks on the embeddings of tokens, positions and segments.

        x = norm(token + position + segment)
        x = norm(x + attention(x)); x = norm(x + dense(gelu(dense(x))))    (num_hidden_layers times)
        pooled = tanh(dense(x[first token]))

    Args:
        config: size of the model.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = _Dense(config.hidden_size, config.hidden_size)

    def forward(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens' features [batch, tokens, features], and `pooled`, [batch, features]."""
        x = self.embeddings(tokens, segments)
        is_seen = (tokens != PADDING_TOKEN)[:, None, None, :]  # for all heads and queries
        for layer in self.encoder.layer:
            x = layer(x, is_seen)
        return x, self.pooler(x[:, 0]).tanh()


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.token_type_embeddings(segments)
        x = x + self.position_embeddings.weight[: tokens.shape[1]]
        y: Tensor = self.dropout(self.LayerNorm(x))
        return y


class _Encoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))


class _Layer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _Dense(config.hidden_size, config.intermediate_size)
        self.output = _AddAndNorm(config.intermediate_size, config)

    def forward(self, x: Tensor, is_seen: Tensor) -> Tensor:
        x = self.attention(x, is_seen)
        y: Tensor = self.output(F.gelu(self.intermediate(x)), x)
        return y


class _Attention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _AddAndNorm(config.hidden_size, config)

    def forward(self, x: Tensor, is_seen: Tensor) -> Tensor:
        y: Tensor = self.output(self.self(x, is_seen), x)
        return y


class _SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self._heads = config.num_attention_heads
        self._dropout = config.attention_probs_dropout_prob
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor, is_seen: Tensor) -> Tensor:
        query, key, value = (
            dense(x).unflatten(2, (self._heads, -1)).transpose(1, 2)
            for dense in (self.query, self.key, self.value)
        )  # [batch, head, token, feature] each
        dropout = self._dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(
            query, key, value, attn_mask=is_seen, dropout_p=dropout
        )
        return seen.transpose(1, 2).flatten(2)


class _Dense(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.dense = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dense(x)
        return y


class _AddAndNorm(nn.Module):
    """norm(residual + dropout(dense(x)))."""

    def __init__(self, num_in: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(num_in, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self.LayerNorm(residual + self.dropout(self.dense(x)))
        return y


class _Heads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _Predictions(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class _Predictions(nn.Module):
    """The layers between the encoder and the scores, which use the tokens' embeddings."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = _Transform(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))


class _Transform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.LayerNorm(F.gelu(self.dense(x)))
        return y
