"""graykode's nlp-tutorial BERT: a ``BertForPreTraining`` with tied decoder, exact GELU and no dropout.

No dropout, residual or LayerNorm follows its feed-forward network (``ffn_add_norm=False``), and every LayerNorm
has PyTorch's default eps, 1e-5. Padding is where ``input_ids`` is 0: pass ``attention_mask=input_ids != 0``.

Differences: the original builds the output projection of its attention and the LayerNorm after it anew in every
forward, from random numbers, so that they are neither trained nor stored. Here they are parameters, under the
names that the mended original gives them, ``enc_self_attn.linear`` and ``enc_self_attn.layer_norm``. Its masked
language model loss counts the spare places of ``masked_pos`` too, as predictions of token 0 at position 0; give
these places the label -100. Its ``isNext`` is 1 where B follows A, Hugging Face's ``next_sentence_label`` is 0
there: the classifier's outputs keep their order, so the labels to give are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..bert import BertConfig, BertForPreTraining
from .names import dump, expand, load, require_equal

MODEL = {
    "embedding.tok_embed.weight": "bert.embeddings.word_embeddings.weight",
    "embedding.pos_embed.weight": "bert.embeddings.position_embeddings.weight",
    "embedding.seg_embed.weight": "bert.embeddings.token_type_embeddings.weight",
    "embedding.norm.*": "bert.embeddings.LayerNorm.*",
    "layers.{}.enc_self_attn.W_Q.*": "bert.encoder.layer.{}.attention.self.query.*",
    "layers.{}.enc_self_attn.W_K.*": "bert.encoder.layer.{}.attention.self.key.*",
    "layers.{}.enc_self_attn.W_V.*": "bert.encoder.layer.{}.attention.self.value.*",
    "layers.{}.enc_self_attn.linear.*": "bert.encoder.layer.{}.attention.output.dense.*",
    "layers.{}.enc_self_attn.layer_norm.*": "bert.encoder.layer.{}.attention.output.LayerNorm.*",
    "layers.{}.pos_ffn.fc1.*": "bert.encoder.layer.{}.intermediate.dense.*",
    "layers.{}.pos_ffn.fc2.*": "bert.encoder.layer.{}.output.dense.*",
    "fc.*": "bert.pooler.dense.*",
    "linear.*": "cls.predictions.transform.dense.*",
    "norm.*": "cls.predictions.transform.LayerNorm.*",
    "decoder.weight": "cls.predictions.decoder.weight",
    "decoder_bias": "cls.predictions.bias",
    "classifier.*": "cls.seq_relationship.*",
}


def _native_config(config: Mapping[str, Any]) -> BertConfig:
    for name in ("d_k", "d_v"):
        require_equal(config, name, config["d_model"] // config["n_heads"])
    return BertConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["d_model"],
        num_hidden_layers=config["n_layers"],
        num_attention_heads=config["n_heads"],
        intermediate_size=config["d_ff"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=config["maxlen"],
        type_vocab_size=config["n_segments"],
        layer_norm_eps=1e-5,
        pad_token_id=None,
        ffn_add_norm=False,
    )


def from_state_dict(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> BertForPreTraining:
    """A ``BertForPreTraining`` with the parameters of graykode's (mended) ``BERT``."""
    model = BertForPreTraining(_native_config(config))
    return load(model, state_dict, expand(MODEL, model.config.num_hidden_layers))


def to_state_dict(model: BertForPreTraining) -> dict[str, Tensor]:
    """The ``state_dict()`` of graykode's (mended) ``BERT``; the decoder's weight is the token embeddings'."""
    return dump(model, expand(MODEL, model.config.num_hidden_layers))
