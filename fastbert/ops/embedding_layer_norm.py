"""``dropout(LayerNorm(word[ids] + token_type[types] + position[positions]))``: BERT's embeddings in one pass.

Source: Devlin et al., "BERT", section 3 and figure 2, https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu, cuda, triton
from .add_dropout_layer_norm import row_multiplier
from .checks import accumulation_dtype, check_device, check_floating, check_vector
from .dropout import check_dropout_p, seed_tensor, threshold
from .registry import Backend, Operator, select

NO_PADDING = -1  # what the kernels are told where no id is padding
TRITON_COLUMNS = 4096  # a row is held in the registers of one program


def embedding_layer_norm(
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    token_type: Tensor,
    position: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    seed: int | Tensor | None = None,
    rows: Tensor | None = None,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """``dropout(LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids]))``.

    ``input_ids``: int64, any shape; ``token_type_ids``, ``position_ids``: int64, broadcast to it. ``word``
    ``[V, N]``, ``token_type`` ``[types, N]``, ``position`` ``[positions, N]``: the tables, one floating dtype.
    ``weight``, ``bias``: ``[N]``, any floating dtype. Computed in float32 (float64 for float64); returns
    ``[*input_ids.shape, N]`` in the dtype of the tables (under autocast on a GPU: float32). The gradients of the tables
    are dense and deterministic. ``padding_idx``: the row of ``word`` that gets no gradient, as in
    :class:`torch.nn.Embedding`. ``dropout_p``, ``seed``, ``rows``: as
    :func:`fastbert.ops.add_dropout_layer_norm` has them.

    Raises ``TypeError`` or ``ValueError`` naming the argument, on the CPU also for an id outside its table (on a GPU,
    where looking would synchronise, such an id reads zeros and gets no gradient); ``NotImplementedError`` if the
    backend asked for cannot serve the call.
    """
    for name, table in (("word", word), ("token_type", token_type), ("position", position)):
        check_floating(name, table)
        if table.dim() != 2 or table.shape[-1] == 0 or table.shape[1] != word.shape[-1]:
            raise ValueError(f"{name} has shape {tuple(table.shape)}; [ids, {word.shape[-1]}] is accepted")
        if table.dtype != word.dtype:
            raise TypeError(f"{name} is {table.dtype}; it must be {word.dtype}, the dtype of word")
        check_device(name, table, word)
    check_vector("weight", weight, word.shape[1], word)
    check_vector("bias", bias, word.shape[1], word)
    ids = []
    for name, index, table in (
        ("input_ids", input_ids, word),
        ("token_type_ids", token_type_ids, token_type),
        ("position_ids", position_ids, position),
    ):
        _check_ids(name, index, table)
        try:
            ids.append(index.expand(input_ids.shape))
        except RuntimeError:
            raise ValueError(
                f"{name} has shape {tuple(index.shape)}; it must broadcast to that of input_ids, "
                f"{tuple(input_ids.shape)}"
            ) from None
    check_dropout_p(dropout_p)
    if padding_idx is not None and not 0 <= padding_idx < word.shape[0]:
        raise ValueError(f"padding_idx is {padding_idx}; word has rows 0 to {word.shape[0] - 1}")
    if rows is not None:
        if rows.dtype != torch.int64 or rows.shape != (input_ids.numel(),):
            raise ValueError(
                f"rows is {rows.dtype} of shape {tuple(rows.shape)}; int64 of ({input_ids.numel()},), one for each "
                "token, is accepted"
            )
        check_device("rows", rows, word)
        rows = rows.contiguous()
    seed = seed_tensor(seed, word.device) if threshold(dropout_p) else None
    padding = NO_PADDING if padding_idx is None else padding_idx
    args = (*ids, word, token_type, position, weight, bias, seed, rows, dropout_p, eps, padding)
    y = select("embedding_layer_norm", BACKENDS, backend, args).call(*args)
    return y.float() if word.is_cuda and torch.is_autocast_enabled("cuda") else y


def _check_ids(name: str, ids: Tensor, table: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        what = ids.dtype if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise TypeError(f"{name} is {what}; an int64 tensor is accepted")
    check_device(name, ids, table)
    # On a GPU this would synchronise.
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= table.shape[0]:
            bad = low if low < 0 else high
            raise ValueError(f"{name} holds {bad}; its table has rows 0 to {table.shape[0] - 1}")


def reference(
    input_ids,
    token_type_ids,
    position_ids,
    word,
    token_type,
    position,
    weight,
    bias,
    seed,
    rows,
    dropout_p,
    eps,
    padding,
):
    """Plain PyTorch; what every backend is checked against."""
    dtype = accumulation_dtype(word)
    padding = None if padding == NO_PADDING else padding
    y = F.embedding(input_ids, word.to(dtype), padding_idx=padding)
    y = y + F.embedding(token_type_ids, token_type.to(dtype)) + F.embedding(position_ids, position.to(dtype))
    y = F.layer_norm(y, y.shape[-1:], weight.to(dtype), bias.to(dtype), eps)
    if threshold(dropout_p):
        kept = row_multiplier(y, seed, rows, dropout_p)
        y = torch.where(kept == 0, 0, y * kept)
    return y.to(word.dtype)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.dropout_p, ctx.eps, ctx.padding = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, backward_op, grad):
    tensors = ctx.saved_tensors
    found = backward_op(grad, *tensors, ctx.dropout_p, ctx.eps, ctx.padding)
    parameters = tensors[3:8]
    return (*(None,) * 3, *(g.to(p.dtype) for g, p in zip(found, parameters, strict=True)), *(None,) * 5)


def _fake_forward(input_ids, token_type_ids, position_ids, word, *rest):
    return word.new_empty(*input_ids.shape, word.shape[1])


def _fake_backward(grad, input_ids, token_type_ids, position_ids, *tensors_and_rest):
    parameters = tensors_and_rest[:5]
    dtype = accumulation_dtype(parameters[0])
    return tuple(p.new_empty(p.shape, dtype=dtype) for p in parameters)


_INPUTS = (
    "Tensor input_ids, Tensor token_type_ids, Tensor position_ids, Tensor word, Tensor token_type, Tensor position, "
    "Tensor weight, Tensor bias, Tensor? seed, Tensor? rows, float dropout_p, float eps, int padding_idx"
)

OPERATOR = Operator(
    name="embedding_layer_norm",
    forward=f"({_INPUTS}) -> Tensor",
    # gradients of word, token_type, position, weight and bias, in the accumulation type
    backward=f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    gradients=_gradients,
)


def _cpu_why_not(input_ids, token_type_ids, position_ids, word, *rest) -> str | None:
    return cpu.why_not(word)


def _triton_why_not(input_ids, token_type_ids, position_ids, word, token_type, position, weight, bias, *rest):
    if word.shape[1] > TRITON_COLUMNS:
        return f"the tables have {word.shape[1]} columns; up to {TRITON_COLUMNS} are supported"
    return triton.why_not(word, token_type, position, weight, bias)


def _cuda_why_not(input_ids, token_type_ids, position_ids, word, token_type, position, weight, bias, *rest):
    return cuda.why_not(word, token_type, position, weight, bias)


BACKENDS = (
    Backend("cpu", OPERATOR.register("cpu"), _cpu_why_not, cpu.unavailable),
    Backend("triton", triton.register(OPERATOR), _triton_why_not, triton.unavailable),
    Backend("cuda", OPERATOR.register("cuda"), _cuda_why_not, cuda.unavailable),
    Backend("eager", reference, lambda *args: None),
)
