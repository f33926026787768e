"""Cross-entropy of hidden @ weight^T + bias, and its gradients in the same sweep.

The three products, 2 R V N operations each for R rows, V words and N columns, are cuBLAS's, and are nearly all of it:
at R = 614, V = 30,522, N = 768 they take 86 GFLOP, 109 us at 790 TFLOP/s. What stands between the first and the other
two is memory-bound: a slice of logits (``fastbert.ops.masked_lm_loss.sweep``) becomes its own gradient in place, at
least one read and one write. Here it is two reads and one write, 26 us for the 37 MB of logits above if they all came
from memory:

1. Statistics: maximum and sum of exponentials of tiles of 4 rows, enough of them to fill the GPU however few the rows.
2. Rows: the tiles of a row put together; its loss.
3. Gradient: softmax - onehot, written over the logits; the same tiles are summed over their rows for the bias.

One read would take whole rows in registers (30,522 of them: a multiprocessor each), which reads the bias, in float32
twice the size of a row, once a row instead of once for 4, and leaves the column sums another pass over the logits. The
second read comes from the second-level cache as far as the slice fits.

Rows of the logits are padded to 128 bytes, whatever V: 30,522 would align neither a product's tiles nor a vector load.

The number of labelled rows is known to the device alone, and nothing waits for it: all rows given take part, those
without a label as zeros, whatever they hold. The gradients are those of the sum; 1 / count comes as a factor for
backward, which multiplies by the loss's gradient anyway, and in float16 probabilities of 1e-5 are not divided by
thousands of rows before the products. No atomics, no scalar read back, no size that depends on data.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.ops.masked_lm_loss import SLICE_BYTES, sweep

from . import StaticCase
from .column_sums import column_sums
from .launch import OPTIONS, Config, cdiv, choose, rows_of

if TYPE_CHECKING:
    from .tune import Tunable

# One entry serves every vocabulary: a row is cut into tiles.
STATISTICS = (Config(4, 1024, 4),)
GRADIENT = (Config(2, 1024, 4, 3),)
COPY = Config(4, 256, 4)
# Tiles of a row, at most, whose statistics are put together by ROWS.
PARTS = 64
ROWS = Config(8, PARTS, 4)
# Programs of a gradient launch: enough to fill a GPU of 132 multiprocessors, few enough to keep partial sums small.
GRADIENT_PROGRAMS = 1056
# Elements per program of the elementwise kernel, and per step of the last one.
ELEMENTS = 4096
# Rows of logits are padded to a multiple.
PITCH = 64


@triton.jit(do_not_specialize=["count", "ignore_index"])
def select_kernel(
    hidden_ptr,  # [count, columns], rows hidden_stride apart
    labels_ptr,  # [count] int64
    out_ptr,  # [count, columns] contiguous: zeros where there is no label
    hidden_stride,
    count,
    columns,
    ignore_index,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tiles = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < columns)
    label = tl.load(labels_ptr + row, mask=row < count, other=0)
    h = tl.load(hidden_ptr + row * hidden_stride + column, mask=inside & (label != ignore_index), other=0.0)
    tl.store(out_ptr + row * columns + column, h, mask=inside)


@triton.jit
def _bias(bias_ptr, start, columns, COLUMNS: tl.constexpr):
    """Columns from ``start`` in float32. V is rarely a multiple of a vector: only the last tile is masked."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    if start + COLUMNS <= columns:
        bias = tl.load(bias_ptr + column)
    else:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
    return bias.to(tl.float32)


@triton.jit
def _exponentials(s, most):
    """exp(s - most), where most is the largest; 0 where -inf. (The difference first: it cannot overflow.)"""
    return tl.exp2((s - tl.where(most == float("-inf"), 0.0, most)) * 1.4426950408889634)


@triton.jit(do_not_specialize=["count", "tiles_each"])
def statistics_kernel(
    logits_ptr,  # [count, columns], rows pitch apart
    bias_ptr,  # [columns] or None
    labels_ptr,  # [count] int64
    parts_ptr,  # [2, count, parts] float32: maxima, and sums of exp(logit - maximum)
    of_label_ptr,  # [count] float32: the logit at the label; NaN if it is no word
    pitch,
    count,
    columns,
    tiles_each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``tiles_each`` tiles of ROWS rows, one at a time. What a row holds past its columns is read, not used."""
    parts = tl.cdiv(columns, tiles_each * COLUMNS)
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    begin = part * tiles_each
    most = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    for tile in range(begin, tl.minimum(begin + tiles_each, tl.cdiv(columns, COLUMNS))):
        start = tile * COLUMNS
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < count) & (column < pitch)
        s = tl.load(logits_ptr + row * pitch + column, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            s += _bias(bias_ptr, start, columns, COLUMNS)
        s = tl.where(column < columns, s, float("-inf"))
        higher = tl.maximum(most, tl.max(s, axis=1, keep_dims=True))
        total = total * _exponentials(most, higher) + tl.sum(_exponentials(s, higher), axis=1, keep_dims=True)
        most = higher
    at = parts_ptr + row * parts + part
    tl.store(at, most, mask=row < count)
    tl.store(at + count.to(tl.int64) * parts, total, mask=row < count)
    if part == 0:
        label = tl.load(labels_ptr + row, mask=row < count, other=-1)
        valid = (label >= 0) & (label < columns)
        label = tl.where(valid, label, 0)
        s = tl.load(logits_ptr + row * pitch + label, mask=valid, other=float("nan")).to(tl.float32)
        if bias_ptr is not None:
            s += tl.load(bias_ptr + label, mask=valid, other=0.0).to(tl.float32)
        tl.store(of_label_ptr + row, s, mask=row < count)


@triton.jit(do_not_specialize=["count", "parts", "ignore_index"])
def rows_kernel(
    labels_ptr,  # [count] int64
    parts_ptr,  # [2, count, parts] float32
    of_label_ptr,  # [count] float32
    rows_ptr,  # [2, count] float32: maximum, and log2 of the sum of exp(logit - maximum)
    losses_ptr,  # [count] float32: -log softmax at the label, 0 without one
    count,
    parts,
    ignore_index,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    part = tl.arange(0, PARTS)[None, :]
    inside = (row < count) & (part < parts)
    at = parts_ptr + row * parts + part
    most_of_part = tl.load(at, mask=inside, other=float("-inf"))
    total_of_part = tl.load(at + count.to(tl.int64) * parts, mask=inside, other=0.0)
    most = tl.max(most_of_part, axis=1, keep_dims=True)
    total = tl.sum(total_of_part * _exponentials(most_of_part, most), axis=1, keep_dims=True)
    total = tl.log2(tl.where(row < count, total, 1.0))
    tl.store(rows_ptr + row, most, mask=row < count)
    tl.store(rows_ptr + count + row, total, mask=row < count)
    label = tl.load(labels_ptr + row, mask=row < count, other=ignore_index)
    loss = total * 0.6931471805599453 + (most - tl.load(of_label_ptr + row, mask=row < count, other=0.0))
    tl.store(losses_ptr + row, tl.where(label == ignore_index, 0.0, loss), mask=row < count)


@triton.jit(do_not_specialize=["count", "rows_each", "ignore_index"])
def gradient_kernel(
    logits_ptr,  # [count, columns], rows pitch apart
    out_ptr,  # the same memory
    bias_ptr,  # [columns] or None
    labels_ptr,  # [count] int64
    rows_ptr,  # [2, count] float32
    sums_ptr,  # [cdiv(count, rows_each), 1, columns] float32: column sums of each part; None where not wanted
    pitch,
    count,
    columns,
    rows_each,
    ignore_index,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """COLUMNS columns of ``rows_each`` rows, a tile at a time: softmax - onehot, or zeros without a label.

    What a row holds past its columns is read, not used, and overwritten.
    """
    tiles = tl.cdiv(columns, COLUMNS)
    part = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * COLUMNS
    column = first + tl.arange(0, COLUMNS)[None, :]
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, count)
    if bias_ptr is not None:
        bias = _bias(bias_ptr, first, columns, COLUMNS)
    if sums_ptr is not None:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < end) & (column < pitch)
        s = tl.load(logits_ptr + row * pitch + column, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            s += bias
        most = tl.load(rows_ptr + row, mask=row < end, other=0.0)
        total = tl.load(rows_ptr + count + row, mask=row < end, other=0.0)
        label = tl.load(labels_ptr + row, mask=row < end, other=ignore_index)
        on = label != ignore_index
        label = tl.where((label >= 0) & (label < columns), label, -1).to(tl.int32)
        p = tl.exp2((s - most) * 1.4426950408889634 - total)
        p = tl.where(on, tl.where(column == label, p - 1.0, p), 0.0)
        tl.store(out_ptr + row * pitch + column, p.to(out_ptr.dtype.element_ty), mask=inside)
        if sums_ptr is not None:
            sums += p
    if sums_ptr is not None:
        tl.store(sums_ptr + part * columns + column, tl.sum(sums, axis=0)[None, :], mask=column < columns)


@triton.jit(do_not_specialize=["count", "ignore_index"])
def mean_kernel(
    losses_ptr,  # [count] float32
    labels_ptr,  # [count] int64
    loss_ptr,  # scalar float32: the mean over the labelled rows, 0 if there are none
    scale_ptr,  # scalar float32: 1 / labelled rows, 1 if there are none
    count,
    ignore_index,
    ELEMENTS: tl.constexpr,
):
    """One program: the rows are few beside what the products take for each."""
    total = tl.zeros([ELEMENTS], tl.float32)
    labelled = tl.zeros([ELEMENTS], tl.int32)
    for start in range(0, count, ELEMENTS):
        row = start + tl.arange(0, ELEMENTS)
        total += tl.load(losses_ptr + row, mask=row < count, other=0.0)
        label = tl.load(labels_ptr + row, mask=row < count, other=ignore_index)
        labelled += (label != ignore_index).to(tl.int32)
    scale = 1.0 / tl.maximum(tl.sum(labelled, axis=0), 1).to(tl.float32)
    tl.store(loss_ptr, tl.sum(total, axis=0) * scale)
    tl.store(scale_ptr, scale)


@triton.jit
def scale_kernel(
    x_ptr,  # [count]
    factor_ptr,  # scalar
    y_ptr,  # [count]
    count,
    ELEMENTS: tl.constexpr,
):
    """x * factor, the product in float32: a loss scale of 65,536 is no float16."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    y = x * tl.load(factor_ptr).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


def _labelled(hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """``hidden`` with zeros in the rows without a label: what these hold reaches no product, NaN included."""
    count, columns = hidden.shape
    out = hidden.new_empty(count, columns)
    hidden, stride = rows_of(hidden)
    rows, block, num_warps, _ = COPY
    select_kernel[(cdiv(count, rows) * cdiv(columns, block),)](
        hidden, labels, out, stride, count, columns, ignore_index, rows, block, num_warps=num_warps, **OPTIONS
    )
    return out


def _statistics(logits: Tensor, bias: Tensor | None, labels: Tensor, losses: Tensor, ignore_index: int) -> Tensor:
    """Fills ``losses``; returns what :func:`gradient_kernel` needs to know of the rows."""
    (count, columns), pitch = logits.shape, logits.stride(0)
    rows, block, num_warps, _ = choose(STATISTICS, columns)
    tiles_each = cdiv(cdiv(columns, block), PARTS)
    parts = cdiv(columns, tiles_each * block)
    found, of_label = losses.new_empty(2, count, parts), losses.new_empty(count)
    statistics_kernel[(cdiv(count, rows) * parts,)](
        logits,
        bias,
        labels,
        found,
        of_label,
        pitch,
        count,
        columns,
        tiles_each,
        rows,
        block,
        num_warps=num_warps,
        **OPTIONS,
    )
    rows_statistics = losses.new_empty(2, count)
    rows_kernel[(cdiv(count, ROWS.rows),)](
        labels,
        found,
        of_label,
        rows_statistics,
        losses,
        count,
        parts,
        ignore_index,
        ROWS.rows,
        ROWS.columns,
        num_warps=ROWS.num_warps,
        **OPTIONS,
    )
    return rows_statistics


def _gradient(
    logits: Tensor, bias: Tensor | None, labels: Tensor, statistics: Tensor, ignore_index: int, with_sums: bool
) -> Tensor | None:
    """Overwrites ``logits`` with their gradient; its column sums, if asked for."""
    count, columns = logits.shape
    rows, block, num_warps, stages = choose(GRADIENT, columns)
    tiles = cdiv(columns, block)
    parts = max(1, min(GRADIENT_PROGRAMS // tiles, cdiv(count, 8 * rows)))
    rows_each = cdiv(cdiv(count, parts), rows) * rows
    parts = cdiv(count, rows_each)
    sums = statistics.new_empty(parts, 1, columns) if with_sums else None
    gradient_kernel[(parts * tiles,)](
        logits,
        logits,
        bias,
        labels,
        statistics,
        sums,
        logits.stride(0),
        count,
        columns,
        rows_each,
        ignore_index,
        rows,
        block,
        stages,
        num_warps=num_warps,
        **OPTIONS,
    )
    return column_sums(sums)[0] if with_sums else None


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (count, _), vocabulary = hidden.shape, weight.shape[0]
    labels = labels.contiguous()
    bias = None if bias is None else bias.contiguous()
    if wanted[1] and count:
        hidden = _labelled(hidden, labels, ignore_index)
    losses = hidden.new_empty(count, dtype=torch.float32)

    def to_gradient(logits: Tensor, begin: int, end: int) -> Tensor | None:
        slice_labels = labels[begin:end]
        statistics = _statistics(logits, bias, slice_labels, losses[begin:end], ignore_index)
        if not any(wanted):
            return None
        return _gradient(logits, bias, slice_labels, statistics, ignore_index, wanted[2])

    pitch = cdiv(vocabulary, PITCH) * PITCH
    gradients = sweep(hidden, weight, wanted, SLICE_BYTES["triton"], pitch, to_gradient)
    loss, scale = hidden.new_empty((), dtype=torch.float32), hidden.new_empty((), dtype=torch.float32)
    mean_kernel[(1,)](losses, labels, loss, scale, count, ignore_index, ELEMENTS, num_warps=8, **OPTIONS)
    return loss, *gradients, scale


def backward(factor: Tensor, *found: Tensor) -> tuple[Tensor, ...]:
    """Each of ``found`` times the scalar ``factor``."""
    scaled = []
    for x in found:
        y = x.new_empty(x.shape)
        x, count = x.contiguous(), x.numel()
        if count:
            scale_kernel[(cdiv(count, ELEMENTS),)](x, factor, y, count, ELEMENTS, num_warps=8, **OPTIONS)
        scaled.append(y)
    return tuple(scaled)


def static_cases() -> Iterator[StaticCase]:
    from .offline import bytes_of, meta

    bf16, fp16, fp32, int64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
    # rows, vocabulary, columns, dtype, which gradients
    for rows, vocabulary, columns, dtype, wanted in (
        (614, 30522, 768, bf16, "all"),
        (4915, 30522, 768, bf16, "all"),
        (4915, 30522, 768, fp16, "all"),
        (4915, 30522, 768, fp32, "all"),
        (4915, 30522, 768, bf16, "none"),
        (614, 30522, 771, bf16, "all"),
        (614, 250002, 768, bf16, "all"),
        (614, 20000, 256, fp32, "all"),
    ):
        hidden, weight = meta(rows, columns, dtype=dtype), meta(vocabulary, columns, dtype=dtype)
        bias, labels = meta(vocabulary, dtype=fp32), meta(rows, dtype=int64)
        shape = f"{rows} x {columns}, {vocabulary} words, {str(dtype).removeprefix('torch.')}"
        wants, ci = [wanted == "all"] * 3, (rows, columns) == (614, 768) and vocabulary == 30522
        # What lies between the products: logits read and written once, or read alone.
        logits = rows * vocabulary * dtype.itemsize
        least = (2 if any(wants) else 1) * logits + bytes_of(bias) + bytes_of(labels)
        least += bytes_of(bias) if any(wants) else 0
        flops = (3 if any(wants) else 1) * 2 * rows * vocabulary * columns
        call = partial(forward, hidden, weight, bias, labels, -100, wants)
        name = f"forward {shape}, gradients {wanted}; bytes without the products'"
        yield StaticCase(name, call, least, flops=flops, ci=ci)
        if any(wants):
            found = (hidden, weight, bias)
            call = partial(backward, meta(dtype=fp32), *found)
            yield StaticCase(f"backward {shape}", call, 2 * sum(map(bytes_of, found)), ci=ci)


def tunables() -> Iterator[Tunable]:
    from .tune import Tunable

    logits = torch.randn(1024, 30528, dtype=torch.bfloat16, device="cuda")[:, :30522]
    bias, losses = torch.randn(30522, device="cuda"), torch.empty(1024, device="cuda")
    labels = torch.randint(30522, (1024,), device="cuda")
    statistics = _statistics(logits, bias, labels, losses, -100)
    yield Tunable("STATISTICS", STATISTICS[0], partial(_statistics, logits, bias, labels, losses, -100))
    yield Tunable("GRADIENT", GRADIENT[0], partial(_gradient, logits, bias, labels, statistics, -100, True))
