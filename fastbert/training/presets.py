"""The models that ``fastbert pretrain`` knows by name: sizes, data and optimizer, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import d2l
from ..bert import BertConfig, BertForPreTraining


@dataclasses.dataclass(frozen=True)
class Preset:
    """``config(vocab_size, max_len)`` makes the model's configuration; the rest are defaults of a run.

    ``betas``, ``eps`` and ``weight_decay`` are those of Adam (decoupled decay); ``warmup`` is the share of the steps
    over which the learning rate rises, before it falls linearly to zero; None keeps it constant.
    """

    config: Callable[[int, int], BertConfig]
    tokenizer: str
    max_len: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    warmup: float | None
    eps: float
    static_masking: bool = False
    torch_initialization: bool = False

    def build(self, vocab_size: int, max_len: int) -> BertForPreTraining:
        """The model, its parameters drawn from torch's default generator."""
        model = BertForPreTraining(self.config(vocab_size, max_len))
        if self.torch_initialization:
            _initialize_as_torch(model)
        return model

    def optimizer(self, model: nn.Module, learning_rate: float | Tensor) -> torch.optim.Optimizer:
        """Adam in its fused form. Biases and LayerNorms are not decayed. A tensor as the learning rate is read at each
        step on the device, so that a CUDA graph may hold the step."""
        groups = _decay_groups(model.named_parameters(), self.weight_decay)
        captured = isinstance(learning_rate, Tensor)
        return torch.optim.AdamW(
            groups, lr=learning_rate, betas=(0.9, 0.999), eps=self.eps, fused=True, capturable=captured
        )


def _decay_groups(parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    trained = [p for _, p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _initialize_as_torch(model: nn.Module) -> None:
    """Every module as torch's constructors leave it; positions from N(0, 1), as the notebook draws them."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()
    predictions = model.cls.predictions
    bound = predictions.decoder.in_features**-0.5
    nn.init.uniform_(predictions.bias, -bound, bound)


def _bert(layers: int, hidden: int) -> Callable[[int, int], BertConfig]:
    """The sizes of https://arxiv.org/abs/1908.08962: heads of 64, an intermediate layer of four times hidden."""
    return lambda vocab_size, max_len: BertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(512, max_len),
    )


def _notebook(vocab_size: int, max_len: int) -> BertConfig:
    settings = {"num_hiddens": 128, "ffn_num_hiddens": 256, "num_heads": 2, "num_layers": 2, "dropout": 0.2}
    return d2l.native_config({"vocab_size": vocab_size, "max_len": max(1000, max_len), **settings})


_ADAMW = {"weight_decay": 0.01, "warmup": 0.1, "eps": 1e-6}

PRESETS = {
    # Dive into Deep Learning's model, optimizer and batch; Adam is AdamW without decay.
    "notebook": Preset(
        _notebook,
        "word",
        max_len=64,
        batch_size=512,
        learning_rate=1e-3,
        weight_decay=0.0,
        warmup=None,
        eps=1e-8,
        static_masking=True,
        torch_initialization=True,
    ),
    "bert-mini": Preset(_bert(4, 256), "wordpiece", max_len=128, batch_size=128, learning_rate=5e-4, **_ADAMW),
    "bert-small": Preset(_bert(4, 512), "wordpiece", max_len=128, batch_size=128, learning_rate=5e-4, **_ADAMW),
    "bert-base": Preset(_bert(12, 768), "wordpiece", max_len=128, batch_size=64, learning_rate=1e-4, **_ADAMW),
    "bert-large": Preset(_bert(24, 1024), "wordpiece", max_len=128, batch_size=64, learning_rate=1e-4, **_ADAMW),
}
