"""BERT, the whole model: configuration, embeddings, layers, heads, checkpoints.

Modules hold parameters, under Hugging Face's names, and put :mod:`fastbert.ops` together; the ops choose their
backend and differentiate. Where there is padding, a model drops it once, before the embeddings; from then on
hidden states are packed, ``[T, hidden]``, and a :class:`fastbert.ops.Packing` takes the mask's place.

Source: Devlin et al., "BERT", https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import ops
from .ops.checks import accumulation_dtype
from .ops.dropout import threshold
from .ops.linear import linear
from .ops.packing import Packing, pad, take

if TYPE_CHECKING:
    from typing_extensions import Self

# Hugging Face's activation names, and what each one is here: GELU's `approximate`, or relu.
ACTIVATIONS = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": "relu",
}

# Keys of Hugging Face's configurations that change what is computed, and the one value this model computes.
FIXED_KEYS = {
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}

IGNORE_INDEX = -100  # the label of a token, or of a pair of sentences, that no loss is computed for


@dataclasses.dataclass
class BertConfig:
    """Sizes and settings of a BERT, under Hugging Face's keys; the defaults are those of bert-base-uncased.

    Not among Hugging Face's: ``embedding_layer_norm``, whether LayerNorm and dropout follow the sum of the
    embeddings; ``train_position_embeddings``; ``ffn_add_norm``, whether dropout, residual and LayerNorm follow
    the feed-forward network; ``mask_before_scaling``, whether an additive mask is added to the attention scores
    before they are scaled by ``1 / sqrt(head size)`` (minBERT) rather than after.

    ``hidden_act``: gelu (exact), gelu_new (tanh) or relu, or another name of Hugging Face's for one of them.
    ``pad_token_id``: the row of the word embeddings that starts at zero and gets no gradient as an input, or
    None. ``classifier_dropout``: None for ``hidden_dropout_prob``.

    Raises ``ValueError`` naming the key, its value and what is accepted.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    num_labels: int = 2
    tie_word_embeddings: bool = True
    embedding_layer_norm: bool = True
    train_position_embeddings: bool = True
    ffn_add_norm: bool = True
    mask_before_scaling: bool = False

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
            "num_labels",
        ):
            self._check(name, self._is_int(name) and getattr(self, name) > 0, "an int above 0")
        name = "num_hidden_layers"
        self._check(name, self._is_int(name) and self.num_hidden_layers >= 0, "an int from 0")
        self._check(
            "num_attention_heads",
            self.hidden_size % self.num_attention_heads == 0,
            f"a divisor of hidden_size, {self.hidden_size}",
        )
        self._check("hidden_act", self.hidden_act in ACTIVATIONS, "one of " + ", ".join(ACTIVATIONS))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            value = getattr(self, name)
            optional = name == "classifier_dropout" and value is None
            self._check(name, optional or 0.0 <= value <= 1.0, "a probability from 0 to 1")
        self._check("initializer_range", self.initializer_range >= 0, "a number from 0")
        self._check("layer_norm_eps", self.layer_norm_eps > 0, "a number above 0")
        self._check(
            "pad_token_id",
            self.pad_token_id is None or (self._is_int("pad_token_id") and self.pad_token_id in range(self.vocab_size)),
            f"None or a token id below vocab_size, {self.vocab_size}",
        )

    def _is_int(self, name: str) -> bool:
        return isinstance(getattr(self, name), int) and not isinstance(getattr(self, name), bool)

    def _check(self, name: str, good: bool, accepted: str) -> None:
        if not good:
            raise ValueError(f"{name} is {getattr(self, name)!r}; accepted is {accepted}")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> BertConfig:
        """Of Hugging Face's keys and this package's own; keys that change nothing here are ignored.

        Raises ``ValueError`` for a setting that this model does not compute, such as relative positions.
        """
        for name, accepted in FIXED_KEYS.items():
            if settings.get(name, accepted) != accepted:
                raise ValueError(f"{name} is {settings[name]!r}; accepted is {accepted!r}")
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in settings.items() if name in names}
        if "num_labels" not in known and settings.get("id2label"):
            known["num_labels"] = len(settings["id2label"])  # as Hugging Face stores it
        return cls(**known)

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> BertConfig:
        """Of a ``config.json``."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class ModelOutput(dict):
    """What a model returns: tensors by key and by attribute, those that were computed."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this output has no {name!r}; it has {', '.join(self)}") from None


# Masks and packing


def prepare_mask(attention_mask: Tensor, batch: int, seqlen: int) -> Tensor:
    """A mask over keys as :func:`fastbert.ops.attention` takes it: 4-D, bool (True = attend) or additive.

    ``attention_mask``: bool, or integers where 0 = off, ``[B, S]`` or by query ``[B, S, S]``; or four-dimensional
    ``[B or 1, heads or 1, S or 1, S]``, bool or floating, where a floating mask is always added to the scores.

    Raises ``TypeError`` for a floating ``[B, S]`` mask, of which nobody can say whether 0 means "off" or "add
    nothing", and for integers in four dimensions; ``ValueError`` for another shape.
    """
    if attention_mask.dim() == 4:
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise TypeError(_refusal(attention_mask, batch, seqlen, ", which may be 0/1 or additive"))
        if attention_mask.shape[0] not in (1, batch) or attention_mask.shape[-1] != seqlen:
            raise ValueError(_refusal(attention_mask, batch, seqlen))
        return attention_mask
    if attention_mask.is_floating_point():
        raise TypeError(
            _refusal(
                attention_mask, batch, seqlen, ", which may be 0/1 or additive: pass mask.bool() if 1 means attend"
            )
        )
    if attention_mask.shape == (batch, seqlen):
        return (attention_mask != 0)[:, None, None, :]
    if attention_mask.shape == (batch, seqlen, seqlen):
        return (attention_mask != 0)[:, None]
    raise ValueError(_refusal(attention_mask, batch, seqlen))


def _refusal(mask: Tensor, batch: int, seqlen: int, reason: str = "") -> str:
    return (
        f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)}{reason}; accepted are bool or 0/1 integers "
        f"[{batch}, {seqlen}], and bool or additive floating [{batch}, 1, 1, {seqlen}]"
    )


def first_tokens(hidden_states: Tensor, mask: Tensor | Packing | None) -> Tensor:
    """The row of each sequence's first token, ``[B, hidden]``; zeros for a sequence without any.

    ``hidden_states``: ``[T, hidden]`` with a :class:`Packing`, else ``[B, S, hidden]`` with a prepared mask.
    """
    if isinstance(mask, Packing):
        if hidden_states.shape[0] == 0:
            return hidden_states.new_zeros(mask.batch, hidden_states.shape[-1])
        starts = mask.cu_seqlens[:-1].clamp(max=hidden_states.shape[0] - 1)
        some, rows = mask.cu_seqlens.diff() > 0, hidden_states.index_select(0, starts)
    elif mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        on = mask[:, 0, 0].expand(hidden_states.shape[:2])
        index = torch.arange(on.shape[0], device=on.device)
        some, rows = on.any(1), hidden_states[index, on.int().argmax(1)]
    else:
        return hidden_states[:, 0]
    return torch.where(some[:, None], rows, 0.0)


def _packed(ids: Tensor, packing: Packing) -> Tensor:
    """``[T]`` of ids that are padded, ``[B, S]``, or packed already."""
    if ids.dim() == 1:
        if ids.shape[0] != packing.tokens:
            raise ValueError(f"the ids have shape {tuple(ids.shape)}; their packing holds {packing.tokens} tokens")
        return ids
    return take(ids, packing)


# Embeddings and encoder


class BertEmbeddings(nn.Module):
    """Sum of word, position and token type embeddings, then LayerNorm and dropout.

    ``batch_first=False`` takes ids ``[S, B]`` and returns ``[S, B, hidden]``.
    """

    def __init__(self, config: BertConfig, batch_first: bool = True):
        super().__init__()
        self.config = config
        self.batch_first = batch_first
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.position_embeddings.weight.requires_grad_(config.train_position_embeddings)
        if config.embedding_layer_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """``input_ids``, ``token_type_ids`` (None: zeros): int64 ``[B, S]``, or ``[S, B]``; with a ``packing``
        ``[B, S]`` or ``[T]``, and the result is ``[T, hidden]``. ``position_ids``: ``[B or 1, S]``, or ``[T]``;
        None counts from 0 in the padded batch. ``seed`` of the dropout: None to draw one.
        """
        limit = self.config.max_position_embeddings
        seqlen = input_ids.shape[-1 if self.batch_first else 0] if packing is None else packing.seqlen
        if position_ids is None and seqlen > limit:
            raise ValueError(
                f"input_ids has sequences of {seqlen}; up to max_position_embeddings, {limit}, are accepted"
            )
        rows = None  # each token's place in the padded batch [B, S], where it is not the place in input_ids
        if packing is not None:
            rows = packing.indices
            if position_ids is None:
                position_ids = rows % seqlen
            else:
                if position_ids.dim() == 2 and position_ids.shape[0] == 1:
                    position_ids = position_ids.expand(packing.batch, -1)
                position_ids = _packed(position_ids, packing)
            input_ids = _packed(input_ids, packing)
            token_type_ids = None if token_type_ids is None else _packed(token_type_ids, packing)
        else:
            if position_ids is None:
                position_ids = torch.arange(seqlen, device=input_ids.device)[None]
            if not self.batch_first:
                position_ids = position_ids.t()
                place = torch.arange(input_ids.numel(), device=input_ids.device)
                rows = place.view(input_ids.shape[::-1]).t().flatten()
        if token_type_ids is None:
            token_type_ids = input_ids.new_zeros(())
        word, token_type, position = self.word_embeddings, self.token_type_embeddings, self.position_embeddings
        if not self.config.embedding_layer_norm:
            return word(input_ids) + token_type(token_type_ids) + position(position_ids)
        return ops.embedding_layer_norm(
            input_ids,
            token_type_ids,
            position_ids,
            word.weight,
            token_type.weight,
            position.weight,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            dropout_p=self.config.hidden_dropout_prob if self.training else 0.0,
            eps=self.LayerNorm.eps,
            seed=seed,
            rows=rows,
            padding_idx=self.config.pad_token_id,
        )

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(prefix + "position_ids", None)  # a buffer of older checkpoints, 0, 1, 2, ...
        super()._load_from_state_dict(state_dict, prefix, *args)


class BertSelfAttention(nn.Module):
    """Three projections, computed as one product, and attention."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Packing | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        config = self.config
        weight = torch.cat([self.query.weight, self.key.weight, self.value.weight])
        bias = torch.cat([self.query.bias, self.key.bias, self.value.bias])
        projected = linear(hidden_states, weight, bias)
        projected = projected.unflatten(-1, (3, config.num_attention_heads, config.head_size))
        query, key, value = projected.unbind(-3)
        settings: dict[str, Any] = {}
        if isinstance(attention_mask, Packing):
            settings = {"cu_seqlens": attention_mask.cu_seqlens, "max_seqlen": attention_mask.max_seqlen}
        elif attention_mask is not None:
            mask = prepare_mask(attention_mask, *hidden_states.shape[:2])
            if config.mask_before_scaling and mask.is_floating_point():
                mask = mask / math.sqrt(config.head_size)
            settings = {"mask": mask}
        dropout_p = config.attention_probs_dropout_prob if self.training else 0.0
        context = ops.attention(query, key, value, dropout_p=dropout_p, seed=seed, **settings)
        return context.flatten(-2)


class BertOutput(nn.Module):
    """A product, then dropout, residual and LayerNorm: what ends both halves of a layer."""

    def __init__(self, config: BertConfig, in_features: int, add_norm: bool = True):
        super().__init__()
        self.config = config
        self.add_norm = add_norm
        self.dense = nn.Linear(in_features, config.hidden_size)
        if add_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor, rows: Tensor | None, seed: Tensor | None) -> Tensor:
        if not self.add_norm:
            return linear(x, self.dense.weight, self.dense.bias)
        return ops.add_dropout_layer_norm(
            linear(x, self.dense.weight),
            residual,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            x_bias=self.dense.bias,
            dropout_p=self.config.hidden_dropout_prob if self.training else 0.0,
            eps=self.LayerNorm.eps,
            seed=seed,
            rows=rows,
        )


class BertAttention(nn.Module):
    """The first half of a layer."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config, config.hidden_size)


class DenseActivation(nn.Module):
    """``activation(dense(x))``; GELU adds the product's bias itself."""

    def __init__(self, config: BertConfig, out_features: int):
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dense = nn.Linear(config.hidden_size, out_features)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "relu":
            return F.relu(linear(x, self.dense.weight, self.dense.bias))
        return ops.gelu(linear(x, self.dense.weight), self.dense.bias, approximate=self.activation)


class BertLayer(nn.Module):
    """One encoder layer: attention, then the feed-forward network, each ended by a :class:`BertOutput`."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = DenseActivation(config, config.intermediate_size)
        self.output = BertOutput(config, config.intermediate_size, config.ffn_add_norm)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Packing | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        """``hidden_states``: ``[B, S, hidden]``, or ``[T, hidden]`` with a :class:`Packing`; returns this shape.

        ``attention_mask``: None; bool (True = attend) or 0/1 integers ``[B, S]``; ``[B, 1, 1, S]`` bool, or
        floating, which is added to the scores; or a :class:`Packing`. A floating ``[B, S]`` mask is refused, see
        :func:`prepare_mask`. ``seeds``: int64 ``[3]`` on the device, of the three dropouts; None to draw them.
        """
        rows = attention_mask.indices if isinstance(attention_mask, Packing) else None
        seed = (None, None, None) if seeds is None else seeds.split(1)
        context = self.attention.self(hidden_states, attention_mask, seed[0])
        hidden_states = self.attention.output(context, hidden_states, rows, seed[1])
        return self.output(self.intermediate(hidden_states), hidden_states, rows, seed[2])


class BertEncoder(nn.Module):
    """The layers. With ``gradient_checkpointing`` set, training keeps only what goes into each of them."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.gradient_checkpointing = False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | Packing | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        """As :class:`BertLayer`; ``seeds``: int64 ``[3 * layers]``."""
        if seeds is None and self.training:
            seeds = draw_seeds(self.config, 3 * len(self.layer), hidden_states.device)
        for i, layer in enumerate(self.layer):
            args = (hidden_states, attention_mask, None if seeds is None else seeds[3 * i : 3 * i + 3])
            if self.gradient_checkpointing and self.training:
                # The seeds are arguments: recomputing drops the same elements without the generator's state.
                hidden_states = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden_states = layer(*args)
        return hidden_states


def draw_seeds(config: BertConfig, count: int, device: torch.device) -> Tensor | None:
    """One int64 seed for each place of dropout, drawn at once; None if nothing is ever dropped."""
    if not threshold(max(config.hidden_dropout_prob, config.attention_probs_dropout_prob)):
        return None
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), dtype=torch.int64, device=device)


class BertPooler(nn.Module):
    """``tanh(dense(x))`` of the first tokens' rows ``[B, hidden]``."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.dense.weight, self.dense.bias))


class BertPredictionTransform(DenseActivation):
    def __init__(self, config: BertConfig):
        super().__init__(config, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(super().forward(x))


class BertPredictionHead(nn.Module):
    """Logits over the vocabulary: ``decoder(LayerNorm(activation(dense(x)))) + bias``, ``[..., vocab]``."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.transform = BertPredictionTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.transform(x), self.decoder.weight, self.bias)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # Hugging Face's state_dict() holds the bias twice.
        twin = state_dict.pop(prefix + "decoder.bias", None)
        if twin is not None:
            state_dict.setdefault(prefix + "bias", twin)
        super()._load_from_state_dict(state_dict, prefix, *args)


# Checkpoints

WEIGHTS, TORCH_WEIGHTS, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"
# Parts of a checkpoint that a model without them leaves aside.
HEADS = ("bert.pooler.", "cls.predictions.", "cls.seq_relationship.", "classifier.")
# How the first checkpoints, converted from TensorFlow, name LayerNorm's parameters.
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class BertPreTrainedModel(nn.Module):
    """What the models have in common: initialisation, checkpoints, and how they run."""

    config: BertConfig
    new_heads: tuple[str, ...] = ()  # prefixes that a checkpoint may lack: these parameters start afresh

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike, **changes: Any) -> Self:
        """The model in ``directory``: ``config.json`` and ``model.safetensors`` (or ``pytorch_model.bin``).

        Reads what :meth:`save_pretrained` and Hugging Face's BERT models write. A model without some head leaves
        that head's weights aside, and ``BertModel`` reads the encoder of any of them; the classifier of
        :class:`BertForSequenceClassification` starts afresh where there is none. ``changes``: fields of
        :class:`BertConfig` to replace. Parameters get the dtype of the checkpoint; the model is in eval mode.

        Raises ``ValueError`` naming the missing and the unexpected keys, ``FileNotFoundError``.
        """
        directory = Path(directory)
        config = dataclasses.replace(BertConfig.from_json(directory / CONFIG), **changes)
        state = _read_weights(directory)
        model = cls(config)
        whole = model if hasattr(model, "bert") else nn.ModuleDict({"bert": model})
        names = whole.state_dict()
        absent = tuple(head for head in HEADS if not any(name.startswith(head) for name in names))
        state = {name: tensor for name, tensor in state.items() if not name.startswith(absent)}
        if config.tie_word_embeddings and DECODER in names and WORD_EMBEDDINGS in state:
            state[DECODER] = state[WORD_EMBEDDINGS]
        whole.to(next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None))
        missing, unexpected = whole.load_state_dict(state, strict=False)
        if not any(name.startswith(cls.new_heads) for name in state):
            missing = [name for name in missing if not name.startswith(cls.new_heads)]
        if missing or unexpected:
            raise ValueError(
                f"{directory} does not fit {cls.__name__}: missing are {missing}, unexpected are {unexpected}"
            )
        return model.eval()

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write ``model.safetensors`` and ``config.json`` into ``directory``, as Hugging Face lays them out.

        Tied weights are stored once. Each file is complete or not there: it is written aside, then renamed.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        state = self.state_dict()
        if DECODER in state and self.config.tie_word_embeddings:
            del state[DECODER]
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        settings = {
            **self.config.to_dict(),
            "architectures": [type(self).__name__],
            "model_type": FIXED_KEYS["model_type"],
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        labels = {i: f"LABEL_{i}" for i in range(settings.pop("num_labels"))}
        settings["id2label"] = {str(i): label for i, label in labels.items()}
        settings["label2id"] = {label: i for i, label in labels.items()}
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        _replace(directory / WEIGHTS, lambda path: safetensors.torch.save_file(state, path, metadata={"format": "pt"}))
        _replace(directory / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters."""
        return next(self.parameters()).dtype

    def gradient_checkpointing_enable(self, enable: bool = True) -> None:
        """Keep only each layer's input for backward, and compute the layer again there."""
        getattr(self, "bert", self).encoder.gradient_checkpointing = enable

    def _initialize(self, module: nn.Module) -> None:
        """As BERT: weights from N(0, initializer_range), biases 0, LayerNorm 1 and 0, the padding's row 0."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names of a model with heads."""
    if (directory / WEIGHTS).exists():
        state = safetensors.torch.load_file(directory / WEIGHTS)
    elif (directory / TORCH_WEIGHTS).exists():
        state = torch.load(directory / TORCH_WEIGHTS, map_location="cpu", weights_only=True)
    else:
        raise FileNotFoundError(f"{directory} holds neither {WEIGHTS} nor {TORCH_WEIGHTS}")
    for old, new in OLD_NAMES.items():
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    if not any(name.startswith("bert.") for name in state):  # of a bare BertModel
        state = {"bert." + name: tensor for name, tensor in state.items()}
    return state


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """``write`` a file beside ``path`` and rename it to ``path`` once it is complete."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


# Models


class BertModel(BertPreTrainedModel):
    """Embeddings, encoder and, unless ``add_pooling_layer`` is False, pooler.

    ``unpad``: whether a call with a ``[B, S]`` mask drops the padding first; set it to False to keep it, for
    ``torch.compile(fullgraph=True)`` for instance, which cannot trace sizes that depend on a mask.
    """

    unpad: bool = True

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.apply(self._initialize)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
    ) -> ModelOutput:
        """Arguments as :meth:`encode`. Returns ``last_hidden_state`` ``[B, S, hidden]``, where padding that was
        dropped is zeros, and ``pooler_output`` ``[B, hidden]``, of each sequence's first token that is not padding
        (zeros went in for a sequence without any).
        """
        hidden_states, mask = self.encode(input_ids, attention_mask, token_type_ids, position_ids, packing)
        padded = pad(hidden_states, mask) if isinstance(mask, Packing) else hidden_states
        output = ModelOutput(last_hidden_state=padded)
        if self.pooler is not None:
            output["pooler_output"] = self.pooler(first_tokens(hidden_states, mask))
        return output

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Packing | Tensor | None]:
        """The last layer's hidden states, packed or not, and the packing or the prepared mask.

        ``input_ids``, ``token_type_ids`` (None: zeros), ``position_ids`` (None: 0, 1, 2, ...; ``[1, S]`` too):
        int64 ``[B, S]``. ``attention_mask``: as :class:`BertLayer` takes it; ``[B, S]`` is made into a packing
        if ``unpad`` is set, which reads sizes back from the device. With a ``packing``, made beforehand, there is
        no mask, nothing is read back, and the ids may be packed already, ``[T]``.

        Returns ``[T, hidden]`` and a :class:`Packing`, or ``[B, S, hidden]`` and a mask or None. Dropout falls on
        the same elements either way (within attention: if padding is on the right only, as places there count
        from each sequence's first token). Raises ``TypeError`` or ``ValueError`` naming the argument.
        """
        mask: Packing | Tensor | None = packing
        if attention_mask is not None:
            if packing is not None:
                raise ValueError("attention_mask and packing are both given; one of them is accepted")
            mask = prepare_mask(attention_mask, *input_ids.shape)
            if self.unpad and attention_mask.dim() == 2:
                mask = packing = Packing.from_mask(attention_mask)
        seeds = draw_seeds(self.config, 1 + 3 * len(self.encoder.layer), input_ids.device) if self.training else None
        seed, seeds = (None, None) if seeds is None else (seeds[:1], seeds[1:])
        hidden_states = self.embeddings(input_ids, token_type_ids, position_ids, packing, seed)
        return self.encoder(hidden_states, mask, seeds), mask


class BertWithHeads(BertPreTrainedModel):
    """A :class:`BertModel`, ``bert``, and what reads its hidden states."""

    bert: BertModel

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True):
        super().__init__()
        self.config = config
        self.bert = BertModel(config, add_pooling_layer)

    @property
    def unpad(self) -> bool:
        """That of ``bert``."""
        return self.bert.unpad

    @unpad.setter
    def unpad(self, value: bool) -> None:
        self.bert.unpad = value

    def _add_heads(self, **heads: nn.Module) -> None:
        """Initialise ``heads`` under ``cls``, as Hugging Face names it, and tie the decoder."""
        self.cls = nn.ModuleDict(heads)
        self.cls.apply(self._initialize)
        if self.config.tie_word_embeddings:
            self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def _prediction_logits(self, hidden_states: Tensor, mask: Packing | Tensor | None) -> Tensor:
        """``[B, S, vocab]``, zeros where padding was dropped."""
        logits = self.cls.predictions(hidden_states)
        return pad(logits, mask) if isinstance(mask, Packing) else logits

    def _mlm_loss(
        self,
        hidden_states: Tensor,
        mask: Packing | Tensor | None,
        labels: Tensor,
        masked_positions: Tensor | None,
    ) -> Tensor:
        """Mean cross-entropy over the labelled tokens: logits are made of their rows alone."""
        packing = mask if isinstance(mask, Packing) else None
        if masked_positions is None:
            rows, labels = _labelled_rows(hidden_states, labels, packing)
        else:
            rows, labels = _rows_at(hidden_states, labels, masked_positions, packing)
        head = self.cls.predictions
        return ops.masked_lm_loss(
            head.transform(rows), head.decoder.weight, head.bias, labels, ignore_index=IGNORE_INDEX
        )


class BertForPreTraining(BertWithHeads):
    """BERT with the heads of both pretraining tasks: masked tokens, and whether sentence B follows A."""

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self._add_heads(predictions=BertPredictionHead(config), seq_relationship=nn.Linear(config.hidden_size, 2))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        masked_positions: Tensor | None = None,
    ) -> ModelOutput:
        """The first five arguments as :meth:`BertModel.encode`.

        ``labels``: int64 ``[B, S]`` (or ``[T]`` with packed ids), the token to predict, -100 where there is none
        and on padding. ``masked_positions`` says beforehand where labels are, so that no sizes depend on the data:
        int64 ``[N]``, places in the flattened ``labels``; or ``[B, P]``, positions in each sequence, and then
        ``labels`` is ``[B, P]``, of these alone. A place may occur twice; a spare one has a label of -100.
        ``next_sentence_label``: int64 ``[B]``, 0 = sentence B follows A, 1 = it does not, -100 = neither.

        Returns ``seq_relationship_logits`` ``[B, 2]``; for each kind of labels given, ``mlm_loss``, ``nsp_loss``
        (means over the labelled; 0 if there are none) and their sum ``loss``; without any labels,
        ``prediction_logits`` ``[B, S, vocab]``, zeros where padding was dropped.
        """
        if masked_positions is not None and labels is None:
            raise ValueError("masked_positions is given without labels; labels of its shape are needed")
        hidden_states, mask = self.bert.encode(input_ids, attention_mask, token_type_ids, position_ids, packing)
        relationship = self.cls.seq_relationship(self.bert.pooler(first_tokens(hidden_states, mask)))
        losses = {}
        if labels is not None:
            losses["mlm_loss"] = self._mlm_loss(hidden_states, mask, labels, masked_positions)
        if next_sentence_label is not None:
            losses["nsp_loss"] = mean_cross_entropy(relationship, next_sentence_label)
        output = ModelOutput(seq_relationship_logits=relationship)
        if losses:
            output.update(loss=sum(losses.values()), **losses)
        else:
            output["prediction_logits"] = self._prediction_logits(hidden_states, mask)
        return output


class BertForMaskedLM(BertWithHeads):
    """BERT with the head that predicts masked tokens."""

    def __init__(self, config: BertConfig):
        super().__init__(config, add_pooling_layer=False)
        self._add_heads(predictions=BertPredictionHead(config))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
        labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
    ) -> ModelOutput:
        """As :class:`BertForPreTraining`: ``loss`` with ``labels``, else ``logits`` ``[B, S, vocab]``."""
        hidden_states, mask = self.bert.encode(input_ids, attention_mask, token_type_ids, position_ids, packing)
        if labels is None:
            return ModelOutput(logits=self._prediction_logits(hidden_states, mask))
        return ModelOutput(loss=self._mlm_loss(hidden_states, mask, labels, masked_positions))


class BertForSequenceClassification(BertWithHeads):
    """BERT with a classifier over ``num_labels`` classes on the pooled first token."""

    new_heads = ("classifier.",)

    def __init__(self, config: BertConfig):
        super().__init__(config)
        classifier_dropout = config.classifier_dropout
        if classifier_dropout is None:
            classifier_dropout = config.hidden_dropout_prob
        self.dropout = nn.Dropout(classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.classifier.apply(self._initialize)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
        labels: Tensor | None = None,
    ) -> ModelOutput:
        """``logits`` ``[B, num_labels]``, and ``loss`` with ``labels`` ``[B]``: cross-entropy of int64 classes,
        or the mean squared error if ``num_labels`` is 1.
        """
        hidden_states, mask = self.bert.encode(input_ids, attention_mask, token_type_ids, position_ids, packing)
        logits = self.classifier(self.dropout(self.bert.pooler(first_tokens(hidden_states, mask))))
        output = ModelOutput(logits=logits)
        if labels is not None:
            if self.config.num_labels == 1:
                output["loss"] = F.mse_loss(logits[:, 0], labels.to(logits.dtype))
            else:
                output["loss"] = mean_cross_entropy(logits, labels)
        return output


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Over the rows of ``logits`` ``[N, classes]`` whose label is not -100; 0, not NaN, if there are none."""
    logits = logits.to(accumulation_dtype(logits))
    total = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1)


def _labelled_rows(hidden_states: Tensor, labels: Tensor, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """The hidden states ``[N, hidden]`` of the labelled tokens and their labels ``[N]``."""
    if packing is not None:
        labels = _packed(labels, packing)
    if labels.shape != hidden_states.shape[:-1]:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}; {tuple(hidden_states.shape[:-1])}, that of input_ids, is accepted"
        )
    rows, labels = hidden_states.flatten(0, -2), labels.flatten()
    if torch.compiler.is_compiling():
        return rows, labels  # a tracer knows no sizes that depend on data: the loss leaves out the other rows
    labelled = (labels != IGNORE_INDEX).nonzero().flatten()
    return rows.index_select(0, labelled), labels.index_select(0, labelled)


def _rows_at(
    hidden_states: Tensor, labels: Tensor, positions: Tensor, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    """The hidden states ``[N, hidden]`` at ``positions``, ``[N]`` or ``[B, P]``, and their labels, -100 on padding."""
    tokens = positions.flatten()
    if positions.dim() == 1:
        packed = labels.dim() == 1
        labels = labels.flatten().index_select(0, tokens)
        if packing is None or packed:
            return hidden_states.flatten(0, -2).index_select(0, tokens), labels
    else:
        if labels.shape != positions.shape:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}; that of masked_positions, {tuple(positions.shape)}, is needed"
            )
        seqlen = hidden_states.shape[1] if packing is None else packing.seqlen
        starts = torch.arange(positions.shape[0], device=positions.device)[:, None] * seqlen
        tokens, labels = (starts + positions).flatten(), labels.flatten()
        if packing is None:
            return hidden_states.flatten(0, 1).index_select(0, tokens), labels
    rows = torch.searchsorted(packing.indices, tokens).clamp(max=packing.tokens - 1)
    labels = torch.where(packing.indices[rows] == tokens, labels, IGNORE_INDEX)
    return hidden_states.index_select(0, rows), labels
