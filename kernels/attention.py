"""Attention, ``dropout(softmax(q k^T * scale + mask)) v``, forward and backward, dense and packed.

The least memory is q, k, v and the result once each (backward: seven tensors), the work two products of Sq x Sk x D
(backward: five). A program takes one tile of queries of one head and goes over the keys, tile by tile, with a running
maximum; where one tile holds all keys there is no loop and nothing is rescaled. Source: Dao, "FlashAttention-2",
https://arxiv.org/abs/2307.08691.

Backward, by length. A head that fits one tile (up to 128 tokens of 64 elements in 16 bits) is one program: five
products, no atomics, each tensor touched once; the sum p * dp of a row ("delta") is in the tile, so neither the result
is read nor its rounding felt. Longer heads take a launch for dq, which makes delta from the rounded result as it goes,
and one for dk and dv: seven products, since the scores are made twice. Five would need dq added up in memory across
tiles of keys: 2 n - 1 passes over float32 for n tiles, at 512 tokens 0.9 MB a head through the second-level cache,
0.16 us of it at 5.5 TB/s, where two more products and their exponentials cost 0.18 us of all multiprocessors, which
one program per head seldom fills evenly.

What limits on an H200 is instructions: 132 multiprocessors issue 3.0e13 lane operations a second, while an element of
a forward tile (D = 64) leaves room for 9.9 of them if products run at 790 TFLOP/s. Counted in the machine code of a
whole tile: 7.9 without dropout (maximum, exponent, exp2, sum, half a conversion, rescaling, loads), 14.1 with it. The
hash is 4.5 of these 6.3, one for two columns: 11 integer operations a pair with the comparisons, none for the last
step of the upper half, which compares in place. (Before pairs were explicit it was 18: see ``_drop``.) Other
instructions saved: rows past the end are clamped, not masked (a masked load of 16-bit numbers selects each of them);
whole tiles of keys are not compared with the length; the scale is folded into the exponent; the kept probabilities are
scaled once, at the end. What 32,768 padded positions with a third of padding imply, bfloat16, D = 64, H = 12, p = 0.1:

    us                   memory  products  instructions
    S = 128, forward         31         7            49
    S = 128, backward        54        18            55
    S = 512, forward         31        29            71
    S = 512, backward        70       101           168

Masks: lengths and packing read no mask tensor, and tiles past a length are not visited; a mask that all queries share
is read as a row; one that differs by query (or lengths [B, Sq]) as a tile, and then values are made finite first, so
that NaN reaches only the queries it is on for. Float32 is multiplied in full ("ieee"), without tensor cores.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from fastbert.ops.triton import INTERPRETED

from . import StaticCase
from .dropout import OPERATIONS_PER_PAIR, row_keys, seed_key, threshold_and_scale
from .dropout import _hash as pair_hash
from .launch import OPTIONS, cdiv

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(math.inf)

# MASK: what a mask tensor holds.
_NO_MASK = tl.constexpr(0)
_BOOL = tl.constexpr(1)
_ADDITIVE = tl.constexpr(2)
# LENGTHS: what lengths holds, one per batch or one per query.
_PER_BATCH = tl.constexpr(1)
_PER_QUERY = tl.constexpr(2)


@triton.jit
def _sequence(cu_seqlens_ptr, lengths_ptr, batch, queries, keys, LENGTHS: tl.constexpr):
    """First row of a sequence (dense: 0), how many queries it has, and how many keys may be on."""
    if cu_seqlens_ptr is not None:
        first = tl.load(cu_seqlens_ptr + batch)
        count = tl.load(cu_seqlens_ptr + batch + 1) - first
        return first.to(tl.int64), count, count
    else:
        if LENGTHS == _PER_BATCH:
            keys = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), keys)
        return tl.cast(0, tl.int64), queries, keys


@triton.jit
def _row_limits(lengths_ptr, batch, queries, rows, row_ok, key_count):
    """[M, 1]: how many keys may be on for each row, of lengths [B, Sq]."""
    limits = tl.load(lengths_ptr + batch.to(tl.int64) * queries + rows, mask=row_ok, other=0)
    return tl.minimum(limits, key_count)[:, None]


@triton.jit
def _head(ptr, batch, first, head, s_b, s_s, s_h, UNIT: tl.constexpr):
    """Where the rows of a sequence and head begin; strides in units of UNIT elements."""
    return ptr + (batch.to(tl.int64) * s_b + first * s_s + head.to(tl.int64) * s_h) * UNIT


@triton.jit
def _offsets(rows, s_s, columns, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Of rows of a tile; WIDE: a tile may span 2^31 elements."""
    return ((rows.to(tl.int64) if WIDE else rows) * s_s * UNIT)[:, None] + columns[None, :]


@triton.jit
def _within(rows, count):
    """Rows of a tile, the last of ``count`` in place of those past it: a load without a mask is the cheaper one."""
    return tl.minimum(rows, tl.maximum(count, 1) - 1)


@triton.jit
def _load(pointers, ok, columns, D: tl.constexpr, GUARD: tl.constexpr):
    """Rows [R, BLOCK_D]; zeros past D and, with GUARD, where ``ok`` [R] is False."""
    if columns.shape[0] == D:
        if GUARD:
            return tl.load(pointers, mask=ok[:, None], other=0.0)
        else:
            return tl.load(pointers)
    else:
        if GUARD:
            return tl.load(pointers, mask=ok[:, None] & (columns[None, :] < D), other=0.0)
        else:
            return tl.load(pointers, mask=columns[None, :] < D, other=0.0)


@triton.jit
def _load_keys(
    ptr,
    n,
    start,
    key_count,
    s_s,
    ok,
    columns,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    GUARD: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Keys or values start + n. GUARD: zeros where not ``ok``; else what is past the last key is the last key."""
    ptr += tl.cast(start, tl.int64) * s_s * UNIT
    if WHOLE or GUARD:
        return _load(ptr + _offsets(n, s_s, columns, UNIT, WIDE), ok, columns, D, GUARD)
    else:
        return _load(ptr + _offsets(_within(n, key_count - start), s_s, columns, UNIT, WIDE), ok, columns, D, False)


@triton.jit
def _load_queries(ptr, m, start, query_count, s_s, columns, D: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Queries start + m; what is past the last query is the last query."""
    ptr += tl.cast(start, tl.int64) * s_s * UNIT
    rows = _within(m, query_count - start)
    return _load(ptr + _offsets(rows, s_s, columns, UNIT, WIDE), rows, columns, D, False)


@triton.jit
def _store(pointers, x, ok, columns, D: tl.constexpr):
    x = x.to(pointers.dtype.element_ty)
    if columns.shape[0] == D:
        tl.store(pointers, x, mask=ok[:, None])
    else:
        tl.store(pointers, x, mask=ok[:, None] & (columns[None, :] < D))


@triton.jit
def _mask(
    mask_ptr, rows, row_ok, cols, key_count, limits, m_q, m_k, MASK: tl.constexpr, BY_QUERY: tl.constexpr
):  # fmt: skip
    """Of a tile: which keys may be loaded [N], which are on for which query and what is added, [1, N] or [M, N].

    ``limits``: keys that may be on for each query, scalar or [M, 1].
    """
    ok = cols < key_count
    bias = 0.0
    if BY_QUERY:
        on = row_ok[:, None] & (cols[None, :] < limits)
        pointers = mask_ptr
        if MASK != _NO_MASK:
            pointers += (rows.to(tl.int64) * m_q)[:, None] + (cols.to(tl.int64) * m_k)[None, :]
        if MASK == _BOOL:
            on = tl.load(pointers, mask=on, other=0) != 0
        if MASK == _ADDITIVE:
            bias = tl.load(pointers, mask=on, other=-_INF)
            on = bias != -_INF
    else:
        if MASK == _BOOL:
            ok = tl.load(mask_ptr + cols.to(tl.int64) * m_k, mask=ok, other=0) != 0
        if MASK == _ADDITIVE:
            row = tl.load(mask_ptr + cols.to(tl.int64) * m_k, mask=ok, other=-_INF)
            ok = row != -_INF
            bias = row[None, :]
        on = ok[None, :]
    return ok, on, bias


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _drop(x, k0, k1, start, threshold, zero):
    """[M, N] with what dropout takes set to ``zero``. ``k0``, ``k1``: row keys; ``start``: the first column, even.

    Neighbouring columns lie in one thread, which computes their common hash once: the pairs are made explicit here,
    since LLVM does not find them where columns are compared with a length as well, and hashes twice.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [M, N // 2, 2]))
    k0 += (
        tl.cast(start // 2, tl.uint32) * 0x9E3779B9
    )  # what is added for the columns of a tile is the same in all tiles
    bits = pair_hash(k0[:, None], k1[:, None], tl.arange(0, N // 2)[None, :])
    cut = (threshold.to(tl.uint32) << 16) - 1
    even = tl.where((bits ^ (bits << 16)) > cut, even, zero)
    odd = tl.where(bits > cut, odd, zero)
    return tl.reshape(tl.join(even, odd), [M, N])


@triton.jit
def _finite(x):
    return tl.abs(x.to(tl.float32)) < _INF


# Never compiled anew for other lengths: what alignment loads may rely on is in UNIT.
_FORWARD_INTEGERS = [f"{tensor}_{axis}" for tensor in "qkv" for axis in "bsh"] + [f"m_{axis}" for axis in "bhqk"]
_FORWARD_INTEGERS += ["heads", "queries", "keys", "tiles", "threshold"]
_INTEGERS = [*_FORWARD_INTEGERS, "g_b", "g_s", "g_h"]


@triton.jit(do_not_specialize=_FORWARD_INTEGERS)
def _attention_forward(
    q_ptr,  # [B, Sq, H, D] or [T, H, D], any strides but the last
    k_ptr,  # [B, Sk, H, D]
    v_ptr,
    mask_ptr,  # bytes or float32 [B, H, Sq, Sk], any strides
    lengths_ptr,  # int32 [B] or [B, Sq]
    cu_seqlens_ptr,  # int32 [B + 1]; None: dense
    seed_ptr,  # int64 [1]
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    m_b,
    m_h,
    m_q,
    m_k,
    heads,
    queries,  # Sq, packed: T
    keys,  # Sk
    tiles,  # programs per sequence and head
    scale,
    threshold,
    keep_scale,
    out_ptr,  # contiguous, the shape of q
    lse_ptr,  # float32 [B, H, Sq] or [H, T]
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    MASK: tl.constexpr,
    LENGTHS: tl.constexpr,
    BY_QUERY: tl.constexpr,
    FOLD: tl.constexpr,
    DROPOUT: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    bh, first_row = pid // tiles, pid % tiles * BLOCK_M
    batch, head = bh // heads, bh % heads
    first, query_count, key_count = _sequence(cu_seqlens_ptr, lengths_ptr, batch, queries, keys, LENGTHS)
    if first_row >= query_count:
        return
    m = tl.arange(0, BLOCK_M)
    rows = first_row + m
    row_ok = rows < query_count
    columns = tl.arange(0, BLOCK_D)
    q_ptr = _head(q_ptr, batch, first, head, q_b, q_s, q_h, UNIT)
    k_ptr = _head(k_ptr, batch, first, head, k_b, k_s, k_h, UNIT)
    v_ptr = _head(v_ptr, batch, first, head, v_b, v_s, v_h, UNIT)
    n = tl.arange(0, BLOCK_N)
    if MASK != _NO_MASK:
        mask_ptr += batch.to(tl.int64) * m_b + head.to(tl.int64) * m_h
    q = _load_queries(q_ptr, m, first_row, query_count, q_s, columns, D, UNIT, WIDE)
    limits = key_count
    if LENGTHS == _PER_QUERY:
        limits = _row_limits(lengths_ptr, batch, queries, rows, row_ok, key_count)
        key_count = tl.max(tl.max(limits, 1), 0)
    if DROPOUT:
        k0, k1 = row_keys(seed_key(seed_ptr), bh, rows)
    # No constant, or LLVM would choose what is dropped after the conversion to 16 bits, and unpack pairs for it.
    zero = keep_scale * 0.0
    # Scores times `unit` are exponents of 2. FOLD: the scale is part of it, and scores are bare products.
    unit = scale * _LOG2E if FOLD else _LOG2E

    GUARD: tl.constexpr = MASK != _NO_MASK and not BY_QUERY
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -_INF, tl.float32)
    # Tiles that hold `key_count` keys on without a look, then the others.
    SPLIT: tl.constexpr = MASK == _NO_MASK and not BY_QUERY and not ONE_TILE
    whole = key_count // BLOCK_N * BLOCK_N if SPLIT else 0
    for part in tl.static_range(0 if SPLIT else 1, 2):
        for start in tl.range(
            0 if part == 0 else whole, BLOCK_N if ONE_TILE else whole if part == 0 else key_count, BLOCK_N
        ):
            cols = start + n
            ok, on, bias = _mask(mask_ptr, rows, row_ok, cols, key_count, limits, m_q, m_k, MASK, BY_QUERY)
            k = _load_keys(k_ptr, n, start, key_count, k_s, ok, columns, D, UNIT, WIDE, GUARD, part == 0)
            v = _load_keys(v_ptr, n, start, key_count, v_s, ok, columns, D, UNIT, WIDE, GUARD, part == 0)
            s = _dot(q, tl.trans(k))
            if not FOLD:
                s = s * scale + bias
            if part == 1:
                s = tl.where(on, s, -_INF)
            peak = tl.max(s, 1)
            if not ONE_TILE:
                peak = tl.maximum(top, peak)
            level = tl.where(peak == -_INF, 0.0, peak)
            # A large mask times log2(e) may overflow, a difference of scores does not.
            p = tl.exp2(s * unit - (level * unit)[:, None] if FOLD else (s - level[:, None]) * unit)
            if ONE_TILE:
                total = tl.sum(p, 1)
            else:
                shrink = tl.exp2((top - level) * unit)
                total = total * shrink + tl.sum(p, 1)
                acc = acc * shrink[:, None]
            top = peak
            if DROPOUT:
                p = _drop(p, k0, k1, start, threshold, zero)
            if BY_QUERY:
                # A value that is not finite reaches the queries it is on for, and no other.
                bad = ~_finite(v)
                acc = tl.dot(p.to(v.dtype), tl.where(bad, 0.0, v), acc, input_precision="ieee")
                if tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0:
                    acc = tl.where(
                        _dot(on.to(tl.float32).to(v.dtype), bad.to(tl.float32).to(v.dtype)) > 0.0, float("nan"), acc
                    )
            else:
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")

    none = total == 0.0
    acc = tl.where(none[:, None], 0.0, acc * (keep_scale / total)[:, None])
    lse = tl.where(none, _INF, top * (scale if FOLD else 1.0) + tl.log2(total) * _LN2)
    out_s = heads * D
    if cu_seqlens_ptr is None:
        out_ptr += (batch.to(tl.int64) * queries) * out_s
        lse_ptr += bh.to(tl.int64) * queries
    else:
        lse_ptr += head.to(tl.int64) * queries + first
    out_ptr += first * out_s + head * D
    _store(
        out_ptr + tl.cast(first_row, tl.int64) * out_s + _offsets(m, out_s, columns, 1, WIDE), acc, row_ok, columns, D
    )
    tl.store(lse_ptr + rows, lse, mask=row_ok)


@triton.jit
def _probabilities(
    s, on, bias, lse, norm, scale, unit, zero, MASK: tl.constexpr, FOLD: tl.constexpr, WHOLE: tl.constexpr
):
    """exp(s * scale + bias - lse), of bare products ``s``; zero where off. ``lse``, ``norm``: [M, 1]."""
    if FOLD:
        p = tl.exp2(s * unit - lse * _LOG2E)
    elif MASK == _ADDITIVE:
        p = tl.exp2((s * scale + bias - lse) * unit + norm)
    else:
        p = tl.exp2((s * scale - lse) * unit)
    if not WHOLE:
        p = tl.where(on, p, zero)
    return p


@triton.jit
def _coarse(lse):
    """Whether one of these logarithms is so large that its fraction, and with it the row's sum, was rounded away."""
    return tl.max(tl.where(_finite(lse), tl.abs(lse), 0.0), 0) > 256.0


@triton.jit(do_not_specialize=_INTEGERS)
def _attention_backward_q(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    lengths_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    m_b,
    m_h,
    m_q,
    m_k,
    heads,
    queries,
    keys,
    tiles,
    scale,
    threshold,
    keep_scale,
    grad_ptr,  # the shape of q, any strides but the last
    g_b,
    g_s,
    g_h,
    out_ptr,  # contiguous
    lse_ptr,
    delta_ptr,  # float32, the shape of lse: sum over keys of p * dp, written for the next kernel
    norm_ptr,  # the same: what lse has lost in rounding; None unless the mask is additive
    dq_ptr,  # contiguous
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    MASK: tl.constexpr,
    LENGTHS: tl.constexpr,
    BY_QUERY: tl.constexpr,
    FOLD: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    pid = tl.program_id(0)
    bh, first_row = pid // tiles, pid % tiles * BLOCK_M
    batch, head = bh // heads, bh % heads
    first, query_count, key_count = _sequence(cu_seqlens_ptr, lengths_ptr, batch, queries, keys, LENGTHS)
    if first_row >= query_count:
        return
    m = tl.arange(0, BLOCK_M)
    rows = first_row + m
    row_ok = rows < query_count
    columns = tl.arange(0, BLOCK_D)
    q_ptr = _head(q_ptr, batch, first, head, q_b, q_s, q_h, UNIT)
    k_ptr = _head(k_ptr, batch, first, head, k_b, k_s, k_h, UNIT)
    v_ptr = _head(v_ptr, batch, first, head, v_b, v_s, v_h, UNIT)
    grad_ptr = _head(grad_ptr, batch, first, head, g_b, g_s, g_h, UNIT)
    n = tl.arange(0, BLOCK_N)
    if MASK != _NO_MASK:
        mask_ptr += batch.to(tl.int64) * m_b + head.to(tl.int64) * m_h
    out_s = heads * D
    out_base = first * out_s + head * D
    if cu_seqlens_ptr is None:
        out_base += (batch.to(tl.int64) * queries) * out_s
        stats = bh.to(tl.int64) * queries
    else:
        stats = head.to(tl.int64) * queries + first
    q = _load_queries(q_ptr, m, first_row, query_count, q_s, columns, D, UNIT, WIDE)
    grad = _load_queries(grad_ptr, m, first_row, query_count, g_s, columns, D, UNIT, WIDE)
    out = _load_queries(out_ptr + out_base, m, first_row, query_count, out_s, columns, D, 1, WIDE)
    lse = tl.load(lse_ptr + stats + rows, mask=row_ok, other=_INF)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    if DROPOUT:  # of the kept probabilities before they are scaled, like everything below
        delta = tl.where(keep_scale > 0.0, delta / keep_scale, 0.0)
    limits = key_count
    if LENGTHS == _PER_QUERY:
        limits = _row_limits(lengths_ptr, batch, queries, rows, row_ok, key_count)
        key_count = tl.max(tl.max(limits, 1), 0)
    if DROPOUT:
        k0, k1 = row_keys(seed_key(seed_ptr), bh, rows)
    zero = keep_scale * 0.0
    unit = scale * _LOG2E if FOLD else _LOG2E

    GUARD: tl.constexpr = MASK != _NO_MASK and not BY_QUERY
    # Products without tensor cores keep whole rows of what does not change in registers; two such tiles are too many.
    RELOAD: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 and D > 128
    never = queries >> 31  # 0, which the compiler cannot know
    # Two sums over keys are made anew where what forward kept is too coarse: delta, where a row may have few keys and
    # the rounding of the result shows (16 bits); and the sum of exponentials, where lse is so large that it lost it.
    again = False
    if q_ptr.dtype.element_ty != tl.float32:
        if BY_QUERY:
            again = True
        else:
            count = key_count
            if MASK != _NO_MASK:
                count = 0
                for start in tl.range(0, key_count, BLOCK_N):
                    ok, _, _ = _mask(mask_ptr, rows, row_ok, start + n, key_count, limits, m_q, m_k, MASK, False)
                    count += tl.sum(ok.to(tl.int32), 0)
            again = count <= 128
    if MASK == _ADDITIVE:
        again |= _coarse(lse)
    norm = tl.zeros([BLOCK_M], tl.float32)
    if again:
        total = tl.zeros([BLOCK_M], tl.float32)
        made = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(0, key_count, BLOCK_N):
            cols = start + n
            ok, on, bias = _mask(mask_ptr, rows, row_ok, cols, key_count, limits, m_q, m_k, MASK, BY_QUERY)
            k = _load_keys(k_ptr, n, start, key_count, k_s, ok, columns, D, UNIT, WIDE, GUARD, False)
            v = _load_keys(v_ptr, n, start, key_count, v_s, ok, columns, D, UNIT, WIDE, GUARD, False)
            if BY_QUERY:
                k = tl.where(_finite(k), k, 0.0)
                v = tl.where(_finite(v), v, 0.0)
            if RELOAD:
                q = _load_queries(q_ptr + start * never, m, first_row, query_count, q_s, columns, D, UNIT, WIDE)
                grad = _load_queries(grad_ptr + start * never, m, first_row, query_count, g_s, columns, D, UNIT, WIDE)
            s = _dot(q, tl.trans(k))
            p = _probabilities(s, on, bias, lse[:, None], 0.0, scale, unit, zero, MASK, FOLD, False)
            total += tl.sum(p, 1)
            if DROPOUT:
                p = _drop(p, k0, k1, start, threshold, zero)
            made += tl.sum(p * _dot(grad, tl.trans(v)), 1)
        any_on = total > 0.0
        delta = tl.where(any_on, made / total, 0.0)
        norm = tl.where(any_on, -tl.log2(total), 0.0)
    tl.store(delta_ptr + stats + rows, delta, mask=row_ok)
    if MASK == _ADDITIVE:
        tl.store(norm_ptr + stats + rows, norm, mask=row_ok)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    SPLIT: tl.constexpr = MASK == _NO_MASK and not BY_QUERY
    whole = key_count // BLOCK_N * BLOCK_N if SPLIT else 0
    for part in tl.static_range(0 if SPLIT else 1, 2):
        for start in tl.range(0 if part == 0 else whole, whole if part == 0 else key_count, BLOCK_N):
            cols = start + n
            ok, on, bias = _mask(mask_ptr, rows, row_ok, cols, key_count, limits, m_q, m_k, MASK, BY_QUERY)
            k = _load_keys(k_ptr, n, start, key_count, k_s, ok, columns, D, UNIT, WIDE, GUARD, part == 0)
            v = _load_keys(v_ptr, n, start, key_count, v_s, ok, columns, D, UNIT, WIDE, GUARD, part == 0)
            if BY_QUERY:
                k = tl.where(_finite(k), k, 0.0)
                v = tl.where(_finite(v), v, 0.0)
            if RELOAD:
                q = _load_queries(q_ptr + start * never, m, first_row, query_count, q_s, columns, D, UNIT, WIDE)
                grad = _load_queries(grad_ptr + start * never, m, first_row, query_count, g_s, columns, D, UNIT, WIDE)
            p = _probabilities(
                _dot(q, tl.trans(k)), on, bias, lse[:, None], norm[:, None], scale, unit, zero, MASK, FOLD, part == 0
            )
            dp = _dot(grad, tl.trans(v))
            if DROPOUT:
                dp = _drop(dp, k0, k1, start, threshold, zero)
            ds = p * (dp - delta[:, None])
            if BY_QUERY:
                ds = tl.where(on, ds, 0.0)
            acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    acc *= scale * keep_scale
    _store(
        dq_ptr + out_base + tl.cast(first_row, tl.int64) * out_s + _offsets(m, out_s, columns, 1, WIDE),
        acc,
        row_ok,
        columns,
        D,
    )


@triton.jit(do_not_specialize=_INTEGERS)
def _attention_backward_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    lengths_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    m_b,
    m_h,
    m_q,
    m_k,
    heads,
    queries,
    keys,
    tiles,
    scale,
    threshold,
    keep_scale,
    grad_ptr,
    g_b,
    g_s,
    g_h,
    lse_ptr,
    delta_ptr,  # None: ONE_TILE
    norm_ptr,  # None: ONE_TILE, or no additive mask
    dq_ptr,  # None: not ONE_TILE
    dk_ptr,  # contiguous
    dv_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    MASK: tl.constexpr,
    LENGTHS: tl.constexpr,
    BY_QUERY: tl.constexpr,
    FOLD: tl.constexpr,
    DROPOUT: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    bh, start = pid // tiles, pid % tiles * BLOCK_N
    batch, head = bh // heads, bh % heads
    first, query_count, key_count = _sequence(cu_seqlens_ptr, lengths_ptr, batch, queries, keys, LENGTHS)
    if cu_seqlens_ptr is not None:
        keys = key_count
    if start >= keys and not ONE_TILE:
        return
    columns = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    cols = start + n
    q_ptr = _head(q_ptr, batch, first, head, q_b, q_s, q_h, UNIT)
    k_ptr = _head(k_ptr, batch, first, head, k_b, k_s, k_h, UNIT)
    v_ptr = _head(v_ptr, batch, first, head, v_b, v_s, v_h, UNIT)
    grad_ptr = _head(grad_ptr, batch, first, head, g_b, g_s, g_h, UNIT)
    if MASK != _NO_MASK:
        mask_ptr += batch.to(tl.int64) * m_b + head.to(tl.int64) * m_h
    out_s = heads * D
    q_base = first * out_s + head * D
    k_base = q_base
    if cu_seqlens_ptr is None:
        q_base += (batch.to(tl.int64) * queries) * out_s
        k_base += (batch.to(tl.int64) * keys) * out_s
        stats = bh.to(tl.int64) * queries
    else:
        stats = head.to(tl.int64) * queries + first

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    ok = cols < key_count
    if not BY_QUERY:
        ok, on, bias = _mask(mask_ptr, cols, ok, cols, key_count, key_count, m_q, m_k, MASK, False)
    if DROPOUT:
        seed = seed_key(seed_ptr)
    zero = keep_scale * 0.0
    unit = scale * _LOG2E if FOLD else _LOG2E
    if ONE_TILE and key_count == 0:
        dq_ptrs = dq_ptr + q_base + _offsets(m, out_s, columns, 1, WIDE)
        _store(dq_ptrs, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), m < query_count, columns, D)
    if start < key_count:
        GUARD: tl.constexpr = MASK != _NO_MASK and not BY_QUERY
        k = _load_keys(k_ptr, n, start, key_count, k_s, ok, columns, D, UNIT, WIDE, GUARD, False)
        v = _load_keys(v_ptr, n, start, key_count, v_s, ok, columns, D, UNIT, WIDE, GUARD, False)
        if BY_QUERY:
            k = tl.where(_finite(k), k, 0.0)
            v = tl.where(_finite(v), v, 0.0)
        for first_row in tl.range(0, BLOCK_M if ONE_TILE else query_count, BLOCK_M):
            rows = first_row + m
            row_ok = rows < query_count
            q = _load_queries(q_ptr, m, first_row, query_count, q_s, columns, D, UNIT, WIDE)
            grad = _load_queries(grad_ptr, m, first_row, query_count, g_s, columns, D, UNIT, WIDE)
            lse = tl.load(lse_ptr + stats + rows, mask=row_ok, other=_INF)
            if BY_QUERY:
                limits = key_count
                if LENGTHS == _PER_QUERY:
                    limits = _row_limits(lengths_ptr, batch, queries, rows, row_ok, key_count)
                _, on, bias = _mask(mask_ptr, rows, row_ok, cols, key_count, limits, m_q, m_k, MASK, True)
            norm = 0.0
            if MASK == _ADDITIVE and not ONE_TILE:
                norm = tl.load(norm_ptr + stats + rows, mask=row_ok, other=0.0)[:, None]
            # A key that is off for all has its own row of dk and dv, which is stored as zeros, whatever it is here;
            # only dq, which sums over keys, must not see it.
            p = _probabilities(
                _dot(q, tl.trans(k)),
                on,
                bias,
                lse[:, None],
                norm,
                scale,
                unit,
                zero,
                MASK,
                FOLD,
                not (BY_QUERY or ONE_TILE),
            )
            if MASK == _ADDITIVE and ONE_TILE and _coarse(lse):
                total = tl.sum(p, 1)
                p = p * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
            dp = _dot(grad, tl.trans(v))
            kept = p
            if DROPOUT:
                k0, k1 = row_keys(seed, bh, rows)
                kept = _drop(p, k0, k1, start, threshold, zero)
            dv = tl.dot(tl.trans(kept.to(grad.dtype)), grad, dv, input_precision="ieee")
            ds = kept * dp
            delta = tl.sum(ds, 1) if ONE_TILE else tl.load(delta_ptr + stats + rows, mask=row_ok, other=0.0)
            ds -= p * delta[:, None]
            if BY_QUERY:
                ds = tl.where(on, ds, 0.0)
            ds = ds.to(q.dtype)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
            if ONE_TILE:
                dq = _dot(ds, k) * (scale * keep_scale)
                _store(
                    dq_ptr + q_base + tl.cast(first_row, tl.int64) * out_s + _offsets(m, out_s, columns, 1, WIDE),
                    dq,
                    row_ok,
                    columns,
                    D,
                )
    dk = tl.where(ok[:, None], dk * (scale * keep_scale), 0.0)
    dv = tl.where(ok[:, None], dv * keep_scale, 0.0)
    offsets = k_base + tl.cast(start, tl.int64) * out_s + _offsets(n, out_s, columns, 1, WIDE)
    _store(dk_ptr + offsets, dk, cols < keys, columns, D)
    _store(dv_ptr + offsets, dv, cols < keys, columns, D)


class Tile(typing.NamedTuple):
    """Of scores: ``queries`` x ``keys``, and how many warps and pipeline stages serve it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int = 1


class Backward(typing.NamedTuple):
    """``whole``: one program per head, for sequences that fit this tile; else ``q`` and ``kv``, a launch each.

    ``additive``: ``q`` under an additive mask, where that needs another.
    """

    whole: tuple[Tile, ...]
    q: Tile
    kv: Tile
    additive: Tile | None = None


# (matrix units, bytes of an element) -> head sizes up to -> tiles, by keys: the first that holds them all, or the last.
# Each is the largest that no target of its kind spills.
_TINY, _SMALL = Tile(32, 32, 2), Tile(64, 64, 4)
_WARPGROUPS, _TENSOR_MEMORY, _WARPS, _AMD = "NVIDIA 9.0", "NVIDIA 10.x", "other NVIDIA", "AMD"
_FORWARD_32_BIT = {64: (Tile(32, 32, 4), Tile(64, 32, 8)), 128: (Tile(16, 16, 8),), 256: (Tile(32, 16, 8),)}
FORWARD: dict[tuple[str, int], dict[int, tuple[Tile, ...]]] = {
    (_WARPGROUPS, 2): {
        64: (_TINY, _SMALL, Tile(64, 128, 4), Tile(128, 128, 8, 2)),
        128: (_TINY, _SMALL, Tile(128, 64, 8, 2)),
        256: (_TINY, Tile(64, 32, 4)),
    },
    (_WARPS, 2): {
        64: (_TINY, _SMALL, Tile(64, 128, 4), Tile(128, 64, 8, 2)),
        128: (_TINY, Tile(64, 32, 4, 2)),
        256: (_TINY, Tile(64, 32, 8)),
    },
    (_AMD, 2): {64: (_TINY, _SMALL, Tile(64, 32, 4)), 128: (_TINY, Tile(64, 32, 4)), 256: (Tile(32, 32, 4),)},
    (_WARPGROUPS, 4): _FORWARD_32_BIT,
    (_TENSOR_MEMORY, 4): _FORWARD_32_BIT,
    (_WARPS, 4): _FORWARD_32_BIT,
    (_AMD, 4): _FORWARD_32_BIT,
}
FORWARD[_TENSOR_MEMORY, 2] = FORWARD[_WARPGROUPS, 2] | {64: (_TINY, _SMALL, Tile(64, 128, 4), Tile(128, 64, 8, 2))}
# Whatever the length: a mask that differs by query keeps many conditions alive. Tiles of forward and q, and of kv.
_BY_QUERY_16_BIT = {64: (Tile(32, 16, 4),) * 2, 128: (Tile(32, 16, 4),) * 2, 256: (Tile(16, 16, 4),) * 2}
_BY_QUERY_32_BIT = {
    64: (Tile(32, 16, 8), Tile(16, 32, 8)),
    128: (Tile(16, 16, 8),) * 2,
    256: (Tile(16, 16, 8), Tile(32, 16, 8)),
}
BY_QUERY: dict[tuple[str, int], dict[int, tuple[Tile, Tile]]] = {
    (_WARPGROUPS, 2): _BY_QUERY_16_BIT,
    (_TENSOR_MEMORY, 2): _BY_QUERY_16_BIT | {64: (Tile(32, 32, 4),) * 2},
    (_WARPS, 2): _BY_QUERY_16_BIT,
    (_AMD, 2): _BY_QUERY_16_BIT,
    (_WARPGROUPS, 4): _BY_QUERY_32_BIT,
    (_TENSOR_MEMORY, 4): _BY_QUERY_32_BIT,
    (_WARPS, 4): _BY_QUERY_32_BIT,
    (_AMD, 4): _BY_QUERY_32_BIT | {256: (Tile(16, 16, 4),) * 2},
}
_BACKWARD_32_BIT = {
    64: Backward((Tile(32, 32, 8),), Tile(32, 32, 8), Tile(32, 32, 8)),
    128: Backward((Tile(16, 16, 8),), Tile(16, 16, 8), Tile(16, 16, 8)),
    256: Backward((Tile(16, 16, 8),), Tile(16, 16, 8), Tile(16, 16, 8)),
}
_BACKWARD_16_BIT = {
    64: Backward((_TINY, _SMALL), Tile(64, 32, 4), Tile(64, 32, 4)),
    128: Backward((Tile(32, 32, 4),), Tile(64, 32, 4), Tile(32, 32, 4)),
    256: Backward((Tile(32, 32, 8),), Tile(32, 16, 4), Tile(32, 32, 8)),
}
BACKWARD: dict[tuple[str, int], dict[int, Backward]] = {
    (_WARPGROUPS, 2): _BACKWARD_16_BIT
    | {
        64: Backward((_TINY, _SMALL, Tile(128, 128, 8)), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
        128: Backward((Tile(32, 32, 4),), Tile(64, 32, 4, 2), Tile(32, 64, 4)),
    },
    (_WARPS, 2): _BACKWARD_16_BIT,
    (_AMD, 2): _BACKWARD_16_BIT | {256: Backward((Tile(16, 16, 4),), Tile(16, 16, 4), Tile(16, 16, 4))},
    (_WARPGROUPS, 4): _BACKWARD_32_BIT,
    (_TENSOR_MEMORY, 4): _BACKWARD_32_BIT,
    (_WARPS, 4): _BACKWARD_32_BIT
    | {128: Backward((Tile(16, 16, 8),), Tile(32, 16, 16), Tile(16, 16, 8), additive=Tile(16, 16, 8))},
    (_AMD, 4): _BACKWARD_32_BIT | {256: Backward((Tile(16, 16, 4),), Tile(16, 16, 4), Tile(16, 16, 4))},
}
BACKWARD[_TENSOR_MEMORY, 2] = BACKWARD[_WARPGROUPS, 2]


@functools.cache
def _matrix_units(device: object) -> str:
    target = driver.active.get_current_target()
    if target.backend != "cuda":
        return _AMD
    return {9: _WARPGROUPS, 10: _TENSOR_MEMORY}.get(target.arch // 10, _WARPS)


def _of_size(sizes: dict, head_size: int):
    return next(sizes[limit] for limit in sizes if head_size <= limit)


def _units() -> str:
    return _WARPGROUPS if INTERPRETED else _matrix_units(driver.active.get_current_device())


def _forward_tile(call: _Call) -> Tile:
    size, head_size = call.tensors[0].element_size(), call.options["D"]
    if call.options["BY_QUERY"]:
        return _of_size(BY_QUERY[_units(), size], head_size)[0]
    tiles = _of_size(FORWARD[_units(), size], head_size)
    return next((tile for tile in tiles if call.keys <= tile.keys), tiles[-1])


def _backward_tiles(call: _Call) -> tuple[Tile, Tile | None]:
    """The tile that is the whole head, and None; or the tiles of q and kv."""
    size, head_size = call.tensors[0].element_size(), call.options["D"]
    if call.options["BY_QUERY"]:
        return _of_size(BY_QUERY[_units(), size], head_size)
    config = _of_size(BACKWARD[_units(), size], head_size)
    for tile in config.whole:
        if call.queries <= tile.queries and call.keys <= tile.keys:
            return tile, None
    additive = call.options["MASK"] == _ADDITIVE.value
    return (config.additive or config.q) if additive else config.q, config.kv


class _Call(typing.NamedTuple):
    """What the kernels of one call share."""

    programs: int  # per tile of queries or keys
    queries: int  # of the longest sequence
    keys: int
    tensors: tuple  # query to seed
    strides: tuple
    sizes: tuple  # heads, queries, keys
    numbers: tuple  # scale, threshold, keep_scale
    grad: tuple  # grad and its strides
    options: dict

    def arguments(self, tiles: int) -> tuple:
        return (*self.tensors, *self.strides, *self.sizes, tiles, *self.numbers, *self.grad)


def _prepare(query, key, value, mask, lengths, cu_seqlens, max_seqlen, scale, dropout_p, seed, grad=None) -> _Call:
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, grad) if x is not None]
    strides = [x.stride() for x in tensors]
    unit = 16 // query.element_size()
    # Rows on 16-byte boundaries are loaded 16 bytes at a time; strides are given in such units, or in elements.
    for x, steps in zip(tensors, strides, strict=True):
        if any(step % unit for step in steps[:-1]) or x.data_ptr() % 16:
            unit = 1
            break
    if cu_seqlens is None:
        batch, queries, heads, head_size = query.shape
        keys = key.shape[1]
        longest = queries, keys
        steps = [s // unit for x in strides for s in x[:3]]
        widest = max(x[1] for x in strides)
    else:
        queries, heads, head_size = query.shape
        batch, keys = cu_seqlens.shape[0] - 1, queries
        longest = max_seqlen, max_seqlen
        steps = [s // unit for x in strides for s in (0, x[0], x[1])]
        widest = max(x[0] for x in strides)
    threshold, keep_scale = threshold_and_scale(dropout_p)
    kind = _NO_MASK.value if mask is None else _BOOL.value if mask.dtype == torch.bool else _ADDITIVE.value
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    per_query = lengths is not None and lengths.dim() == 2
    options = {
        "D": head_size,
        "BLOCK_D": max(16, 1 << (head_size - 1).bit_length()),
        "UNIT": unit,
        "WIDE": max(widest, heads * head_size) > (1 << 31) // 256,
        "MASK": kind,
        "LENGTHS": 0 if lengths is None else _PER_QUERY.value if per_query else _PER_BATCH.value,
        "BY_QUERY": per_query or mask_strides[2] != 0,
        "FOLD": kind != _ADDITIVE.value and scale > 0,
        "DROPOUT": threshold != 0,
    }
    return _Call(
        batch * heads,
        *longest,
        (*tensors[:3], mask, lengths, cu_seqlens, seed if threshold else None),
        (*steps[:9], *mask_strides),
        (heads, queries, keys),
        (scale, threshold, keep_scale),
        (*tensors[3:], *steps[9:]),
        options,
    )


def _launch(kernel, call: _Call, tile: Tile, tiles: int, *arguments, **options) -> None:
    kernel[(call.programs * tiles,)](
        *call.arguments(tiles),
        *arguments,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **call.options,
        **options,
        **OPTIONS,
    )


def forward(
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
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape)
    shape = query.shape[-2::-1] if cu_seqlens is not None else (query.shape[0], query.shape[2], query.shape[1])
    lse = query.new_empty(shape, dtype=torch.float32)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_(), lse.fill_(math.inf)
    call = _prepare(query, key, value, mask, lengths, cu_seqlens, max_seqlen, scale, dropout_p, seed)
    tile = _forward_tile(call)
    tiles, one = cdiv(call.queries, tile.queries), call.keys <= tile.keys
    _launch(_attention_forward, call, tile, tiles, out, lse, ONE_TILE=one)
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    if dq.numel() == 0 or dk.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    call = _prepare(query, key, value, mask, lengths, cu_seqlens, max_seqlen, scale, dropout_p, seed, grad)
    tile, kv_tile = _backward_tiles(call)
    if kv_tile is None:
        _launch(_attention_backward_kv, call, tile, 1, lse, None, None, dq, dk, dv, ONE_TILE=True)
        return dq, dk, dv
    delta = torch.empty_like(lse)
    norm = torch.empty_like(lse) if call.options["MASK"] == _ADDITIVE.value else None
    tiles = cdiv(call.queries, tile.queries)
    _launch(_attention_backward_q, call, tile, tiles, out, lse, delta, norm, dq)
    tiles = cdiv(call.keys, kv_tile.keys)
    _launch(_attention_backward_kv, call, kv_tile, tiles, lse, delta, norm, None, dk, dv, ONE_TILE=False)
    return dq, dk, dv


def static_cases() -> Iterator[StaticCase]:
    from .offline import bytes_of, meta

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    # batch, longest sequence, head size, dtype, form, dropout_p; sequences have two thirds of the longest
    cases = [
        (batch, seqlen, 64, bf16, form, 0.1)
        for batch, seqlen in ((256, 128), (64, 512))
        for form in (
            "packed",
            "lengths",
            "lengths per query",
            "bool",
            "additive",
            "bool per query",
            "additive per query",
        )
    ]
    cases += [
        (256, 128, 64, bf16, "packed", 0.0),
        (64, 512, 64, bf16, "packed", 0.0),
        (64, 512, 40, bf16, "packed", 0.1),
    ]
    cases += [
        (64, seqlen, head_size, dtype, "packed", 0.1)
        for dtype in (bf16, fp16, fp32)
        for head_size in (64, 128, 256)
        for seqlen in (32, 64, 128, 512)
        if (dtype, head_size, seqlen) != (bf16, 64, 512)
    ]
    cases += [
        (64, 512, head_size, dtype, form, 0.1)
        for dtype, head_size in ((bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128), (fp32, 256))
        for form in ("additive", "additive per query")
    ]
    for batch, seqlen, head_size, dtype, form, dropout_p in cases:
        heads, valid = 768 // head_size, 2 * seqlen // 3
        packed = form == "packed"
        lead = (batch * valid,) if packed else (batch, seqlen)
        x, seed = meta(*lead, heads, head_size, dtype=dtype), meta(1, dtype=torch.int64)
        lse = meta(*((heads, batch * valid) if packed else (batch, heads, seqlen)), dtype=fp32)
        mask = lengths = starts = None
        if packed:
            starts = meta(batch + 1, dtype=torch.int32)
        elif form.startswith("lengths"):
            lengths = meta(*((batch, seqlen) if "query" in form else (batch,)), dtype=torch.int32)
        else:
            queries = seqlen if "query" in form else 1
            mask = meta(batch, 1, queries, seqlen, dtype=torch.bool if "bool" in form else fp32)
            mask = mask.expand(batch, heads, seqlen, seqlen)
        inputs = (mask, lengths, starts, seqlen if packed else 0, 0.125, dropout_p, seed)
        what = f"{batch} x {heads} x {seqlen} x {head_size}, {str(dtype).removeprefix('torch.')}, {form}, p {dropout_p}"
        pairs = batch * heads * valid * (valid if packed else seqlen)
        extra = sum(bytes_of(t) for t in (mask, lengths, starts, lse) if t is not None)
        integers = OPERATIONS_PER_PAIR * pairs // 2 if dropout_p else 0
        ci = (head_size, dtype, form, dropout_p) == (64, bf16, "packed", 0.1) and seqlen in (128, 512)
        yield StaticCase(
            f"forward {what}",
            partial(forward, x, x, x, *inputs),
            4 * bytes_of(x) + extra,
            4 * pairs * head_size,
            integers,
            ci,
        )
        yield StaticCase(
            f"backward {what}",
            partial(backward, x, x, x, x, x, lse, *inputs),
            7 * bytes_of(x) + extra,
            10 * pairs * head_size,
            integers,
            ci,
        )
