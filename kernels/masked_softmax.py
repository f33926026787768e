"""dropout(softmax(scale * scores + mask)) and its backward.

Memory-bound. Forward reads scores and writes the output once; backward reads scores and grad, recomputes the
probabilities, and writes the gradient once: the least possible, given that nothing but the inputs is kept. ``lengths``
costs no mask tensor, and what lies past a length is not read; a mask is read through its strides, so that what is
broadcast comes from a cache. A row of up to 8,192 keys is held in registers, short ones by a single warp, several of
one head at a time; a longer row is read in chunks, twice forward and three times backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import StaticCase
from .dropout import OPERATIONS_PER_PAIR, keep_tile, row_keys, seed_key, threshold_and_scale
from .launch import OPTIONS, Config, cdiv, choose, rows_of

if TYPE_CHECKING:
    from .tune import Tunable

# Queries of one head per program, by keys.
FORWARD = BACKWARD = (
    Config(16, 64, 1),
    Config(8, 128, 1),
    Config(4, 256, 1),
    Config(2, 512, 1),
    Config(1, 1024, 1),
    Config(1, 2048, 2),
    Config(1, 4096, 4),
    Config(1, 8192, 8),
)
# Rows longer than the tables' last entry, in chunks.
LONG = Config(1, 4096, 8)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(lengths_ptr, heads, queries, keys, LENGTHS: tl.constexpr, ROWS: tl.constexpr):
    """What this program has: batch * H + head, queries [ROWS, 1], and how many keys each of them has."""
    blocks = tl.cdiv(queries, ROWS)
    group = tl.program_id(0) // blocks
    query = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    length = tl.where(query < queries, keys, 0)
    if LENGTHS == 1:
        length = tl.minimum(length, tl.load(lengths_ptr + group // heads))
    if LENGTHS == 2:
        at = (group // heads).to(tl.int64) * queries + query
        length = tl.minimum(length, tl.load(lengths_ptr + at, mask=query < queries, other=0))
    return group, query, length


@triton.jit
def _mask_offset(group, query, heads, mask_batch, mask_head, mask_query):
    """Where the mask's rows start."""
    at = (group // heads).to(tl.int64) * mask_batch + (group % heads).to(tl.int64) * mask_head
    return at + query.to(tl.int64) * mask_query


@triton.jit
def _whole_vectors(length):
    """``length``, rounded up to where the vectors of a load end: they are then loaded whole or not at all."""
    return (length + 15) // 16 * 16


@triton.jit
def _scores(scores_ptr, mask_ptr, mask_key, key, keys, length, scale):
    """scale * scores + mask of some keys in float32, -inf where off; the pointers are those of the rows.

    Without an additive mask, times log2(e).
    """
    loaded = (key < _whole_vectors(length)) & (key < keys)
    on = key < length
    additive: tl.constexpr = mask_ptr is not None and mask_ptr.dtype.element_ty == tl.float32
    s = tl.load(scores_ptr + key, mask=loaded, other=0.0).to(tl.float32) * (scale if additive else scale * _LOG2_E)
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + key.to(tl.int64) * mask_key, mask=loaded, other=0)
        if additive:
            s += mask
            on &= mask != float("-inf")
        else:
            on &= mask != 0
    return tl.where(on, s, float("-inf"))


@triton.jit
def _exponentials(s, most, mask_ptr):
    """exp of what :func:`_scores` gave, less ``most``, the largest of a row; 0 where -inf.

    A large finite mask times log2(e) may overflow; the difference to the largest may not matter if it does.
    """
    s -= tl.where(most == float("-inf"), 0.0, most)
    if mask_ptr is not None and mask_ptr.dtype.element_ty == tl.float32:
        s *= _LOG2_E
    return tl.exp2(s)


@triton.jit
def _inverse(total):
    """1 / total, 0 for a row with no key on."""
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit(do_not_specialize=["heads", "queries", "threshold"])
def forward_kernel(
    scores_ptr,  # [batch * heads * queries, keys], rows scores_stride apart
    mask_ptr,  # [batch, heads, queries, keys] of any strides, bool or float32; None
    lengths_ptr,  # int32 [batch] (LENGTHS 1) or [batch, queries] (LENGTHS 2); None (0)
    seed_ptr,  # [1] int64; None without dropout
    out_ptr,  # [batch, heads, queries, keys] contiguous
    scores_stride,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    heads,
    queries,
    keys,
    scale,
    threshold,
    keep_scale,
    LENGTHS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS queries of one head, each row whole."""
    group, query, length = _place(lengths_ptr, heads, queries, keys, LENGTHS, ROWS)
    key = tl.arange(0, COLUMNS)[None, :]
    row = group.to(tl.int64) * queries + query
    if mask_ptr is not None:
        mask_ptr += _mask_offset(group, query, heads, mask_batch, mask_head, mask_query)
    s = _scores(scores_ptr + row * scores_stride, mask_ptr, mask_key, key, keys, length, scale)
    e = _exponentials(s, tl.max(s, axis=1, keep_dims=True), mask_ptr)
    inverse = _inverse(tl.sum(e, axis=1, keep_dims=True))
    if seed_ptr is not None:
        k0, k1 = row_keys(seed_key(seed_ptr), group, query)
        inverse = tl.where(keep_tile(k0, k1, 0, COLUMNS, threshold), inverse * keep_scale, 0.0)
    p = e * inverse
    tl.store(out_ptr + row * keys + key, p.to(out_ptr.dtype.element_ty), mask=(query < queries) & (key < keys))


@triton.jit(do_not_specialize=["heads", "queries", "threshold"])
def backward_kernel(
    grad_ptr,  # [batch * heads * queries, keys], rows grad_stride apart
    scores_ptr,
    mask_ptr,
    lengths_ptr,
    seed_ptr,
    dscores_ptr,  # [batch, heads, queries, keys] contiguous
    grad_stride,
    scores_stride,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    heads,
    queries,
    keys,
    scale,
    threshold,
    keep_scale,
    LENGTHS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS queries of one head, each row whole; arguments as :func:`forward_kernel` has them."""
    group, query, length = _place(lengths_ptr, heads, queries, keys, LENGTHS, ROWS)
    key = tl.arange(0, COLUMNS)[None, :]
    row = group.to(tl.int64) * queries + query
    if mask_ptr is not None:
        mask_ptr += _mask_offset(group, query, heads, mask_batch, mask_head, mask_query)
    loaded = (key < _whole_vectors(length)) & (key < keys)
    grad = tl.load(grad_ptr + row * grad_stride + key, mask=loaded, other=0.0).to(tl.float32)
    s = _scores(scores_ptr + row * scores_stride, mask_ptr, mask_key, key, keys, length, scale)
    e = _exponentials(s, tl.max(s, axis=1, keep_dims=True), mask_ptr)
    inverse = _inverse(tl.sum(e, axis=1, keep_dims=True))
    # Whatever the gradient holds where a key is off, it counts for nothing.
    dp = tl.where(s == float("-inf"), 0.0, grad)
    if seed_ptr is not None:
        k0, k1 = row_keys(seed_key(seed_ptr), group, query)
        dp = tl.where(keep_tile(k0, k1, 0, COLUMNS, threshold), dp * keep_scale, 0.0)
    dot = tl.sum(e * dp, axis=1, keep_dims=True) * inverse
    ds = e * (dp - dot) * (inverse * scale)
    tl.store(dscores_ptr + row * keys + key, ds.to(dscores_ptr.dtype.element_ty), mask=(query < queries) & (key < keys))


@triton.jit
def _long_statistics(scores_ptr, mask_ptr, mask_key, length, keys, scale, COLUMNS: tl.constexpr):
    """Largest score of a row, and 1 / sum(exp(score - largest)); each lane keeps its own until the end."""
    most = tl.full([1, COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([1, COLUMNS], tl.float32)
    for start in range(0, keys, COLUMNS):
        key = start + tl.arange(0, COLUMNS)[None, :]
        s = _scores(scores_ptr, mask_ptr, mask_key, key, keys, length, scale)
        higher = tl.maximum(most, s)
        total = total * _exponentials(most, higher, mask_ptr) + _exponentials(s, higher, mask_ptr)
        most = higher
    row_most = tl.max(most, axis=1, keep_dims=True)
    return row_most, _inverse(tl.sum(total * _exponentials(most, row_most, mask_ptr), axis=1, keep_dims=True))


@triton.jit(do_not_specialize=["heads", "queries", "threshold"])
def forward_long_kernel(
    scores_ptr,
    mask_ptr,
    lengths_ptr,
    seed_ptr,
    out_ptr,
    scores_stride,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    heads,
    queries,
    keys,
    scale,
    threshold,
    keep_scale,
    LENGTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row, COLUMNS at a time; arguments as :func:`forward_kernel` has them."""
    group, query, length = _place(lengths_ptr, heads, queries, keys, LENGTHS, 1)
    row = group.to(tl.int64) * queries + query
    scores_ptr += row * scores_stride
    if mask_ptr is not None:
        mask_ptr += _mask_offset(group, query, heads, mask_batch, mask_head, mask_query)
    if seed_ptr is not None:
        k0, k1 = row_keys(seed_key(seed_ptr), group, query)
    most, inverse = _long_statistics(scores_ptr, mask_ptr, mask_key, length, keys, scale, COLUMNS)
    for start in range(0, keys, COLUMNS):
        key = start + tl.arange(0, COLUMNS)[None, :]
        s = _scores(scores_ptr, mask_ptr, mask_key, key, keys, length, scale)
        p = _exponentials(s, most, mask_ptr) * inverse
        if seed_ptr is not None:
            p *= tl.where(keep_tile(k0, k1, start, COLUMNS, threshold), keep_scale, 0.0)
        tl.store(out_ptr + row * keys + key, p.to(out_ptr.dtype.element_ty), mask=key < keys)


@triton.jit(do_not_specialize=["heads", "queries", "threshold"])
def backward_long_kernel(
    grad_ptr,
    scores_ptr,
    mask_ptr,
    lengths_ptr,
    seed_ptr,
    dscores_ptr,
    grad_stride,
    scores_stride,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    heads,
    queries,
    keys,
    scale,
    threshold,
    keep_scale,
    LENGTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row, COLUMNS at a time; arguments as :func:`backward_kernel` has them."""
    group, query, length = _place(lengths_ptr, heads, queries, keys, LENGTHS, 1)
    row = group.to(tl.int64) * queries + query
    scores_ptr += row * scores_stride
    grad_ptr += row * grad_stride
    if mask_ptr is not None:
        mask_ptr += _mask_offset(group, query, heads, mask_batch, mask_head, mask_query)
    if seed_ptr is not None:
        k0, k1 = row_keys(seed_key(seed_ptr), group, query)
    most, inverse = _long_statistics(scores_ptr, mask_ptr, mask_key, length, keys, scale, COLUMNS)
    total = tl.zeros([1, COLUMNS], tl.float32)
    for start in range(0, keys, COLUMNS):
        key = start + tl.arange(0, COLUMNS)[None, :]
        grad = tl.load(grad_ptr + key, mask=(key < _whole_vectors(length)) & (key < keys), other=0.0).to(tl.float32)
        s = _scores(scores_ptr, mask_ptr, mask_key, key, keys, length, scale)
        dp = tl.where(s == float("-inf"), 0.0, grad)
        if seed_ptr is not None:
            dp = tl.where(keep_tile(k0, k1, start, COLUMNS, threshold), dp * keep_scale, 0.0)
        total += dp * (_exponentials(s, most, mask_ptr) * inverse)
    dot = tl.sum(total, axis=1, keep_dims=True)
    for start in range(0, keys, COLUMNS):
        key = start + tl.arange(0, COLUMNS)[None, :]
        grad = tl.load(grad_ptr + key, mask=(key < _whole_vectors(length)) & (key < keys), other=0.0).to(tl.float32)
        s = _scores(scores_ptr, mask_ptr, mask_key, key, keys, length, scale)
        dp = tl.where(s == float("-inf"), 0.0, grad)
        if seed_ptr is not None:
            dp = tl.where(keep_tile(k0, k1, start, COLUMNS, threshold), dp * keep_scale, 0.0)
        ds = _exponentials(s, most, mask_ptr) * (dp - dot) * (inverse * scale)
        tl.store(dscores_ptr + row * keys + key, ds.to(dscores_ptr.dtype.element_ty), mask=key < keys)


def _launch(kernel, long_kernel, table, tensors, strides, shape, mask, lengths, scale, dropout):
    """Either kernel on ``tensors``; ``shape``: of scores."""
    batch, heads, queries, keys = shape
    arguments = (
        *tensors,
        *strides,
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        heads,
        queries,
        keys,
        scale,
        *dropout,
        0 if lengths is None else lengths.dim(),
    )
    config = choose(table, keys)
    if keys > config.columns:
        long_kernel[(batch * heads * queries,)](*arguments, LONG.columns, num_warps=LONG.num_warps, **OPTIONS)
    else:
        kernel[(batch * heads * cdiv(queries, config.rows),)](
            *arguments, config.rows, config.columns, num_warps=config.num_warps, **OPTIONS
        )


def forward(
    scores: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    out = scores.new_empty(scores.shape)
    if scores.numel() == 0:
        return out
    shape = scores.shape
    scores, stride = rows_of(scores)
    dropout = threshold_and_scale(dropout_p)
    tensors = (scores, mask, lengths, seed if dropout[0] else None, out)
    _launch(forward_kernel, forward_long_kernel, FORWARD, tensors, (stride,), shape, mask, lengths, scale, dropout)
    return out


def backward(
    grad: Tensor,
    scores: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    dscores = scores.new_empty(scores.shape)
    if scores.numel() == 0:
        return dscores
    shape = scores.shape
    scores, stride = rows_of(scores)
    grad, grad_stride = rows_of(grad)
    dropout = threshold_and_scale(dropout_p)
    tensors = (grad, scores, mask, lengths, seed if dropout[0] else None, dscores)
    strides = (grad_stride, stride)
    _launch(backward_kernel, backward_long_kernel, BACKWARD, tensors, strides, shape, mask, lengths, scale, dropout)
    return dscores


def static_cases() -> Iterator[StaticCase]:
    from .offline import bytes_of, meta

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    # batch, sequence, dtype, mask, dropout_p
    cases = [
        (32, 128, bf16, "lengths", 0.1),
        (8, 512, bf16, "lengths", 0.1),
        (256, 128, bf16, "lengths", 0.1),
        (64, 512, bf16, "lengths", 0.1),
        (64, 512, bf16, "lengths", 0.0),
        (64, 512, bf16, "bool", 0.1),
        (64, 512, bf16, "additive", 0.1),
        (64, 512, fp16, "lengths", 0.1),
        (64, 512, fp32, "lengths", 0.1),
        (64, 509, bf16, "lengths", 0.1),
    ]
    widths = [config.columns for config in FORWARD] + [2 * FORWARD[-1].columns]
    cases += [(1, sequence, dtype, "lengths", 0.1) for sequence in widths for dtype in (bf16, fp32)]
    for batch, sequence, dtype, form, dropout_p in cases:
        scores, seed = meta(batch, 12, sequence, sequence, dtype=dtype), meta(1, dtype=torch.int64)
        lengths = meta(batch, dtype=torch.int32) if form == "lengths" else None
        mask = None
        if form != "lengths":
            mask = meta(batch, 1, 1, sequence, dtype=torch.bool if form == "bool" else fp32).expand(scores.shape)
        shape = f"{batch} x 12 x {sequence} x {sequence}, {str(dtype).removeprefix('torch.')}, {form}, p {dropout_p}"
        integer_ops = OPERATIONS_PER_PAIR * scores.numel() // 2 if dropout_p else 0
        least, ci = sum(bytes_of(t) for t in (scores, scores, mask, lengths) if t is not None), batch == 32
        inputs = (scores, mask, lengths, 0.125, dropout_p, seed)
        yield StaticCase(f"forward {shape}", partial(forward, *inputs), least, integer_ops=integer_ops, ci=ci)
        least += bytes_of(scores)
        call = partial(backward, scores, *inputs)
        yield StaticCase(f"backward {shape}", call, least, integer_ops=integer_ops, ci=ci)


def tunables() -> Iterator[Tunable]:
    from .tune import Tunable

    for table, entries in (("FORWARD", FORWARD), ("BACKWARD", BACKWARD)):
        for config in entries:
            keys = config.columns
            scores = torch.randn((1 << 26) // keys // keys or 1, 1, keys, keys, dtype=torch.bfloat16, device="cuda")
            lengths = torch.full((scores.shape[0],), keys, dtype=torch.int32, device="cuda")
            inputs = (scores, None, lengths, 0.125, 0.1, torch.zeros(1, dtype=torch.int64, device="cuda"))
            yield Tunable(
                table, config, partial(forward, *inputs) if table == "FORWARD" else partial(backward, scores, *inputs)
            )
