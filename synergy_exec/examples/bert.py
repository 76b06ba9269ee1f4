"""A BERT of Hugging Face's transformers, made from its configuration: it tells what sentences are about.

A made-up language: of each topic some words are more frequent. Sentences have different lengths, so batches are dicts
with a mask. Needs `pip install transformers`, and no network.
"""

import torch
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

from synergy_exec.training.job import TrainingJob, warmed_up


class Bert(TrainingJob):
    """The job; words: of a sentence, at most."""

    blocks = "bert.encoder.layer"
    learning_rate_rule = "square_root"
    max_grad_norm = 1.0
    evaluate_every = 50

    def __init__(self, words=24, topics=8, vocabulary=256, hidden=64, depth=2, dropout=0.1, learning_rate=4e-3):
        self.words, self.topics, self.vocabulary, self.learning_rate = words, topics, vocabulary, learning_rate
        self.configuration = BertConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=4 * hidden,
            max_position_embeddings=words,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=topics,
        )

    def build_model(self):
        return BertForSequenceClassification(self.configuration)

    def sentences(self, seed, size):
        generator = torch.Generator().manual_seed(seed)
        topics = torch.randint(self.topics, (size,), generator=generator)
        lengths = torch.randint(self.words // 2, self.words + 1, (size, 1), generator=generator)
        words = torch.randint(1, self.vocabulary, (size, self.words), generator=generator)
        # Every second word is one of the topic's own, whose number it leaves when divided by how many topics there are.
        own = (words - words % self.topics + topics[:, None]).clamp(1, self.vocabulary - 1)
        words = torch.where(torch.rand(words.shape, generator=generator) < 1 / 2, own, words)
        mask = (torch.arange(self.words) < lengths).long()
        return {"input_ids": words * mask, "attention_mask": mask}, topics

    def batch(self, step, size):
        return self.sentences(step, size)

    def loss(self, output, target):
        return functional.cross_entropy(output.logits, target)

    def build_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.learning_rate)

    def learning_rate_schedule(self, work, total):
        return warmed_up(work, 0.1 * total)

    def evaluation(self):
        return [self.sentences(-1 - number, 128) for number in range(2)]

    def metrics(self, output, target):
        right = output.logits.argmax(-1) == target
        return {"loss": self.loss(output, target), "accuracy": right.float().mean()}
