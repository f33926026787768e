"""Attention over padded or packed sequences, with masks and dropout: ``softmax(q k^T * scale + mask) v``.

No score, probability or dropout mask of size Sq x Sk is kept: backward recomputes them, tile by tile, from
the saved logarithm of each row's sum. Source: Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import torch
from torch import Tensor

from . import cpu, cuda, triton
from .checks import accumulation_dtype, check_device, check_floating
from .dropout import check_dropout_p, dropout_bits, multiplier, seed_tensor
from .masks import on_and_bias, prepare_lengths, prepare_mask
from .registry import Backend, Operator, constant_when_traced, select


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``dropout(softmax(query @ key^T * scale + mask)) @ value``, per sequence and head.

    Dense: ``query`` ``[B, Sq, H, D]``, ``key`` and ``value`` ``[B, Sk, H, D]``, any strides. Packed:
    ``[T, H, D]`` each, sequence ``b`` in rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``; ``cu_seqlens``
    int32 ``[B + 1]``, ``max_seqlen`` the longest sequence or more, a Python int (optional on the CPU).

    ``mask`` (dense only), broadcastable to ``[B, H, Sq, Sk]``: bool, True = attend; or floating, added to the
    scaled scores, -inf = off. A floating mask of zeros and ones is *added* like any other: for a 0/1 mask
    pass ``mask.bool()``. ``lengths`` (dense only), integers ``[B]`` or ``[B, Sq]``: keys at or past it are
    off. Both may be given: a key must be on in both. ``scale``: default ``1 / sqrt(D)``. ``dropout_p`` and
    ``seed`` (int, one-element int64 tensor on the device, or None to draw one): see
    :func:`fastbert.ops.dropout_bits`; the same elements fall in dense and packed layout.

    Returns the shape and dtype of ``query``; sums are kept in float32 (float64 for float64). Under autocast
    the three inputs are cast to its dtype first.

    A row with no key on gives zeros and zero gradients. The reference BERTs, which add a large negative
    number to masked scores, average *all* values in such a row instead. A NaN or Inf in a key or value that
    is off reaches nothing; a large finite floating mask is plain arithmetic.

    Raises ``TypeError`` or ``ValueError`` for arguments that do not fit together, ``NotImplementedError`` if
    the backend asked for cannot serve the call.
    """
    query, key, value = _autocast(query, key, value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_floating(name, tensor)
        check_device(name, tensor, query)
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {query.dtype}, the dtype of query")
    check_dropout_p(dropout_p)
    if cu_seqlens is None:
        _check_dense(query, key, value)
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen is {max_seqlen}, without cu_seqlens; it belongs to packed sequences")
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        mask = prepare_mask(mask, shape, query)
        lengths = prepare_lengths(lengths, shape, query)
        longest = 0
    else:
        _check_packed(query, key, value)
        if mask is not None or lengths is not None:
            name = "lengths" if mask is None else "mask"
            raise ValueError(f"{name} is given with cu_seqlens; packed sequences take neither mask nor lengths")
        longest = _check_packing(cu_seqlens, max_seqlen, query)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    seed = seed_tensor(seed, query.device) if dropout_p > 0 else None
    args = (query, key, value, mask, lengths, cu_seqlens, longest, scale, float(dropout_p), seed)
    return select("attention", BACKENDS, backend, args).call(*args)


def _in_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast treats scaled_dot_product_attention: everything but float64 in its dtype."""
    if not isinstance(tensors[0], Tensor) or not _in_autocast(tensors[0].device.type):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in narrow else t for t in tensors)


def _check_dense(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dim() != 4 or query.shape[-1] == 0:
        raise ValueError(
            f"query has shape {tuple(query.shape)}; [B, Sq, H, D] is accepted, or [T, H, D] with cu_seqlens"
        )
    batch, _, heads, head_size = query.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 4 or tensor.shape[0] != batch or tensor.shape[2:] != query.shape[2:]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; query {tuple(query.shape)} needs "
                f"[{batch}, Sk, {heads}, {head_size}]"
            )
    if value.shape[1] != key.shape[1]:
        raise ValueError(f"value has shape {tuple(value.shape)}; it must be that of key, {tuple(key.shape)}")


def _check_packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dim() != 3 or query.shape[-1] == 0:
        raise ValueError(f"query has shape {tuple(query.shape)}; with cu_seqlens [T, H, D] is accepted")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != query.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with cu_seqlens it must be that of query, "
                f"{tuple(query.shape)}"
            )


def _check_packing(cu_seqlens: Tensor, max_seqlen: int | None, query: Tensor) -> int:
    """Check ``cu_seqlens`` (contents too where that costs no synchronisation); returns ``max_seqlen``."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        what = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else f"a {type(cu_seqlens).__name__}"
        raise TypeError(f"cu_seqlens is {what}; an int32 tensor is accepted")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; [B + 1] is accepted")
    check_device("cu_seqlens", cu_seqlens, query)
    if isinstance(max_seqlen, Tensor):
        raise TypeError(
            "max_seqlen is a tensor; a Python int is accepted (reading a tensor would synchronise with the "
            "device in every layer)"
        )
    if max_seqlen is not None and (not isinstance(max_seqlen, int | torch.SymInt) or isinstance(max_seqlen, bool)):
        raise TypeError(f"max_seqlen is {max_seqlen!r}; a Python int is accepted")
    if query.device.type != "cpu":
        if max_seqlen is None:
            raise ValueError(
                f"max_seqlen is None; on {query.device.type} it must be given (finding it would synchronise)"
            )
        return max_seqlen
    tokens = query.shape[0]
    if torch.compiler.is_compiling():
        return tokens if max_seqlen is None else max_seqlen
    starts = cu_seqlens.tolist()
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] != tokens or min(sizes, default=0) < 0:
        raise ValueError(
            f"cu_seqlens is {_abbreviated(starts)}; it must start at 0, not decrease, and end at {tokens}, "
            "the number of tokens"
        )
    longest = max(sizes, default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise ValueError(f"max_seqlen is {max_seqlen}; the longest sequence of cu_seqlens has {longest} tokens")
    return longest


def _abbreviated(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{str(numbers[:4])[1:-1]}, ..., {numbers[-1]}]"


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """Plain PyTorch; what every backend is checked against."""
    device_type = query.device.type
    with torch.autocast(device_type, enabled=False) if _in_autocast(device_type) else nullcontext():
        if cu_seqlens is None:
            return _dense_reference(query, key, value, mask, lengths, scale, dropout_p, seed)
        # To [B, max_seqlen] and back. Padding is row T, a row of zeros.
        tokens = query.shape[0]
        sizes = cu_seqlens.diff()
        position = torch.arange(max_seqlen, device=query.device)
        rows = torch.where(position < sizes[:, None], cu_seqlens[:-1, None] + position, tokens)
        rows = rows.flatten().to(torch.int64)

        def padded(x: Tensor) -> Tensor:
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
            return x.index_select(0, rows).unflatten(0, (sizes.shape[0], max_seqlen))

        out = _dense_reference(padded(query), padded(key), padded(value), None, sizes, scale, dropout_p, seed).flatten(
            0, 1
        )
        return out.new_zeros(tokens + 1, *out.shape[1:]).index_copy(0, rows, out)[:tokens]


def _dense_reference(query, key, value, mask, lengths, scale, dropout_p, seed):
    dtype = accumulation_dtype(query)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (query, key, value))  # [B, H, S, D]
    on, bias = on_and_bias(mask, lengths, k.shape[2])
    per_query = on is not None and on.shape[2] != 1
    # A key that is off for every query is replaced by zeros. Where that depends on the query, non-finite
    # elements are, and NaN is put back into the results of the queries that see them.
    k_bad = v_bad = None
    if per_query:
        k_bad, v_bad = ~k.isfinite().all(-1), ~v.isfinite()
        k, v = torch.where(k.isfinite(), k, 0.0), torch.where(v_bad, 0.0, v)
    elif on is not None:
        k, v = (torch.where(on.transpose(2, 3), x, 0.0) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias
    if per_query:
        scores = torch.where(on & k_bad[:, :, None], math.nan, scores)
    if on is not None:
        # A row without any key on: equal finite scores, whose probabilities are then set to zero.
        off = torch.where(on.any(-1, keepdim=True), -math.inf, 0.0).to(dtype)
        scores = torch.where(on, scores, off)
    probabilities = scores.softmax(-1)
    if on is not None:
        probabilities = torch.where(on, probabilities, 0.0)
    if dropout_p > 0:
        batch, heads, seqlen = q.shape[:3]
        row_hi = torch.arange(batch * heads, device=q.device).view(batch, heads, 1)
        bits = dropout_bits(seed, row_hi, torch.arange(seqlen, device=q.device), k.shape[2])
        probabilities = probabilities * multiplier(bits, dropout_p, dtype)
    out = probabilities @ v
    if per_query:
        out = torch.where(on.to(dtype) @ v_bad.to(dtype) > 0, math.nan, out)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _fake_forward(query, key, value, mask, lengths, cu_seqlens, max_seqlen, scale, dropout_p, seed):
    if cu_seqlens is None:
        batch, seqlen, heads, _ = query.shape
        lse_shape = (batch, heads, seqlen)
    else:
        tokens, heads, _ = query.shape
        lse_shape = (heads, tokens)
    return query.new_empty(query.shape), query.new_empty(lse_shape, dtype=accumulation_dtype(query))


def _fake_backward(grad, query, key, value, *rest):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _setup_context(ctx, inputs, output):
    query, key, value, mask, lengths, cu_seqlens, ctx.max_seqlen, ctx.scale, ctx.dropout_p, seed = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, out, lse, mask, lengths, cu_seqlens, seed)


def _gradients(ctx, backward_op, grad, _):
    *inputs, seed = ctx.saved_tensors
    if grad is None:
        return (None,) * 10
    grads = backward_op(grad, *inputs, ctx.max_seqlen, ctx.scale, ctx.dropout_p, seed)
    return (*grads, *(None,) * 7)


_ARGUMENTS = (
    "Tensor? mask, Tensor? lengths, Tensor? cu_seqlens, SymInt max_seqlen, float scale, float dropout_p, Tensor? seed"
)
OPERATOR = Operator(
    name="attention",
    # Returns out, and lse in the accumulation dtype: log(sum(exp(scores))) of each row, [B, H, Sq] or [H, T];
    # +inf for a row with no key on, so that exp(score - lse) is 0 there. It is not differentiable.
    forward=f"(Tensor query, Tensor key, Tensor value, {_ARGUMENTS}) -> (Tensor, Tensor)",
    backward="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    gradients=_gradients,
)


def native(backend: str):
    """The differentiable call of a backend's kernels."""
    return _without_lse(OPERATOR.register(backend))


def _without_lse(call):
    return lambda *args: call(*args)[0]


def mask_needs_grad(mask: Tensor | None) -> str | None:
    """No kernel differentiates the mask; eager does."""
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "mask requires a gradient; only eager computes it"
    return None


def _cpu_why_not(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest) -> str | None:
    if query.shape[-1] > 256:
        return f"a head has {query.shape[-1]} elements; up to 256 are supported"
    return mask_needs_grad(mask) or cpu.why_not(query)


def _triton_why_not(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest) -> str | None:
    if query.shape[-1] > 256:
        return f"a head has {query.shape[-1]} elements; up to 256 are supported"
    return mask_needs_grad(mask) or triton.why_not(query)


CUDA_HEAD_SIZES = (32, 64, 128)


def cuda_unsupported(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest) -> str | None:
    """What the CUDA kernels do not take, on whatever device, or None."""
    if query.shape[-1] not in CUDA_HEAD_SIZES:
        return f"a head has {query.shape[-1]} elements; {', '.join(map(str, CUDA_HEAD_SIZES))} are supported"
    return mask_needs_grad(mask) or cuda.unsupported(query)


def _cuda_why_not(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest) -> str | None:
    return cuda_unsupported(query, key, value, mask) or cuda.why_not(query) or _before_sm_80(query)


def _before_sm_80(query: Tensor) -> str | None:
    """Older tensor cores multiply no bfloat16, and older multiprocessors have 64 KiB of shared memory."""
    if (query.dtype == torch.bfloat16 or query.shape[-1] == 128) and _compute_capability(query.get_device()) < (8, 0):
        return f"{query.dtype} heads of {query.shape[-1]} elements need compute capability 8.0"
    return None


@constant_when_traced
def _compute_capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


BACKENDS = (
    Backend("cpu", native("cpu"), _cpu_why_not, cpu.unavailable),
    Backend("triton", _without_lse(triton.register(OPERATOR)), _triton_why_not, triton.unavailable),
    Backend("cuda", native("cuda"), _cuda_why_not, cuda.unavailable),
    Backend("eager", reference, lambda *args: None),
)
