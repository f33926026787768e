"""``LayerNorm(residual + dropout(x + x_bias))``: what follows both products of a BERT layer, in one pass.

Source: Ba, Kiros and Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450, placed after the residual
as in BERT, https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu, cuda, triton
from .checks import accumulation_dtype, check_device, check_floating, check_vector
from .dropout import check_dropout_p, dropout_bits, multiplier, seed_tensor, threshold
from .registry import Backend, Operator, select


def add_dropout_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    seed: int | Tensor | None = None,
    rows: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``LayerNorm(residual + dropout(x + x_bias))`` over the last dimension, biased variance.

    ``x``, ``residual``: ``[..., N]``, one shape; any of the four floating dtypes each. ``weight``, ``bias``,
    ``x_bias``: ``[N]``, any floating dtype. Sums and statistics are in float32 (float64 if x or residual is).
    Returns the shape of ``x`` in the dtype that ``x + residual`` has (under autocast on a GPU: float32, as
    ``torch.nn.functional.layer_norm``).

    Dropout, with probability ``dropout_p``: an element's fate depends on ``seed`` (None: drawn from the default
    generator) and its place alone (:func:`fastbert.ops.dropout_bits`). A row's place is its number, or
    ``rows[i]``: int64, one for each row, the token's index in the padded batch, so that packed and padded runs
    drop the same elements.

    Raises ``TypeError`` or ``ValueError`` naming the argument; ``NotImplementedError`` if the backend asked for
    cannot serve the call.
    """
    check_floating("x", x)
    check_floating("residual", residual)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; [..., N] with N > 0 is needed")
    if x.shape != residual.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}; x has {tuple(x.shape)}, they must agree")
    check_device("residual", residual, x)
    for name, vector in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if vector is None and name != "x_bias":
            raise TypeError(f"{name} is None; a tensor is accepted")
        check_vector(name, vector, x.shape[-1], x)
    check_dropout_p(dropout_p)
    if rows is not None:
        if rows.dtype != torch.int64 or rows.shape != (x.numel() // x.shape[-1],):
            raise ValueError(
                f"rows is {rows.dtype} of shape {tuple(rows.shape)}; int64 of ({x.numel() // x.shape[-1]},), one "
                "for each row of x, is accepted"
            )
        check_device("rows", rows, x)
        rows = rows.contiguous()
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        residual = residual.float()
    seed = seed_tensor(seed, x.device) if threshold(dropout_p) else None
    args = (x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps)
    return select("add_dropout_layer_norm", BACKENDS, backend, args).call(*args)


def reference(x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps):
    """Plain PyTorch; what every backend is checked against."""
    dtype = accumulation_dtype(x, residual)
    y = x.to(dtype)
    if x_bias is not None:
        y = y + x_bias.to(dtype)
    if threshold(dropout_p):
        kept = row_multiplier(y, seed, rows, dropout_p)
        y = torch.where(kept == 0, 0, y * kept)
    y = residual.to(dtype) + y
    y = F.layer_norm(y, y.shape[-1:], weight.to(dtype), bias.to(dtype), eps)
    return y.to(torch.promote_types(x.dtype, residual.dtype))


def row_multiplier(like: Tensor, seed: Tensor, rows: Tensor | None, dropout_p: float) -> Tensor:
    """Hidden dropout's multipliers for ``like`` ``[..., N]``: row i is token ``rows[i]``, or i, of the padded batch."""
    count, columns = like.numel() // like.shape[-1], like.shape[-1]
    if rows is None:
        rows = torch.arange(count, device=like.device)
    bits = dropout_bits(seed, rows >> 32, rows, columns)
    return multiplier(bits, dropout_p, like.dtype).view(like.shape)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.dropout_p, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, backward_op, grad):
    x, residual, weight, bias, x_bias, seed, rows = ctx.saved_tensors
    dx, dresidual, dweight, dbias, dx_bias = backward_op(
        grad, x, residual, weight, bias, x_bias, seed, rows, ctx.dropout_p, ctx.eps
    )
    if _gradients_equal(x, residual, ctx.dropout_p):
        dx = dresidual
    return (
        dx,
        dresidual,
        dweight.to(weight.dtype),
        dbias.to(bias.dtype),
        None if x_bias is None else dx_bias.to(x_bias.dtype),
        None,
        None,
        None,
        None,
    )


def _gradients_equal(x: Tensor, residual: Tensor, dropout_p: float) -> bool:
    return not threshold(dropout_p) and x.dtype == residual.dtype


def _fake_forward(x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _fake_backward(grad, x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps):
    sums = [x.new_empty(x.shape[-1], dtype=accumulation_dtype(x, residual)) for _ in range(3)]
    dx = x.new_empty(0) if _gradients_equal(x, residual, dropout_p) else x.new_empty(x.shape)
    return dx, residual.new_empty(residual.shape), *sums


_INPUTS = (
    "Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? x_bias, Tensor? seed, Tensor? rows, "
    "float dropout_p, float eps"
)

OPERATOR = Operator(
    name="add_dropout_layer_norm",
    forward=f"({_INPUTS}) -> Tensor",
    # dx (empty where it equals dresidual), dresidual, and in the accumulation type dweight, dbias, dx_bias
    backward=f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    gradients=_gradients,
)


def _cpu_why_not(x, *others) -> str | None:
    return cpu.why_not(x)


def _triton_why_not(x, residual, weight, bias, x_bias, *others) -> str | None:
    return triton.why_not(x, residual, weight, bias, x_bias)


def _cuda_why_not(x, residual, weight, bias, x_bias, *others) -> str | None:
    return cuda.why_not(x, residual, weight, bias, x_bias)


BACKENDS = (
    Backend("cpu", OPERATOR.register("cpu"), _cpu_why_not, cpu.unavailable),
    Backend("triton", triton.register(OPERATOR), _triton_why_not, triton.unavailable),
    Backend("cuda", OPERATOR.register("cuda"), _cuda_why_not, cuda.unavailable),
    Backend("eager", reference, lambda *args: None),
)
