"""A small causal transformer for next-token prediction (specification §C.12)."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention with separate projections, so that it can be sliced by heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"Attention: width {width} is not a multiple of heads {heads}.")
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        return x.view(batch, time, -1, self.head_width).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm transformer block with dropout on its two residual branches."""

    def __init__(self, width: int, heads: int, *, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_hidden = nn.LayerNorm(width)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        hidden = functional.relu(self.expand(self.norm_hidden(x)))
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out


class Transformer(nn.Module):
    """The language model C.12: tokens [batch, time] to logits [batch, time, vocabulary].

    Positions are learned, and the output layer is untied. `length` is the longest sequence (the
    BPTT window). The default `vocabulary` is ASCII; text tasks give that of their text.
    """

    def __init__(
        self,
        vocabulary: int = 128,
        *,
        layers: int = 4,
        width: int = 256,
        heads: int = 8,
        hidden: int = 512,
        dropout: float = 0.2,
        length: int = 64,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, hidden=hidden, dropout=dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(place))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
