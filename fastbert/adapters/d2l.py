"""The BERT of "Dive into Deep Learning" and of pyprobml's notebook: a ``BertForPreTraining`` with ReLU.

Neither LayerNorm nor dropout follows its embeddings, every LayerNorm has PyTorch's default eps, 1e-5, and the
decoder has a weight of its own. Its positions are read through ``.data`` and thus never trained
(``train_position_embeddings=False``). It masks by length: pass
``packing=Packing.from_lengths(valid_lens, tokens.shape[1])``, and its ``pred_positions`` and labels as
``masked_positions`` and ``labels``, -100 where ``mlm_weights`` is 0.

Differences: the loss is the mean over the predictions that have a weight. The notebook takes the mean over all of
them, padding included, before it multiplies by the weights, which then cancel out. ``last_hidden_state`` is zeros
on dropped padding, where the notebook goes on computing; set ``model.unpad = False`` and pass a mask for its values.
A sequence of length 0 gives zeros in attention, where the notebook averages all values. Its NSP label is 1 where B
follows A, Hugging Face's 0; the outputs keep their order, so the labels to give are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..bert import BertConfig, BertForPreTraining
from .names import dump, expand, load, require_equal

POSITIONS = "encoder.pos_embedding"  # [1, max_len, hidden]
MODEL = {
    "encoder.token_embedding.weight": "bert.embeddings.word_embeddings.weight",
    "encoder.segment_embedding.weight": "bert.embeddings.token_type_embeddings.weight",
    POSITIONS: "bert.embeddings.position_embeddings.weight",
    "encoder.blks.{}.attention.W_q.*": "bert.encoder.layer.{}.attention.self.query.*",
    "encoder.blks.{}.attention.W_k.*": "bert.encoder.layer.{}.attention.self.key.*",
    "encoder.blks.{}.attention.W_v.*": "bert.encoder.layer.{}.attention.self.value.*",
    "encoder.blks.{}.attention.W_o.*": "bert.encoder.layer.{}.attention.output.dense.*",
    "encoder.blks.{}.addnorm1.ln.*": "bert.encoder.layer.{}.attention.output.LayerNorm.*",
    "encoder.blks.{}.ffn.dense1.*": "bert.encoder.layer.{}.intermediate.dense.*",
    "encoder.blks.{}.ffn.dense2.*": "bert.encoder.layer.{}.output.dense.*",
    "encoder.blks.{}.addnorm2.ln.*": "bert.encoder.layer.{}.output.LayerNorm.*",
    "hidden.0.*": "bert.pooler.dense.*",
    "mlm.mlp.0.*": "cls.predictions.transform.dense.*",
    "mlm.mlp.2.*": "cls.predictions.transform.LayerNorm.*",
    "mlm.mlp.3.weight": "cls.predictions.decoder.weight",
    "mlm.mlp.3.bias": "cls.predictions.bias",
    "nsp.output.*": "cls.seq_relationship.*",
}
# The notebook may be given different sizes for what is one size here.
HIDDEN_SIZES = (
    "ffn_num_input",
    "key_size",
    "query_size",
    "value_size",
    "hid_in_features",
    "mlm_in_features",
    "nsp_in_features",
)


def native_config(config: Mapping[str, Any]) -> BertConfig:
    """The configuration here of the settings that the notebook passes to its ``BERTModel``."""
    hidden_size = config["num_hiddens"]
    for name in HIDDEN_SIZES:
        require_equal(config, name, hidden_size)
    require_equal(config, "norm_shape", [hidden_size])
    return BertConfig(
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        num_hidden_layers=config["num_layers"],
        num_attention_heads=config["num_heads"],
        intermediate_size=config["ffn_num_hiddens"],
        hidden_act="relu",
        hidden_dropout_prob=config["dropout"],
        attention_probs_dropout_prob=config["dropout"],
        max_position_embeddings=config.get("max_len", 1000),
        layer_norm_eps=1e-5,
        pad_token_id=None,
        tie_word_embeddings=False,
        embedding_layer_norm=False,
        train_position_embeddings=False,
    )


def from_state_dict(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> BertForPreTraining:
    """A ``BertForPreTraining`` with the parameters of the notebook's ``BERTModel``."""
    model = BertForPreTraining(native_config(config))
    state = dict(state_dict)
    if POSITIONS in state:
        state[POSITIONS] = state[POSITIONS].squeeze(0)
    return load(model, state, expand(MODEL, model.config.num_hidden_layers))


def to_state_dict(model: BertForPreTraining) -> dict[str, Tensor]:
    """The ``state_dict()`` of the notebook's ``BERTModel``."""
    state = dump(model, expand(MODEL, model.config.num_hidden_layers))
    return {**state, POSITIONS: state[POSITIONS].unsqueeze(0)}
