"""A GPT on characters, after nanoGPT (Karpathy 2022). It learns a source file of torch; its end is for evaluation."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from synergy_exec.training.job import TrainingJob, cosine


class TransformerBlock(nn.Module):
    """Causal attention and a perceptron. `look` orders its outputs by head, so that tensor parallelism can split it."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.before, self.between, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.size, self.look, self.out = width // heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        query, key, value = self.look(self.before(x)).unflatten(2, (-1, 3, self.size)).transpose(1, 2).unbind(3)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.between(x)))))


class CharacterModel(nn.Module):
    """Embeddings of characters and positions, blocks, and scores of the next character."""

    def __init__(self, tokens, width, depth, heads, dropout):
        super().__init__()
        self.character, self.place = nn.Embedding(128, width), nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)

    def embed(self, x):
        return self.character(x) + self.place

    def head(self, hidden):
        return self.scores(self.norm(hidden))

    def forward(self, x):
        return self.head(nn.Sequential(*self.blocks)(self.embed(x)))


class NanoGpt(TrainingJob):
    """The job. tokens: number of characters per sample."""

    blocks, learning_rate_rule, max_grad_norm, evaluate_every = "blocks", "square_root", 1.0, 100
    tensor_plan = {"blocks.*.look": "column", "blocks.*.out": "row", "blocks.*.up": "column", "blocks.*.down": "row"}  # noqa: RUF012

    def __init__(self, tokens=64, width=128, depth=4, heads=4, dropout=0.1, learning_rate=2e-3):
        self.tokens, self.sizes, self.learning_rate = tokens, (width, depth, heads, dropout), learning_rate
        text = torch.tensor([min(each, 127) for each in Path(functional.__file__).read_bytes()])
        self.train, self.held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def build_model(self):
        return CharacterModel(self.tokens, *self.sizes)

    def windows(self, text, seed, size):
        starts = torch.randint(len(text) - self.tokens, (size, 1), generator=torch.Generator().manual_seed(seed))
        places = starts + torch.arange(self.tokens + 1)
        return text[places[:, :-1]], text[places[:, 1:]]

    def batch(self, step, size):
        return self.windows(self.train, step, size)

    def loss(self, output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def build_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def learning_rate_schedule(self, work, total):
        return cosine(work, total, warm_up=0.05 * total, least=0.1)

    def evaluation(self):
        return [self.windows(self.held_out, seed, 64) for seed in range(4)]
