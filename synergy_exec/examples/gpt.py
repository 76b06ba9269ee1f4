"""A small GPT that learns a made-up language, in which a token and one random bit determine the next token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from synergy_exec.training.job import TrainingJob


class CausalSelfAttention(nn.Module):
    """Causal self-attention. It infers the number of heads, since a tensor-parallel rank has only some of them."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, hidden) in and out."""
        query, key, value = (
            each(x).unflatten(2, (-1, self.head_size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class DecoderLayer(nn.Module):
    """Attention and a perceptron. Each normalises its input first and adds its output to the input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = CausalSelfAttention(hidden, heads)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, hidden) in and out."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return output


class Transformer(nn.Module):
    """Embeddings of tokens and positions, blocks, and scores of the next token."""

    def __init__(self, vocabulary: int, tokens: int, hidden: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, hidden))
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.scores = nn.Linear(hidden, vocabulary, bias=False)

    def embed(self, x: Tensor) -> Tensor:
        """The part before the blocks."""
        hidden: Tensor = self.token(x) + self.place
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """The part after the blocks."""
        output: Tensor = self.scores(self.norm(hidden))
        return output

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) → (samples, tokens, vocabulary)."""
        return self.head(nn.Sequential(*self.layers)(self.embed(x)))


class Gpt(TrainingJob):
    """The job. hidden, depth, heads: sizes of the model; hidden is a multiple of heads. tokens: number per sample."""

    blocks = "layers"
    tensor_plan: ClassVar = {
        "token": "row",
        "layers.*.attention.query": "column",
        "layers.*.attention.key": "column",
        "layers.*.attention.value": "column",
        "layers.*.attention.out": "row",
        "layers.*.up": "column",
        "layers.*.down": "row",
    }
    learning_rate_rule = "square_root"

    def __init__(
        self,
        hidden: int = 64,
        depth: int = 4,
        heads: int = 4,
        tokens: int = 32,
        vocabulary: int = 128,
        learning_rate: float = 1e-3,
    ) -> None:
        self.hidden, self.depth, self.heads = hidden, depth, heads
        self.tokens, self.vocabulary = tokens, vocabulary
        self.learning_rate = learning_rate

    def build_model(self) -> nn.Module:
        return Transformer(self.vocabulary, self.tokens, self.hidden, self.depth, self.heads)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Sentences in which a token is followed by 5 × token + 7 or by one more; the loss cannot go below ln 2."""
        generator = torch.Generator().manual_seed(step)
        sentence = [torch.randint(self.vocabulary, (size,), generator=generator)]
        bits = torch.randint(2, (self.tokens, size), generator=generator)
        for bit in bits:
            sentence.append((5 * sentence[-1] + 7 + bit) % self.vocabulary)
        tokens = torch.stack(sentence, dim=1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate)
