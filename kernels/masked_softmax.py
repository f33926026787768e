"""dropout(softmax(scale * scores + mask)) and its backward.

Memory-bound. Forward reads scores and writes the output once; backward reads scores and grad, recomputes the
probabilities, and writes the gradient once: the least possible, given that nothing but the inputs is kept. ``lengths``
costs no mask tensor, and what lies past a length is not read; a mask is read through its strides, so that what is
broadcast comes from a cache. A row of up to 8,192 keys is held in registers, short ones by a single warp, several of
one head at a time; a longer row is read in chunks, twice forward and three times backward.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .dropout import keep, row_keys, seed_key, threshold_and_scale
from .launch import OPTIONS, Config, cdiv, choose, rows_of

# Queries of one head per program, by keys.
FORWARD = (
    Config(16, 64, 1),
    Config(8, 128, 1),
    Config(4, 256, 1),
    Config(2, 512, 1),
    Config(1, 1024, 1),
    Config(1, 2048, 2),
    Config(1, 4096, 4),
    Config(1, 8192, 8),
)
BACKWARD = (
    Config(16, 64, 2),
    Config(8, 128, 2),
    Config(4, 256, 2),
    Config(2, 512, 2),
    Config(1, 1024, 2),
    Config(1, 2048, 4),
    Config(1, 4096, 8),
    Config(1, 8192, 16),
)
# Rows longer than the tables' last entry, in chunks.
LONG = Config(1, 4096, 8)


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
def _scores(scores_ptr, mask_ptr, mask_key, key, length, scale):
    """scale * scores + mask of some keys in float32, -inf where off; the pointers are those of the rows."""
    on = key < length
    s = tl.load(scores_ptr + key, mask=on, other=0.0).to(tl.float32) * scale
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + key.to(tl.int64) * mask_key, mask=on, other=0)
        if mask_ptr.dtype.element_ty == tl.float32:
            s += mask
            on &= mask != float("-inf")
        else:
            on &= mask != 0
    return tl.where(on, s, float("-inf"))


@triton.jit
def _exponentials(s, most):
    """exp(s - most), where most is the largest of a row; 0 where -inf. (The difference first: it cannot overflow.)"""
    return tl.exp2((s - tl.where(most == float("-inf"), 0.0, most)) * 1.4426950408889634)


@triton.jit
def _inverse(total):
    """1 / total, 0 for a row with no key on."""
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit
def _softmax(s):
    e = _exponentials(s, tl.max(s, axis=1, keep_dims=True))
    p = e * _inverse(tl.sum(e, axis=1, keep_dims=True))
    return tl.where(s == float("-inf"), 0.0, p)


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
    p = _softmax(_scores(scores_ptr + row * scores_stride, mask_ptr, mask_key, key, length, scale))
    if seed_ptr is not None:
        k0, k1 = row_keys(seed_key(seed_ptr), group, query)
        p = tl.where(keep(k0, k1, key, threshold), p * keep_scale, 0.0)
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
    grad = tl.load(grad_ptr + row * grad_stride + key, mask=key < length, other=0.0).to(tl.float32)
    s = _scores(scores_ptr + row * scores_stride, mask_ptr, mask_key, key, length, scale)
    p = _softmax(s)
    on = s != float("-inf")
    if seed_ptr is not None:
        k0, k1 = row_keys(seed_key(seed_ptr), group, query)
        on &= keep(k0, k1, key, threshold)
        grad *= keep_scale
    dp = tl.where(on, grad, 0.0)
    ds = p * (dp - tl.sum(p * dp, axis=1, keep_dims=True)) * scale
    ds = tl.where(s == float("-inf"), 0.0, ds)
    tl.store(dscores_ptr + row * keys + key, ds.to(dscores_ptr.dtype.element_ty), mask=(query < queries) & (key < keys))


@triton.jit
def _long_statistics(scores_ptr, mask_ptr, mask_key, length, keys, scale, COLUMNS: tl.constexpr):
    """Largest score of a row, and 1 / sum(exp(score - largest)); each lane keeps its own until the end."""
    most = tl.full([1, COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([1, COLUMNS], tl.float32)
    for start in range(0, keys, COLUMNS):
        key = start + tl.arange(0, COLUMNS)[None, :]
        s = _scores(scores_ptr, mask_ptr, mask_key, key, length, scale)
        higher = tl.maximum(most, s)
        total = total * _exponentials(most, higher) + _exponentials(s, higher)
        most = higher
    row_most = tl.max(most, axis=1, keep_dims=True)
    return row_most, _inverse(tl.sum(total * _exponentials(most, row_most), axis=1, keep_dims=True))


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
        s = _scores(scores_ptr, mask_ptr, mask_key, key, length, scale)
        p = tl.where(s == float("-inf"), 0.0, _exponentials(s, most) * inverse)
        if seed_ptr is not None:
            p = tl.where(keep(k0, k1, key, threshold), p * keep_scale, 0.0)
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
        grad = tl.load(grad_ptr + key, mask=key < length, other=0.0).to(tl.float32)
        s = _scores(scores_ptr, mask_ptr, mask_key, key, length, scale)
        on = s != float("-inf")
        if seed_ptr is not None:
            on &= keep(k0, k1, key, threshold)
            grad *= keep_scale
        total += tl.where(on, grad * (_exponentials(s, most) * inverse), 0.0)
    dot = tl.sum(total, axis=1, keep_dims=True)
    for start in range(0, keys, COLUMNS):
        key = start + tl.arange(0, COLUMNS)[None, :]
        grad = tl.load(grad_ptr + key, mask=key < length, other=0.0).to(tl.float32)
        s = _scores(scores_ptr, mask_ptr, mask_key, key, length, scale)
        on = s != float("-inf")
        if seed_ptr is not None:
            on &= keep(k0, k1, key, threshold)
            grad *= keep_scale
        ds = _exponentials(s, most) * inverse * (tl.where(on, grad, 0.0) - dot) * scale
        ds = tl.where(s == float("-inf"), 0.0, ds)
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
