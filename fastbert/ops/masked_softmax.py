"""``dropout(softmax(scale * scores + mask))``: the softmax of attention, for those who keep their own products.

Source: Vaswani et al., "Attention Is All You Need", section 3.2.1, https://arxiv.org/abs/1706.03762.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import cpu, cuda, triton
from .checks import accumulation_dtype, check_floating
from .dropout import check_dropout_p, dropout_bits, multiplier, seed_tensor, threshold
from .masks import on_and_bias, prepare_lengths, prepare_mask
from .registry import Backend, Operator, select


def masked_softmax(
    scores: Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``dropout(softmax(scale * scores + mask))`` over the last dimension.

    ``scores``: ``[B, H, Sq, Sk]`` or ``[B, Sq, Sk]`` (one head), any of the four floating dtypes. ``mask``,
    ``lengths``, ``dropout_p``, ``seed``: as :func:`fastbert.ops.attention` has them; a mask is broadcast to the
    shape of scores. Computed in float32 (float64 for float64); returns the shape and dtype of ``scores`` (under
    autocast on a GPU: float32, as ``torch.softmax``).

    A row with no key on gives zeros and zero gradients, never NaN; the reference BERTs average such a row
    uniformly. A score of -inf is off as well. What scores hold where they are off reaches nothing.

    Raises ``TypeError`` or ``ValueError`` naming the argument; ``NotImplementedError`` if the backend asked for
    cannot serve the call.
    """
    check_floating("scores", scores)
    if scores.dim() not in (3, 4):
        raise ValueError(f"scores has shape {tuple(scores.shape)}; [B, H, Sq, Sk] or [B, Sq, Sk] is accepted")
    check_dropout_p(dropout_p)
    if scores.is_cuda and torch.is_autocast_enabled("cuda"):
        scores = scores.float()
    four = scores if scores.dim() == 4 else scores.unsqueeze(1)
    if isinstance(mask, Tensor) and scores.dim() == 3 and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    mask = prepare_mask(mask, tuple(four.shape), scores)
    lengths = prepare_lengths(lengths, tuple(four.shape), scores)
    seed = seed_tensor(seed, scores.device) if threshold(dropout_p) else None
    args = (four, mask, lengths, scale, dropout_p, seed)
    return select("masked_softmax", BACKENDS, backend, args).call(*args).view(scores.shape)


def reference(scores, mask, lengths, scale, dropout_p, seed):
    """Plain PyTorch; what every backend is checked against."""
    s = scores.to(accumulation_dtype(scores)) * scale
    on, bias = on_and_bias(mask, lengths, scores.shape[-1])
    if bias is not None:
        s = s + bias
    on = s != -math.inf if on is None else on & (s != -math.inf)
    # A row without any key on: equal finite scores, whose probabilities are then set to zero.
    s = torch.where(on, s, torch.where(on.any(-1, keepdim=True), -math.inf, 0.0).to(s.dtype))
    p = torch.where(on, s.softmax(-1), 0.0)
    if threshold(dropout_p):
        batch, heads, queries, keys = scores.shape
        row_hi = torch.arange(batch * heads, device=scores.device).view(batch, heads, 1)
        row_lo = torch.arange(queries, device=scores.device)
        p = p * multiplier(dropout_bits(seed, row_hi, row_lo, keys), dropout_p, p.dtype)
    # The gradient of what is off counts for nothing, whatever it is.
    return torch.where(on, p, 0.0).to(scores.dtype)


def _setup_context(ctx, inputs, output):
    scores, mask, lengths, ctx.scale, ctx.dropout_p, seed = inputs
    ctx.save_for_backward(scores, mask, lengths, seed)


def _gradients(ctx, backward_op, grad):
    scores, mask, lengths, seed = ctx.saved_tensors
    return backward_op(grad, scores, mask, lengths, ctx.scale, ctx.dropout_p, seed), *(None,) * 5


# mask: expanded to the shape of scores, bool or the accumulation dtype; lengths: int32 [B] or [B, Sq]
_INPUTS = "Tensor scores, Tensor? mask, Tensor? lengths, float scale, float dropout_p, Tensor? seed"

OPERATOR = Operator(
    name="masked_softmax",
    forward=f"({_INPUTS}) -> Tensor",
    backward=f"(Tensor grad, {_INPUTS}) -> Tensor",
    fake_forward=lambda scores, *rest: scores.new_empty(scores.shape),
    fake_backward=lambda grad, scores, *rest: scores.new_empty(scores.shape),
    setup_context=_setup_context,
    gradients=_gradients,
)


def _mask_needs_grad(mask: Tensor | None) -> str | None:
    needs = mask is not None and mask.requires_grad
    return "mask requires a gradient; only eager computes it" if needs else None


def _cpu_why_not(scores, mask, *rest) -> str | None:
    return _mask_needs_grad(mask) or cpu.why_not(scores)


def _triton_why_not(scores, mask, *rest) -> str | None:
    return _mask_needs_grad(mask) or triton.why_not(scores)


def _cuda_why_not(scores, mask, *rest) -> str | None:
    return _mask_needs_grad(mask) or cuda.why_not(scores)


BACKENDS = (
    Backend("cpu", OPERATOR.register("cpu"), _cpu_why_not, cpu.unavailable),
    Backend("triton", triton.register(OPERATOR), _triton_why_not, triton.unavailable),
    Backend("cuda", OPERATOR.register("cuda"), _cuda_why_not, cuda.unavailable),
    Backend("eager", reference, lambda *args: None),
)
