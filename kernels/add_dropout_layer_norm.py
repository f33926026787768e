"""LayerNorm(residual + dropout(x + x_bias)) and its backward.

Memory-bound. Forward reads x and residual and writes the output once. Backward reads the two again and the incoming
gradient, recomputes sum, mean and variance of a row in registers, and writes the two gradients once (one where nothing
is dropped, since they are then equal): the least possible, given that nothing but the inputs is kept. The gradients of
weight, bias and x_bias are summed in the same pass, each program over the rows it has, in float32; the sums of the
programs are added up in a second step, in a fixed order.

A row of up to 8,192 is held in the registers of one program, in two pieces where its length is no power of two: what is
computed per element leaves no instruction slot to waste on idle lanes. A row of up to 1,024 belongs to a single warp,
so that reductions are shuffles alone and the work of a row that is not of an element (dropout's keys, addresses) is
done once: several warps take twice the instructions. Forward takes the vectors from the first-level cache. Backward
holds three sums per column besides, so that few warps are resident; its loop is pipelined instead, the next rows on
their way while one is reduced. Longer rows are read in chunks, three times; their column sums are a pass of their own.
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
from .column_sums import column_sums
from .dropout import OPERATIONS_PER_PAIR, keep_tile, row_keys, seed_key, threshold_and_scale
from .launch import OPTIONS, Config, cdiv, choose, rows_of

if TYPE_CHECKING:
    from .tune import Tunable

# Rows per step, by columns: a power of two, or one and its half, so that BERT's 768 leaves no lane idle.
FORWARD = (
    Config(16, 64, 1),
    Config(8, 128, 1),
    Config(4, 256, 1),
    Config(2, 384, 1),
    Config(2, 512, 1),
    Config(1, 768, 1),
    Config(1, 1024, 1),
    Config(1, 1536, 2),
    Config(1, 2048, 2),
    Config(1, 3072, 4),
    Config(1, 4096, 4),
    Config(1, 8192, 8),
)
BACKWARD = (
    Config(8, 64, 1, 3),
    Config(4, 128, 1, 3),
    Config(2, 256, 1, 3),
    Config(1, 384, 1, 3),
    Config(1, 512, 1, 3),
    Config(1, 768, 1, 3),
    Config(1, 1024, 2, 3),
    Config(1, 1536, 4, 3),
    Config(1, 2048, 4, 3),
    Config(1, 3072, 8, 2),
    Config(1, 4096, 8, 2),
    Config(1, 8192, 8),
)
# Rows longer than the tables' last entry: chunks of a row, and tiles of their column sums.
LONG = Config(1, 2048, 8)
LONG_SUMS = Config(16, 128, 4)
# Programs of a backward launch: as many as 132 multiprocessors hold at once; fewer if each had less than 16 rows or 4
# steps, so that the partial sums, which stay in the second-level cache, remain small beside the rows.
BACKWARD_PROGRAMS = 1056


@triton.jit
def _keys(seed_ptr, rows_ptr, row):
    """Dropout's keys of rows: row i is token ``rows[i]``, or i, of the padded batch."""
    token = row
    if rows_ptr is not None:
        token = tl.load(rows_ptr + row)
    return row_keys(seed_key(seed_ptr), token >> 32, token)


@triton.jit
def _load(pointers, column, columns, EVEN: tl.constexpr):
    """In float32; EVEN: all columns are inside, else those outside are 0."""
    if EVEN:
        return tl.load(pointers + column).to(tl.float32)
    else:
        return tl.load(pointers + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _sum(
    x_rows,
    residual_rows,
    x_bias_ptr,
    start,
    columns,
    k0,
    k1,
    threshold,
    scale,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """residual + dropout(x + x_bias) of COLUMNS columns from ``start`` on in float32, 0 outside; and what was kept."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    y = _load(x_rows, column, columns, EVEN)
    kept = column >= 0
    if x_bias_ptr is not None:
        y += _load(x_bias_ptr, column, columns, EVEN)
    if DROPOUT:
        kept = keep_tile(k0, k1, start, COLUMNS, threshold)
        y = tl.where(kept, y * scale, 0.0)
    return _load(residual_rows, column, columns, EVEN) + y, kept


@triton.jit
def _centered(y, mean, column, columns, EVEN: tl.constexpr):
    """y - mean, 0 outside."""
    return y - mean if EVEN else tl.where(column < columns, y - mean, 0.0)


@triton.jit
def _store(rows, column, columns, values, valid, EVEN: tl.constexpr):
    mask = valid if EVEN else valid & (column < columns)
    tl.store(rows + column, values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _row_sum(x):
    return tl.sum(x, axis=1, keep_dims=True)


@triton.jit(do_not_specialize=["threshold", "count"])
def forward_kernel(
    x_ptr,  # [count, columns], rows x_stride apart
    residual_ptr,  # [count, columns], rows residual_stride apart
    weight_ptr,  # [columns]
    bias_ptr,  # [columns]
    x_bias_ptr,  # [columns] or None
    seed_ptr,  # [1] int64; None without dropout
    rows_ptr,  # [count] int64 or None
    out_ptr,  # [count, columns] contiguous
    x_stride,
    residual_stride,
    count,
    columns,
    threshold,
    scale,
    eps,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,  # a row is a piece of HEAD columns and, if it is longer, one of TAIL
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,  # columns == HEAD + TAIL
):
    """ROWS rows, each whole."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    valid = row < count
    if ROWS > 1:  # a row past the end reads the last one instead, and is not written
        row = tl.minimum(row, count - 1)
    DROPOUT: tl.constexpr = seed_ptr is not None
    HEAD_EVEN: tl.constexpr = EVEN or TAIL > 0
    k0, k1 = 0, 0
    if DROPOUT:
        k0, k1 = _keys(seed_ptr, rows_ptr, row)
    x_rows, residual_rows = x_ptr + row * x_stride, residual_ptr + row * residual_stride
    head = tl.arange(0, HEAD)[None, :]
    y, _ = _sum(x_rows, residual_rows, x_bias_ptr, 0, columns, k0, k1, threshold, scale, HEAD, DROPOUT, HEAD_EVEN)
    mean = _row_sum(y)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        z, _ = _sum(x_rows, residual_rows, x_bias_ptr, HEAD, columns, k0, k1, threshold, scale, TAIL, DROPOUT, EVEN)
        mean += _row_sum(z)
    mean /= columns
    y = _centered(y, mean, head, columns, HEAD_EVEN)
    variance = _row_sum(y * y)
    if TAIL > 0:
        z = _centered(z, mean, tail, columns, EVEN)
        variance += _row_sum(z * z)
    rstd = tl.rsqrt(variance / columns + eps)
    out_rows = out_ptr + row * columns
    y = y * rstd * _load(weight_ptr, head, columns, HEAD_EVEN) + _load(bias_ptr, head, columns, HEAD_EVEN)
    _store(out_rows, head, columns, y, valid, HEAD_EVEN)
    if TAIL > 0:
        z = z * rstd * _load(weight_ptr, tail, columns, EVEN) + _load(bias_ptr, tail, columns, EVEN)
        _store(out_rows, tail, columns, z, valid, EVEN)


@triton.jit
def _backward_store(
    dx_rows, dresidual_rows, column, columns, dy, kept, scale, valid, DROPOUT: tl.constexpr, EVEN: tl.constexpr
):
    """Write both gradients of a piece; returns that of x."""
    _store(dresidual_rows, column, columns, dy, valid, EVEN)
    if DROPOUT:
        dy *= tl.where(kept, scale, 0.0)
    if dx_rows is not None:
        _store(dx_rows, column, columns, dy, valid, EVEN)
    return dy


@triton.jit
def _store_sums(sums_ptr, part, dweight, dbias, dx_bias, column, columns, WITH_X_BIAS: tl.constexpr):
    """Sums over the rows of three tiles, as a program's part of ``sums``."""
    sums_ptr += part * (3 if WITH_X_BIAS else 2) * columns
    tl.store(sums_ptr + column, tl.sum(dweight, axis=0)[None, :], mask=column < columns)
    tl.store(sums_ptr + columns + column, tl.sum(dbias, axis=0)[None, :], mask=column < columns)
    if WITH_X_BIAS:
        tl.store(sums_ptr + 2 * columns + column, tl.sum(dx_bias, axis=0)[None, :], mask=column < columns)


@triton.jit(do_not_specialize=["threshold", "count", "rows_each"])
def backward_kernel(
    grad_ptr,  # [count, columns], rows grad_stride apart
    x_ptr,  # [count, columns], rows x_stride apart
    residual_ptr,  # [count, columns], rows residual_stride apart
    weight_ptr,  # [columns]
    x_bias_ptr,  # [columns] or None
    seed_ptr,  # [1] int64; None without dropout
    rows_ptr,  # [count] int64 or None
    dx_ptr,  # [count, columns] contiguous; None where it equals dresidual
    dresidual_ptr,  # [count, columns] contiguous
    sums_ptr,  # [parts, 3, columns] float32, 2 without x_bias: gradients of weight, bias, x_bias
    grad_stride,
    x_stride,
    residual_stride,
    count,
    columns,
    rows_each,
    threshold,
    scale,
    eps,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``rows_each`` rows, ROWS at a time, each whole, in pieces as :func:`forward_kernel` has them."""
    part = tl.program_id(0).to(tl.int64)
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, count)
    DROPOUT: tl.constexpr = seed_ptr is not None
    WITH_X_BIAS: tl.constexpr = x_bias_ptr is not None
    HEAD_EVEN: tl.constexpr = EVEN or TAIL > 0
    head = tl.arange(0, HEAD)[None, :]
    weight = _load(weight_ptr, head, columns, HEAD_EVEN)
    dweight = tl.zeros([ROWS, HEAD], tl.float32)
    dbias = tl.zeros([ROWS, HEAD], tl.float32)
    dx_bias = tl.zeros([ROWS, HEAD], tl.float32)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        weight_tail = _load(weight_ptr, tail, columns, EVEN)
        dweight_tail = tl.zeros([ROWS, TAIL], tl.float32)
        dbias_tail = tl.zeros([ROWS, TAIL], tl.float32)
        dx_bias_tail = tl.zeros([ROWS, TAIL], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        valid = row < end
        if ROWS > 1:  # a row past the end reads the last one instead; its gradient counts as 0 and is not written
            row = tl.minimum(row, end - 1)
        k0, k1 = 0, 0
        if DROPOUT:
            k0, k1 = _keys(seed_ptr, rows_ptr, row)
        x_rows, residual_rows, grad_rows = (
            x_ptr + row * x_stride,
            residual_ptr + row * residual_stride,
            grad_ptr + row * grad_stride,
        )
        y, kept = _sum(
            x_rows, residual_rows, x_bias_ptr, 0, columns, k0, k1, threshold, scale, HEAD, DROPOUT, HEAD_EVEN
        )
        grad = _load(grad_rows, head, columns, HEAD_EVEN)
        if ROWS > 1:
            grad = tl.where(valid, grad, 0.0)
        mean = _row_sum(y)
        if TAIL > 0:
            z, kept_tail = _sum(
                x_rows, residual_rows, x_bias_ptr, HEAD, columns, k0, k1, threshold, scale, TAIL, DROPOUT, EVEN
            )
            grad_tail = _load(grad_rows, tail, columns, EVEN)
            if ROWS > 1:
                grad_tail = tl.where(valid, grad_tail, 0.0)
            mean += _row_sum(z)
        mean /= columns
        y = _centered(y, mean, head, columns, HEAD_EVEN)
        variance = _row_sum(y * y)
        if TAIL > 0:
            z = _centered(z, mean, tail, columns, EVEN)
            variance += _row_sum(z * z)
        rstd = tl.rsqrt(variance / columns + eps)
        y *= rstd
        dweight += grad * y
        dbias += grad
        grad *= weight
        c1, c2 = _row_sum(grad * y), _row_sum(grad)
        if TAIL > 0:
            z *= rstd
            dweight_tail += grad_tail * z
            dbias_tail += grad_tail
            grad_tail *= weight_tail
            c1 += _row_sum(grad_tail * z)
            c2 += _row_sum(grad_tail)
        c1 /= columns
        c2 /= columns
        dresidual_rows = dresidual_ptr + row * columns
        dx_rows = dx_ptr
        if dx_ptr is not None:
            dx_rows = dx_ptr + row * columns
        dy = (grad - c2 - y * c1) * rstd
        dy = _backward_store(dx_rows, dresidual_rows, head, columns, dy, kept, scale, valid, DROPOUT, HEAD_EVEN)
        if WITH_X_BIAS:
            dx_bias += dy if ROWS == 1 else tl.where(valid, dy, 0.0)
        if TAIL > 0:
            dy = (grad_tail - c2 - z * c1) * rstd
            dy = _backward_store(dx_rows, dresidual_rows, tail, columns, dy, kept_tail, scale, valid, DROPOUT, EVEN)
            if WITH_X_BIAS:
                dx_bias_tail += dy if ROWS == 1 else tl.where(valid, dy, 0.0)
    _store_sums(sums_ptr, part, dweight, dbias, dx_bias, head, columns, WITH_X_BIAS)
    if TAIL > 0:
        _store_sums(sums_ptr, part, dweight_tail, dbias_tail, dx_bias_tail, tail, columns, WITH_X_BIAS)


@triton.jit
def _long_statistics(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    columns,
    k0,
    k1,
    threshold,
    scale,
    eps,
    DROPOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mean and reciprocal standard deviation of one long row."""
    total = tl.zeros([1, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        y, _ = _sum(x_ptr, residual_ptr, x_bias_ptr, start, columns, k0, k1, threshold, scale, COLUMNS, DROPOUT, False)
        total += y
    mean = _row_sum(total) / columns
    total = tl.zeros([1, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        y, _ = _sum(x_ptr, residual_ptr, x_bias_ptr, start, columns, k0, k1, threshold, scale, COLUMNS, DROPOUT, False)
        y = _centered(y, mean, column, columns, False)
        total += y * y
    return mean, tl.rsqrt(_row_sum(total) / columns + eps)


@triton.jit(do_not_specialize=["threshold", "count"])
def forward_long_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    x_bias_ptr,
    seed_ptr,
    rows_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    count,
    columns,
    threshold,
    scale,
    eps,
    COLUMNS: tl.constexpr,
):
    """One row, COLUMNS at a time; arguments as :func:`forward_kernel` has them."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    k0, k1 = 0, 0
    if seed_ptr is not None:
        k0, k1 = _keys(seed_ptr, rows_ptr, row)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    DROPOUT: tl.constexpr = seed_ptr is not None
    mean, rstd = _long_statistics(
        x_ptr, residual_ptr, x_bias_ptr, columns, k0, k1, threshold, scale, eps, DROPOUT, COLUMNS
    )
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        y, _ = _sum(x_ptr, residual_ptr, x_bias_ptr, start, columns, k0, k1, threshold, scale, COLUMNS, DROPOUT, False)
        weight = _load(weight_ptr, column, columns, False)
        bias = _load(bias_ptr, column, columns, False)
        out = (y - mean) * rstd * weight + bias
        tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["threshold", "count"])
def backward_long_rows_kernel(
    grad_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_bias_ptr,
    seed_ptr,
    rows_ptr,
    rows_sums_ptr,  # [count, 4] float32: mean, rstd, and the two means that backward subtracts
    grad_stride,
    x_stride,
    residual_stride,
    count,
    columns,
    threshold,
    scale,
    eps,
    COLUMNS: tl.constexpr,
):
    """What :func:`backward_long_tiles_kernel` needs to know of a row; arguments as :func:`backward_kernel` has them."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    k0, k1 = 0, 0
    if seed_ptr is not None:
        k0, k1 = _keys(seed_ptr, rows_ptr, row)
    grad_ptr += row * grad_stride
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    DROPOUT: tl.constexpr = seed_ptr is not None
    mean, rstd = _long_statistics(
        x_ptr, residual_ptr, x_bias_ptr, columns, k0, k1, threshold, scale, eps, DROPOUT, COLUMNS
    )
    total1 = tl.zeros([1, COLUMNS], tl.float32)
    total2 = tl.zeros([1, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        y, _ = _sum(x_ptr, residual_ptr, x_bias_ptr, start, columns, k0, k1, threshold, scale, COLUMNS, DROPOUT, False)
        grad = _load(grad_ptr, column, columns, False) * _load(weight_ptr, column, columns, False)
        total1 += grad * ((y - mean) * rstd)
        total2 += grad
    rows_sums_ptr += row * 4
    tl.store(rows_sums_ptr, mean)
    tl.store(rows_sums_ptr + 1, rstd)
    tl.store(rows_sums_ptr + 2, _row_sum(total1) / columns)
    tl.store(rows_sums_ptr + 3, _row_sum(total2) / columns)


@triton.jit(do_not_specialize=["threshold", "count", "rows_each"])
def backward_long_tiles_kernel(
    grad_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_bias_ptr,
    seed_ptr,
    rows_ptr,
    dx_ptr,
    dresidual_ptr,
    sums_ptr,
    rows_sums_ptr,
    grad_stride,
    x_stride,
    residual_stride,
    count,
    columns,
    rows_each,
    threshold,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of ``rows_each`` rows, a tile at a time; arguments as :func:`backward_kernel` has them."""
    tiles = tl.cdiv(columns, COLUMNS)
    pid = tl.program_id(0)
    part = (pid // tiles).to(tl.int64)
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, count)
    first = (pid % tiles) * COLUMNS
    column = first + tl.arange(0, COLUMNS)[None, :]
    DROPOUT: tl.constexpr = seed_ptr is not None
    weight = _load(weight_ptr, column, columns, False)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    dx_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        valid = row < end
        row = tl.minimum(row, end - 1)
        k0, k1 = 0, 0
        if DROPOUT:
            k0, k1 = _keys(seed_ptr, rows_ptr, row)
        x_rows, residual_rows = x_ptr + row * x_stride, residual_ptr + row * residual_stride
        y, kept = _sum(
            x_rows, residual_rows, x_bias_ptr, first, columns, k0, k1, threshold, scale, COLUMNS, DROPOUT, False
        )
        grad = tl.where(valid, _load(grad_ptr + row * grad_stride, column, columns, False), 0.0)
        of_row = rows_sums_ptr + row * 4
        rstd = tl.load(of_row + 1)
        y = (y - tl.load(of_row)) * rstd
        dweight += grad * y
        dbias += grad
        dy = (grad * weight - tl.load(of_row + 3) - y * tl.load(of_row + 2)) * rstd
        dresidual_rows = dresidual_ptr + row * columns
        dx_rows = dx_ptr
        if dx_ptr is not None:
            dx_rows = dx_ptr + row * columns
        dy = _backward_store(dx_rows, dresidual_rows, column, columns, dy, kept, scale, valid, DROPOUT, False)
        dx_bias += tl.where(valid, dy, 0.0)
    _store_sums(sums_ptr, part, dweight, dbias, dx_bias, column, columns, x_bias_ptr is not None)


def _pieces(columns: int) -> tuple[int, int]:
    """HEAD and TAIL of a tile: powers of two, or 0, that add up to ``columns``."""
    head = 1 << (columns.bit_length() - 1)
    return head, columns - head


def _backward_split(rows: int, tiles: int, count: int) -> int:
    """Rows of each program: a multiple of ``rows``."""
    parts = max(1, min(BACKWARD_PROGRAMS // tiles, cdiv(count, max(16, 4 * rows))))
    return cdiv(cdiv(count, parts), rows) * rows


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    x_bias: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    dropout_p: float,
    eps: float,
) -> Tensor:
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    columns = x.shape[-1]
    count = x.numel() // columns
    if count == 0:
        return out
    threshold, scale = threshold_and_scale(dropout_p)
    x, x_stride = rows_of(x)
    residual, residual_stride = rows_of(residual)
    config = choose(FORWARD, columns)
    long = columns > config.columns
    arguments = (
        x,
        residual,
        weight.contiguous(),
        bias.contiguous(),
        None if x_bias is None else x_bias.contiguous(),
        seed if threshold else None,
        rows,
        out,
        x_stride,
        residual_stride,
        count,
        columns,
        threshold,
        scale,
        eps,
    )
    if long:
        forward_long_kernel[(count,)](*arguments, LONG.columns, num_warps=LONG.num_warps, **OPTIONS)
    else:
        forward_kernel[(cdiv(count, config.rows),)](
            *arguments,
            config.rows,
            *_pieces(config.columns),
            columns == config.columns,
            num_warps=config.num_warps,
            **OPTIONS,
        )
    return out


def backward(
    grad: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    x_bias: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    dropout_p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    threshold, scale = threshold_and_scale(dropout_p)
    dresidual = residual.new_empty(residual.shape)
    one_gradient = not threshold and x.dtype == residual.dtype
    dx = x.new_empty(0 if one_gradient else x.shape)
    columns = x.shape[-1]
    count = x.numel() // columns
    if count == 0:
        return dx, dresidual, *(x.new_zeros(columns, dtype=torch.float32) for _ in range(3))
    x, x_stride = rows_of(x)
    residual, residual_stride = rows_of(residual)
    grad, grad_stride = rows_of(grad)
    inputs = (
        grad,
        x,
        residual,
        weight.contiguous(),
        None if x_bias is None else x_bias.contiguous(),
        seed if threshold else None,
        rows,
    )
    config = choose(BACKWARD, columns)
    long = columns > config.columns
    if long:
        config = LONG_SUMS
    tiles = cdiv(columns, config.columns)
    rows_each = _backward_split(config.rows, tiles, count)
    parts = cdiv(count, rows_each)
    sums = x.new_empty((parts, 2 if x_bias is None else 3, columns), dtype=torch.float32)
    outputs = (None if one_gradient else dx, dresidual, sums)
    sizes = (grad_stride, x_stride, residual_stride, count, columns)
    if long:
        rows_sums = x.new_empty((count, 4), dtype=torch.float32)
        backward_long_rows_kernel[(count,)](
            *inputs, rows_sums, *sizes, threshold, scale, eps, LONG.columns, num_warps=LONG.num_warps, **OPTIONS
        )
        backward_long_tiles_kernel[(tiles * parts,)](
            *inputs,
            *outputs,
            rows_sums,
            *sizes,
            rows_each,
            threshold,
            scale,
            config.rows,
            config.columns,
            num_warps=config.num_warps,
            **OPTIONS,
        )
    else:
        backward_kernel[(parts,)](
            *inputs,
            *outputs,
            *sizes,
            rows_each,
            threshold,
            scale,
            eps,
            config.rows,
            *_pieces(config.columns),
            columns == config.columns,
            config.num_stages,
            num_warps=config.num_warps,
            **OPTIONS,
        )
    dweight, dbias, *dx_bias = column_sums(sums)
    return dx, dresidual, dweight, dbias, dx_bias[0] if dx_bias else torch.zeros_like(dbias)


def static_cases() -> Iterator[StaticCase]:
    from .offline import bytes_of, meta

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    # tokens, columns, dtypes of x and residual, dropout_p, packed
    cases = [
        (4096, 768, bf16, bf16, 0.1, False),
        (32768, 768, bf16, bf16, 0.1, False),
        (32768, 768, bf16, bf16, 0.1, True),
        (32768, 768, bf16, bf16, 0.0, False),
        (32768, 768, bf16, fp32, 0.1, False),
        (32768, 768, fp16, fp16, 0.1, False),
        (32768, 768, fp32, fp32, 0.1, False),
        (32768, 771, bf16, bf16, 0.1, False),
    ]
    widths = [config.columns for config in FORWARD] + [2 * FORWARD[-1].columns]
    cases += [(4096, columns, dtype, dtype, 0.1, False) for columns in widths for dtype in (bf16, fp32)]
    for tokens, columns, dtype, residual_dtype, dropout_p, packed in cases:
        x, residual = meta(tokens, columns, dtype=dtype), meta(tokens, columns, dtype=residual_dtype)
        vector, seed = meta(columns, dtype=fp32), meta(1, dtype=torch.int64)
        rows = meta(tokens, dtype=torch.int64) if packed else None
        out = meta(tokens, columns, dtype=torch.promote_types(dtype, residual_dtype))
        extra = 8 * tokens if packed else 0
        shape = f"{tokens} x {columns}, {' + '.join(str(d).removeprefix('torch.') for d in {dtype, residual_dtype})}"
        shape += f", p {dropout_p}" + (", packed" if packed else "")
        inputs, ci = (vector, vector, vector, seed, rows, dropout_p, 1e-12), (tokens, columns) == (4096, 768)
        integer_ops = OPERATIONS_PER_PAIR * x.numel() // 2 if dropout_p else 0
        least = sum(map(bytes_of, (x, residual, out, vector, vector, vector))) + extra
        call = partial(forward, x, residual, *inputs)
        yield StaticCase(f"forward {shape}", call, least, integer_ops=integer_ops, ci=ci)
        least = 2 * bytes_of(residual) + bytes_of(x) + bytes_of(out) + 5 * bytes_of(vector) + extra
        if dropout_p or dtype != residual_dtype:
            least += bytes_of(x)
        call = partial(backward, out, x, residual, *inputs)
        yield StaticCase(f"backward {shape}", call, least, integer_ops=integer_ops, ci=ci)


def tunables() -> Iterator[Tunable]:
    from .tune import Tunable

    for table, entries in (("FORWARD", FORWARD), ("BACKWARD", BACKWARD)):
        for config in entries:
            x, residual, grad = torch.randn(
                3, 32768 * 768 // config.columns, config.columns, dtype=torch.bfloat16, device="cuda"
            )
            vector = torch.randn(config.columns, device="cuda")
            inputs = (x, residual, vector, vector, vector, torch.zeros(1, dtype=torch.int64, device="cuda"), None)
            inputs += (0.1, 1e-12)
            yield Tunable(
                table, config, partial(forward, *inputs) if table == "FORWARD" else partial(backward, grad, *inputs)
            )
