"""The two policies: a small decoder-only transformer, and a small network for CartPole."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on normalised input and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        forwarded: Tensor = self.feed_forward(x)
        return x + forwarded


class Transformer(nn.Module):
    """Logits of the next token: int64 [batch, length] -> float32 [batch, length, vocabulary].

    Sequences of different lengths are padded on the right with any token: what comes later does not
    change what is said of what came before.
    """

    def __init__(
        self, vocabulary: int, longest: int, width: int = 64, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.logits = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.logits(self.blocks(self.token(tokens) + self.position(places)))
        return logits


@torch.no_grad()
def generate(
    model: nn.Module, tokens: Tensor, lengths: Tensor, *, most: int, end: int, greedy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue each sequence until it has said `end`, or `most` tokens.

    `tokens` int64 [batch, longest prompt], padded on the right; `lengths` int64 [batch].
    Returns tokens [batch, longest prompt + most], the log-probability of each of them (0 for those
    of the prompt), and the new lengths.
    """
    rows = torch.arange(len(tokens))
    tokens = nn.functional.pad(tokens, (0, most))
    logprobs = torch.zeros(tokens.shape)
    lengths, going = lengths.clone(), torch.ones(len(tokens), dtype=torch.bool)
    for _ in range(most):
        of_next = model(tokens[:, : lengths.max()])[rows, lengths - 1].log_softmax(-1)
        said = of_next.argmax(-1) if greedy else of_next.exp().multinomial(1).squeeze(-1)
        at = (rows[going], lengths[going])
        tokens[at], logprobs[at] = said[going], of_next[rows, said][going]
        lengths += going
        going = going & (said != end)
        if not going.any():
            break
    return tokens, logprobs, lengths
