"""gelu(x + bias), exact or tanh, and its backward.

Memory-bound. Forward reads x and writes y once; backward reads x and grad and writes dx once: the least possible. The
bias gradient is summed in the same pass, each program over the rows it has, in float32; the sums of the programs,
about 1% of the traffic, are added up in a second step, in a fixed order.

At 4 bytes an element a GPU of 4.3 TB/s leaves room for about 27 instructions each, and erf takes more, since both of
its branches are computed. Here Phi(-t) = exp(-t^2 / 2) * R(t), where R, the Mills ratio over sqrt(2 pi), is a
polynomial in u = 1 / (1 + t / 4): one exponential, which the derivative needs as well, and one reciprocal. For
16-bit results four terms less do. Reciprocals of d > 0 are written rsqrt(d * d), which is one instruction and a
product everywhere, while a quotient costs a range reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .column_sums import column_sums
from .launch import OPTIONS, Config, cdiv, choose, rows_of

# By columns: rows of up to that many take tiles of the last entry that fits.
FORWARD = (Config(64, 64, 4), Config(16, 256, 4), Config(4, 1024, 4))
BACKWARD = (Config(32, 64, 4, 3), Config(16, 128, 4, 3))
# Programs of a backward launch: enough to fill a GPU of 132 multiprocessors, few enough to keep partial sums small.
BACKWARD_PROGRAMS = 1056


@triton.jit
def _normal(x, PRECISE: tl.constexpr):
    """Phi(x), and phi(x) times sqrt(2 pi). Relative error 6e-8, or 6e-5 if not PRECISE."""
    t = tl.abs(x)
    e = tl.exp2(x * x * -0.7213475204444817)
    d = 1.0 + t * 0.25
    u = tl.rsqrt(d * d)
    if PRECISE:
        p = 2.572335117e-2 * u - 1.528086960e-1
        p = p * u + 2.961206436e-1
        p = p * u - 2.057820112e-1
        p = p * u + 2.017575949e-1
        p = p * u + 3.292812407e-2
        p = p * u + 1.037466526e-1
        p = p * u + 9.851684421e-2
        p = p * u + 9.979747981e-2
    else:
        p = 2.406929464e-1 * u - 1.016920225e-1
        p = p * u + 1.785232340e-1
        p = p * u + 8.118500232e-2
        p = p * u + 1.012656712e-1
    tail = e * (p * u)
    return tl.where(x < 0, tail, 1.0 - tail), e


@triton.jit
def _sigmoid(x):
    """tanh form: gelu(x) = x * sigmoid(2 v), v = sqrt(2 / pi) (x + 0.044715 x^3); in powers of two."""
    d = 1.0 + tl.exp2(x * -2.302208198144325 * (1.0 + 0.044715 * (x * x)))
    return tl.rsqrt(d * d)


@triton.jit
def _value(x, TANH: tl.constexpr, PRECISE: tl.constexpr):
    if TANH:
        return x * _sigmoid(x)
    else:
        cdf, _ = _normal(x, PRECISE)
        return x * cdf


@triton.jit
def _derivative(x, TANH: tl.constexpr, PRECISE: tl.constexpr):
    if TANH:
        s = _sigmoid(x)
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406641266895886 * (x * x))
    else:
        cdf, e = _normal(x, PRECISE)
        return cdf + x * e * 0.3989422804014327


@triton.jit(do_not_specialize=["count"])
def forward_kernel(
    x_ptr,  # [count, columns], rows x_stride apart
    bias_ptr,  # [columns] or None
    y_ptr,  # [count, columns] contiguous
    x_stride,
    count,
    columns,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile; tiles of one row of tiles are neighbours."""
    tiles = tl.cdiv(columns, COLUMNS)
    pid = tl.program_id(0)
    row = (pid // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (pid % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    y = _value(x, TANH, y_ptr.dtype.element_ty == tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "rows_each"])
def backward_kernel(
    grad_ptr,  # [count, columns], rows grad_stride apart
    x_ptr,  # [count, columns], rows x_stride apart
    bias_ptr,  # [columns] or None
    dx_ptr,  # [count, columns] contiguous
    sums_ptr,  # [cdiv(count, rows_each), columns] float32: the bias gradient of each part; unused without bias
    grad_stride,
    x_stride,
    count,
    columns,
    rows_each,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """COLUMNS columns of ``rows_each`` rows, a tile at a time."""
    tiles = tl.cdiv(columns, COLUMNS)
    pid = tl.program_id(0)
    part = (pid // tiles).to(tl.int64)
    column = (pid % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, count)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < end) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += bias
        dx = grad * _derivative(x, TANH, dx_ptr.dtype.element_ty == tl.float32)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if bias_ptr is not None:
            total += dx
    if bias_ptr is not None:
        sums = tl.sum(total, axis=0)[None, :]
        tl.store(sums_ptr + part * columns + column, sums, mask=column < columns)


def _backward_split(config: Config, count: int, columns: int) -> tuple[int, int]:
    """Tiles of columns, and rows of each program: a multiple of the tile's."""
    tiles = cdiv(columns, config.columns)
    parts = max(1, min(BACKWARD_PROGRAMS // tiles, cdiv(count, 4 * config.rows)))
    return tiles, cdiv(cdiv(count, parts), config.rows) * config.rows


def forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    columns = x.shape[-1] if x.dim() else 1
    count = x.numel() // columns
    x, x_stride = rows_of(x)
    rows, block, num_warps, _ = choose(FORWARD, columns)
    forward_kernel[(cdiv(count, rows) * cdiv(columns, block),)](
        x,
        None if bias is None else bias.contiguous(),
        y,
        x_stride,
        count,
        columns,
        approximate == "tanh",
        rows,
        block,
        num_warps=num_warps,
        **OPTIONS,
    )
    return y


def backward(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    columns = x.shape[-1] if x.dim() else 1
    if x.numel() == 0:
        return dx, x.new_zeros(0 if bias is None else columns, dtype=torch.float32)
    count = x.numel() // columns
    x, x_stride = rows_of(x)
    grad, grad_stride = rows_of(grad)
    config = choose(BACKWARD, columns)
    tiles, rows_each = _backward_split(config, count, columns)
    parts = cdiv(count, rows_each)
    sums = x.new_empty((0 if bias is None else parts, 1, columns), dtype=torch.float32)
    backward_kernel[(tiles * parts,)](
        grad,
        x,
        None if bias is None else bias.contiguous(),
        dx,
        sums,
        grad_stride,
        x_stride,
        count,
        columns,
        rows_each,
        approximate == "tanh",
        config.rows,
        config.columns,
        config.num_stages,
        num_warps=config.num_warps,
        **OPTIONS,
    )
    return dx, sums.view(-1) if bias is None else column_sums(sums)[0]
