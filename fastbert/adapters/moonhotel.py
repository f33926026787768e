"""moon-hotel's BertWithPretrained: its ``BertEmbeddings``, sequence first, ``[S, B]`` to ``[S, B, hidden]``.

Its LayerNorm has PyTorch's default eps, 1e-5, whatever the configuration says. Differences: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..bert import BertConfig, BertEmbeddings
from .names import dump, expand, load

EMBEDDINGS = {
    "word_embeddings.embedding.weight": "word_embeddings.weight",
    "position_embeddings.embedding.weight": "position_embeddings.weight",
    "token_type_embeddings.embedding.weight": "token_type_embeddings.weight",
    "LayerNorm.*": "LayerNorm.*",
}
POSITION_IDS = "position_ids"  # a buffer, [1, max_position_embeddings]: 0, 1, 2, ...


def from_state_dict(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> BertEmbeddings:
    """A sequence-first ``BertEmbeddings`` with the parameters of moon-hotel's ``BertEmbeddings``."""
    settings = {"num_attention_heads": 1, **config, "layer_norm_eps": 1e-5}  # settings of the embeddings alone
    embeddings = BertEmbeddings(BertConfig.from_dict(settings), batch_first=False)
    return load(embeddings, state_dict, expand(EMBEDDINGS), (POSITION_IDS,))


def to_state_dict(model: BertEmbeddings) -> dict[str, Tensor]:
    """The ``state_dict()`` of moon-hotel's ``BertEmbeddings``."""
    state = dump(model, expand(EMBEDDINGS))
    positions = torch.arange(model.config.max_position_embeddings, device=model.word_embeddings.weight.device)
    return {POSITION_IDS: positions[None], **state}
