"""A transformer that classifies texts by topic. Texts have different lengths, so batches are dicts with a mask.

The job has no tensor_plan, and a pipeline takes no dicts, so it trains on one slot or with data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from synergy_exec.training.job import TrainingJob


class Encoder(nn.Module):
    """Embeddings of words and positions, attention over all words of a text, and scores of the topics."""

    def __init__(self, vocabulary: int, words: int, hidden: int, depth: int, topics: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, hidden)
        self.place = nn.Parameter(0.02 * torch.randn(words, hidden))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(hidden)
        self.scores = nn.Linear(hidden, topics)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """words, mask: (texts, words); the mask is false for padding. Returns scores, (texts, topics)."""
        hidden = self.word(words) + self.place
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~mask)
        there = mask[:, :, None]
        output: Tensor = self.scores(self.norm((hidden * there).sum(dim=1) / there.sum(dim=1)))
        return output


class Texts(TrainingJob):
    """The job. hidden, depth: sizes of the transformer; hidden is a multiple of 4. words: maximum per text."""

    blocks = "layers"
    learning_rate_rule = "square_root"

    def __init__(
        self,
        hidden: int = 64,
        depth: int = 2,
        words: int = 24,
        vocabulary: int = 256,
        topics: int = 8,
        learning_rate: float = 4e-3,
    ) -> None:
        self.hidden, self.depth, self.words = hidden, depth, words
        self.vocabulary, self.topics = vocabulary, topics
        self.learning_rate = learning_rate

    def build_model(self) -> nn.Module:
        return Encoder(self.vocabulary, self.words, self.hidden, self.depth, self.topics)

    def batch(self, step: int, size: int) -> tuple[dict[str, Tensor], Tensor]:
        """About three of four words belong to the text's topic: their number modulo `topics` is the topic."""
        generator = torch.Generator().manual_seed(step)
        topics = torch.randint(self.topics, (size,), generator=generator)
        lengths = torch.randint(self.words // 2, self.words + 1, (size, 1), generator=generator)
        words = torch.randint(self.vocabulary, (size, self.words), generator=generator)
        own = torch.rand(words.shape, generator=generator) < 3 / 4
        words = torch.where(own, words - words % self.topics + topics[:, None], words)
        mask = torch.arange(self.words) < lengths
        return {"words": words * mask, "mask": mask}, topics

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate)
