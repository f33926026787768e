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

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import StaticCase
from .column_sums import column_sums
from .launch import OPTIONS, Config, cdiv, choose, rows_of

if TYPE_CHECKING:
    from .tune import Tunable

# By columns: rows of up to that many take tiles of the last entry that fits.
FORWARD = (Config(64, 64, 4), Config(16, 256, 4), Config(4, 1024, 4))
BACKWARD = (Config(32, 64, 4, 3), Config(16, 128, 4, 3))
# Programs of a backward launch: enough to fill a GPU of 132 multiprocessors, few enough to keep partial sums small.
BACKWARD_PROGRAMS = 1056


@triton.jit
def _magnitude(x):
    """|x|, at most 20, where exp(-t^2 / 2) is 0, so that an infinity times it is 0 as well; NaN stays."""
    return tl.minimum(tl.abs(x), 20.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tail(t, PRECISE: tl.constexpr):
    """exp(-t^2 / 2) and R(t), whose product is Phi(-t), for t >= 0. Relative error 6e-8, or 6e-5 if not PRECISE."""
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
    return tl.exp2(t * t * -0.7213475204444817), p * u


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
        # x Phi(x) = max(x, 0) - |x| Phi(-|x|)
        t = _magnitude(x)
        e, r = _tail(t, PRECISE)
        return tl.maximum(x, 0.0) - (t * e) * r


@triton.jit
def _derivative(x, TANH: tl.constexpr, PRECISE: tl.constexpr):
    if TANH:
        s = _sigmoid(x)
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406641266895886 * (x * x))
    else:
        # Phi(x) + x phi(x), which is Phi(-t) - t phi(t) at x = -t, and one minus that at x = t
        t = _magnitude(x)
        e, r = _tail(t, PRECISE)
        below = e * (r - t * 0.3989422804014327)
        return tl.where(x < 0, below, 1.0 - below)


@triton.jit
def _load(pointers, column, columns, EVEN: tl.constexpr):
    """In float32; EVEN: all columns are inside, else those outside are 0."""
    if EVEN:
        return tl.load(pointers + column).to(tl.float32)
    else:
        return tl.load(pointers + column, mask=column < columns, other=0.0).to(tl.float32)


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
    EVEN: tl.constexpr,  # columns is a multiple of COLUMNS
):
    """One tile; the tiles of the same rows are neighbours. Rows past the end read the last one."""
    tiles = tl.cdiv(columns, COLUMNS)
    pid = tl.program_id(0)
    row = (pid // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (pid % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row < count if EVEN else (row < count) & (column < columns)
    row = tl.minimum(row, count - 1)
    x = _load(x_ptr + row * x_stride, column, columns, EVEN)
    if bias_ptr is not None:
        x += _load(bias_ptr, column, columns, EVEN)
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
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """COLUMNS columns of ``rows_each`` rows, a tile at a time; a row past the end reads the last, and counts as 0."""
    tiles = tl.cdiv(columns, COLUMNS)
    pid = tl.program_id(0)
    part = (pid // tiles).to(tl.int64)
    column = (pid % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, count)
    if bias_ptr is not None:
        bias = _load(bias_ptr, column, columns, EVEN)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        valid = row < end
        row = tl.minimum(row, end - 1)
        x = _load(x_ptr + row * x_stride, column, columns, EVEN)
        grad = tl.where(valid, _load(grad_ptr + row * grad_stride, column, columns, EVEN), 0.0)
        if bias_ptr is not None:
            x += bias
        dx = grad * _derivative(x, TANH, dx_ptr.dtype.element_ty == tl.float32)
        inside = valid if EVEN else valid & (column < columns)
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
        columns % block == 0,
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
        columns % config.columns == 0,
        config.num_stages,
        num_warps=config.num_warps,
        **OPTIONS,
    )
    return dx, sums.view(-1) if bias is None else column_sums(sums)[0]


def static_cases() -> Iterator[StaticCase]:
    from .offline import bytes_of, meta

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for tokens, columns, dtype, approximate, ci in (
        (4096, 3072, bf16, "none", True),
        (32768, 3072, bf16, "none", False),
        (32768, 3072, bf16, "tanh", False),
        (32768, 3072, fp16, "none", False),
        (32768, 3072, fp32, "none", False),
        (32768, 3072, fp32, "tanh", False),
        (32768, 256, bf16, "none", False),
        (32768, 256, fp32, "none", False),
        (32768, 64, bf16, "none", False),
        (32768, 64, fp32, "none", False),
        (32768, 771, bf16, "none", False),
    ):
        x, bias = meta(tokens, columns, dtype=dtype), meta(columns, dtype=dtype)
        shape = f"{tokens} x {columns}, {str(dtype).removeprefix('torch.')}, {approximate}"
        vectors = bytes_of(bias)
        yield StaticCase(f"forward {shape}", partial(forward, x, bias, approximate), 2 * bytes_of(x) + vectors, ci=ci)
        call = partial(backward, x, x, bias, approximate)
        yield StaticCase(f"backward {shape}", call, 3 * bytes_of(x) + vectors + 4 * columns, ci=ci)


def tunables() -> Iterator[Tunable]:
    from .tune import Tunable

    for table, entries in (("FORWARD", FORWARD), ("BACKWARD", BACKWARD)):
        for config in entries:
            columns = 3072 if config == entries[-1] else config.columns
            x = torch.randn(32768, columns, dtype=torch.bfloat16, device="cuda")
            bias = torch.randn(columns, dtype=torch.bfloat16, device="cuda")
            call = partial(forward, x, bias, "none") if table == "FORWARD" else partial(backward, x, x, bias, "none")
            yield Tunable(table, config, call)
