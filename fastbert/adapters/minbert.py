"""minBERT (Stanford CS 224N's default project; its twin is CMU's minbert-assignment).

Its layers add the mask to the scores *before* these are divided by ``sqrt(head size)``. With its own mask, 0 and
-10,000, that means -10,000 / sqrt(head size), and padding still counts for exactly nothing, in every floating
dtype; an additive mask of other values is divided here in the same way (``BertConfig.mask_before_scaling``).

Differences: where padding is dropped, ``last_hidden_state`` is zeros on it, where minBERT goes on computing; set
``model.unpad = False`` for its values. A sequence that is nothing but padding gives zeros in attention, where
minBERT averages all values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..bert import BertConfig, BertLayer, BertModel
from .names import dump, expand, load

LAYER = {
    "self_attention.query.*": "attention.self.query.*",
    "self_attention.key.*": "attention.self.key.*",
    "self_attention.value.*": "attention.self.value.*",
    "attention_dense.*": "attention.output.dense.*",
    "attention_layer_norm.*": "attention.output.LayerNorm.*",
    "interm_dense.*": "intermediate.dense.*",
    "out_dense.*": "output.dense.*",
    "out_layer_norm.*": "output.LayerNorm.*",
}
MODEL = {
    "word_embedding.weight": "embeddings.word_embeddings.weight",
    "pos_embedding.weight": "embeddings.position_embeddings.weight",
    "tk_type_embedding.weight": "embeddings.token_type_embeddings.weight",
    "embed_layer_norm.*": "embeddings.LayerNorm.*",
    **{f"bert_layers.{{}}.{foreign}": f"encoder.layer.{{}}.{native}" for foreign, native in LAYER.items()},
    "pooler_dense.*": "pooler.dense.*",
}
POSITION_IDS = "position_ids"  # a buffer of the model, [1, max_position_embeddings]: 0, 1, 2, ...


def _native_config(config: Mapping[str, Any]) -> BertConfig:
    # Its keys are Hugging Face's; whatever hidden_act says, it computes exact GELU.
    return dataclasses.replace(BertConfig.from_dict(dict(config)), hidden_act="gelu", mask_before_scaling=True)


def from_state_dict(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> BertModel:
    """A ``BertModel`` with the parameters of minBERT's ``BertModel``."""
    model = BertModel(_native_config(config))
    return load(model, state_dict, expand(MODEL, model.config.num_hidden_layers), (POSITION_IDS,))


def to_state_dict(model: BertModel) -> dict[str, Tensor]:
    """The ``state_dict()`` of minBERT's ``BertModel``."""
    state = dump(model, expand(MODEL, model.config.num_hidden_layers))
    positions = torch.arange(model.config.max_position_embeddings, device=state["pos_embedding.weight"].device)
    return {POSITION_IDS: positions[None], **state}


def layer_from_state_dict(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> BertLayer:
    """A ``BertLayer`` with the parameters of minBERT's ``BertLayer``."""
    return load(BertLayer(_native_config(config)), state_dict, expand(LAYER))


def layer_to_state_dict(layer: BertLayer) -> dict[str, Tensor]:
    """The ``state_dict()`` of minBERT's ``BertLayer``."""
    return dump(layer, expand(LAYER))
