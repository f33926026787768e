"""LayerNorm(residual + dropout(x + x_bias)) and its backward.

Memory-bound. Forward reads x and residual and writes the output once. Backward reads the two again and the incoming
gradient, recomputes sum, mean and variance of a row in registers, and writes the two gradients once (one where nothing
is dropped, since they are then equal): the least possible, given that nothing but the inputs is kept. The gradients of
weight, bias and x_bias are summed in the same pass, each program over the rows it has, in float32; the sums of the
programs are added up in a second step, in a fixed order.

A row of up to 8,192 is held in the registers of one program. Forward gives a row of up to 1,024 to a single warp, so
that its two reductions are shuffles alone, and takes the vectors from the first-level cache. Backward holds three sums
per column besides, hence more warps; its loop is pipelined, so that the next row arrives while this one is reduced.
Longer rows are read in chunks, three times; their column sums are a pass of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .column_sums import column_sums
from .dropout import keep, row_keys, seed_key, threshold_and_scale
from .launch import OPTIONS, Config, cdiv, choose, rows_of

# Rows per step, by columns.
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
    Config(16, 64, 4, 2),
    Config(8, 128, 4, 2),
    Config(4, 256, 4, 2),
    Config(2, 512, 4, 2),
    Config(1, 1024, 4, 2),
    Config(1, 2048, 8, 2),
    Config(1, 4096, 16),
    Config(1, 8192, 32),
)
# Rows longer than the tables' last entry: chunks of a row, and tiles of their column sums.
LONG = Config(1, 4096, 8)
LONG_SUMS = Config(16, 128, 4)
# Programs of a backward launch: enough to fill a GPU of 132 multiprocessors, few enough to keep partial sums small.
BACKWARD_PROGRAMS = 528


@triton.jit
def _keys(seed_ptr, rows_ptr, row, count):
    """Dropout's keys of rows: row i is token ``rows[i]``, or i, of the padded batch."""
    token = row
    if rows_ptr is not None:
        token = tl.load(rows_ptr + row, mask=row < count, other=0)
    return row_keys(seed_key(seed_ptr), token >> 32, token)


@triton.jit
def _sum(x, residual, x_bias_ptr, column, columns, k0, k1, threshold, scale, DROPOUT: tl.constexpr):
    """residual + dropout(x + x_bias) in float32, and which elements dropout kept (all, without it)."""
    y = x.to(tl.float32)
    kept = column < columns
    if x_bias_ptr is not None:
        y += tl.load(x_bias_ptr + column, mask=kept, other=0.0).to(tl.float32)
    if DROPOUT:
        kept = keep(k0, k1, column, threshold)
        y = tl.where(kept, y * scale, 0.0)
    return residual.to(tl.float32) + y, kept


@triton.jit
def _statistics(y, inside, columns, eps):
    """Mean and reciprocal standard deviation of each row; y is 0 where not ``inside``."""
    mean = tl.sum(y, axis=1, keep_dims=True) / columns
    centered = tl.where(inside, y - mean, 0.0)
    variance = tl.sum(centered * centered, axis=1, keep_dims=True) / columns
    return mean, tl.rsqrt(variance + eps)


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
    COLUMNS: tl.constexpr,
):
    """ROWS rows, each whole."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    k0, k1 = 0, 0
    if seed_ptr is not None:
        k0, k1 = _keys(seed_ptr, rows_ptr, row, count)
    y, _ = _sum(x, residual, x_bias_ptr, column, columns, k0, k1, threshold, scale, seed_ptr is not None)
    mean, rstd = _statistics(y, inside, columns, eps)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    out = (y - mean) * rstd * weight + bias
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


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
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``rows_each`` rows, ROWS at a time, each whole."""
    part = tl.program_id(0).to(tl.int64)
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, count)
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    dx_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < end) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        k0, k1 = 0, 0
        if seed_ptr is not None:
            k0, k1 = _keys(seed_ptr, rows_ptr, row, end)
        y, kept = _sum(x, residual, x_bias_ptr, column, columns, k0, k1, threshold, scale, seed_ptr is not None)
        mean, rstd = _statistics(y, inside, columns, eps)
        # Rows past the end must add nothing, whatever eps makes of their variance of 0.
        normal = tl.where(inside, (y - mean) * rstd, 0.0)
        dweight += grad * normal
        dbias += grad
        grad *= weight
        c1 = tl.sum(grad * normal, axis=1, keep_dims=True) / columns
        c2 = tl.sum(grad, axis=1, keep_dims=True) / columns
        dy = (grad - c2 - normal * c1) * rstd
        at = row * columns + column
        tl.store(dresidual_ptr + at, dy.to(dresidual_ptr.dtype.element_ty), mask=inside)
        dx = dy
        if seed_ptr is not None:
            dx = tl.where(kept, dy * scale, 0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if x_bias_ptr is not None:
            dx_bias += tl.where(inside, dx, 0.0)
    _store_sums(sums_ptr, part, dweight, dbias, dx_bias, column, columns, x_bias_ptr is not None)


@triton.jit
def _chunk(x_ptr, residual_ptr, x_bias_ptr, column, columns, k0, k1, threshold, scale, DROPOUT: tl.constexpr):
    """:func:`_sum` of a chunk of one row, whose x and residual start at the pointers; 0 past its end."""
    x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
    residual = tl.load(residual_ptr + column, mask=column < columns, other=0.0)
    y, kept = _sum(x, residual, x_bias_ptr, column, columns, k0, k1, threshold, scale, DROPOUT)
    return y, kept & (column < columns)


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
    """:func:`_statistics` of one long row."""
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        y, _ = _chunk(x_ptr, residual_ptr, x_bias_ptr, column, columns, k0, k1, threshold, scale, DROPOUT)
        total += tl.where(column < columns, y, 0.0)
    mean = tl.sum(total, axis=0) / columns
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        y, _ = _chunk(x_ptr, residual_ptr, x_bias_ptr, column, columns, k0, k1, threshold, scale, DROPOUT)
        centered = tl.where(column < columns, y - mean, 0.0)
        total += centered * centered
    return mean, tl.rsqrt(tl.sum(total, axis=0) / columns + eps)


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
    row = tl.program_id(0).to(tl.int64)
    k0, k1 = 0, 0
    if seed_ptr is not None:
        k0, k1 = _keys(seed_ptr, rows_ptr, row, count)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    dropout: tl.constexpr = seed_ptr is not None
    mean, rstd = _long_statistics(
        x_ptr, residual_ptr, x_bias_ptr, columns, k0, k1, threshold, scale, eps, dropout, COLUMNS
    )
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        y, _ = _chunk(x_ptr, residual_ptr, x_bias_ptr, column, columns, k0, k1, threshold, scale, dropout)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
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
    row = tl.program_id(0).to(tl.int64)
    k0, k1 = 0, 0
    if seed_ptr is not None:
        k0, k1 = _keys(seed_ptr, rows_ptr, row, count)
    grad_ptr += row * grad_stride
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    dropout: tl.constexpr = seed_ptr is not None
    mean, rstd = _long_statistics(
        x_ptr, residual_ptr, x_bias_ptr, columns, k0, k1, threshold, scale, eps, dropout, COLUMNS
    )
    total1 = tl.zeros([COLUMNS], tl.float32)
    total2 = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        y, _ = _chunk(x_ptr, residual_ptr, x_bias_ptr, column, columns, k0, k1, threshold, scale, dropout)
        grad = tl.load(grad_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        grad *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        total1 += grad * ((y - mean) * rstd)
        total2 += grad
    rows_sums_ptr += row * 4
    tl.store(rows_sums_ptr, mean)
    tl.store(rows_sums_ptr + 1, rstd)
    tl.store(rows_sums_ptr + 2, tl.sum(total1, axis=0) / columns)
    tl.store(rows_sums_ptr + 3, tl.sum(total2, axis=0) / columns)


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
    column = (pid % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    dx_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < end) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(rows_sums_ptr + row * 4, mask=row < end, other=0.0)
        rstd = tl.load(rows_sums_ptr + row * 4 + 1, mask=row < end, other=0.0)
        c1 = tl.load(rows_sums_ptr + row * 4 + 2, mask=row < end, other=0.0)
        c2 = tl.load(rows_sums_ptr + row * 4 + 3, mask=row < end, other=0.0)
        k0, k1 = 0, 0
        if seed_ptr is not None:
            k0, k1 = _keys(seed_ptr, rows_ptr, row, end)
        y, kept = _sum(x, residual, x_bias_ptr, column, columns, k0, k1, threshold, scale, seed_ptr is not None)
        normal = (y - mean) * rstd
        dweight += grad * normal
        dbias += grad
        dy = (grad * weight - c2 - normal * c1) * rstd
        at = row * columns + column
        tl.store(dresidual_ptr + at, dy.to(dresidual_ptr.dtype.element_ty), mask=inside)
        dx = dy
        if seed_ptr is not None:
            dx = tl.where(kept, dy * scale, 0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if x_bias_ptr is not None:
            dx_bias += tl.where(inside, dx, 0.0)
    _store_sums(sums_ptr, part, dweight, dbias, dx_bias, column, columns, x_bias_ptr is not None)


def _backward_split(rows: int, tiles: int, count: int) -> int:
    """Rows of each program: a multiple of ``rows``."""
    parts = max(1, min(BACKWARD_PROGRAMS // tiles, cdiv(count, 16 * rows)))
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
            *arguments, config.rows, config.columns, num_warps=config.num_warps, **OPTIONS
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
            config.columns,
            config.num_stages,
            num_warps=config.num_warps,
            **OPTIONS,
        )
    dweight, dbias, *dx_bias = column_sums(sums)
    return dx, dresidual, dweight, dbias, dx_bias[0] if dx_bias else torch.zeros_like(dbias)
