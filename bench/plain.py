"""A BERT in the notebook's style (Dive into Deep Learning), in plain PyTorch as one writes it: the baseline of the
notebook preset. Padding is computed, every prediction slot is computed, dropout is torch's."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden, intermediate, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))

    def forward(self, x, off):
        batch, seqlen, hidden = x.shape

        def split(t):
            return t.view(batch, seqlen, self.heads, -1).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = F.dropout(scores.masked_fill(off, -1e6).softmax(-1), self.dropout)
        attended = self.output((weights @ value).transpose(1, 2).reshape(batch, seqlen, hidden))
        x = self.norms[0](F.dropout(attended, self.dropout) + x)
        return self.norms[1](F.dropout(self.down(F.relu(self.up(x))), self.dropout) + x)


class NotebookBert(nn.Module):
    """Returns both losses; ``positions``, ``labels``: ``[B, P]``, label -100 in a spare slot."""

    def __init__(self, vocab_size, hidden=128, intermediate=256, heads=2, layers=2, dropout=0.2, max_len=1000):
        super().__init__()
        self.word, self.segment = nn.Embedding(vocab_size, hidden), nn.Embedding(2, hidden)
        self.register_buffer("position", torch.randn(1, max_len, hidden))
        self.blocks = nn.ModuleList(Block(hidden, intermediate, heads, dropout) for _ in range(layers))
        self.pooler = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        self.predictions = nn.Sequential(
            nn.Linear(hidden, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, vocab_size)
        )

    def forward(self, input_ids, token_type_ids, lengths, positions, labels, next_sentence_label):
        seqlen = input_ids.shape[1]
        x = self.word(input_ids) + self.segment(token_type_ids) + self.position[:, :seqlen]
        off = (torch.arange(seqlen, device=x.device) >= lengths[:, None])[:, None, None]
        for block in self.blocks:
            x = block(x, off)
        rows = x[torch.arange(x.shape[0], device=x.device)[:, None], positions]
        logits = self.predictions(rows)
        mlm_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return mlm_loss, F.cross_entropy(self.pooler(x[:, 0]), next_sentence_label)
