"""dropout(LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids])) and its backward.

Memory-bound. Forward reads three table rows a token, which repeat and mostly come from the second-level cache, and
writes the output once; the sum of the three never reaches memory. Backward has three steps:

1. Rows: gathers again, recomputes the statistics, writes the gradient of the sum in float32, sums the gradients of
   weight and bias, and notes which row of which table each token read.
2. Those notes, of all three tables in one numbering, are sorted: one stable sort of 16-bit numbers where they suffice
   (BERT's 30,522 + 512 + 2 rows do), hence two passes of a radix sort. The tokens of a table row are then a run.
3. Tables: a program owns a row of a table and writes the sum of its run, or zeros: the tables, dense and mostly zeros,
   are written once and never read, cleared or updated. A frequent id has a run of thousands: whole chunks of CHUNK
   tokens within a run are summed beforehand, side by side, so that its program adds at most 2 CHUNK rows and one for
   each chunk. The small tables come first in the numbering: their long runs start early and overlap the rest.

No atomics: every sum is taken in one order, that of the tokens. For 4,096 tokens of BERT-base the gradient of word
takes 94 of the 110 MB that backward must move, and the gradient of the sum, 13 MB written once and read once for each
table, stays in the second-level cache. It no longer does for 32,768 tokens: 518 MB instead of 198, 121 us at 4.3 TB/s,
of a training step some 300 times as long.

On a GPU ids are not checked, which would synchronise. One outside its table reads zeros and adds to no gradient.
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
from .dropout import OPERATIONS_PER_PAIR, keep, row_keys, seed_key, threshold_and_scale
from .launch import OPTIONS, Config, cdiv, choose, rows_of

if TYPE_CHECKING:
    from .tune import Tunable

# Tokens per step, by columns; no longer rows are taken (TRITON_COLUMNS of the op).
FORWARD = (
    Config(8, 64, 1),
    Config(8, 128, 1),
    Config(4, 256, 1),
    Config(2, 512, 1),
    Config(1, 1024, 2),
    Config(1, 2048, 4),
    Config(1, 4096, 8),
)
BACKWARD = (
    Config(4, 64, 4, 2),
    Config(8, 128, 4, 2),
    Config(4, 256, 4, 2),
    Config(1, 512, 4, 2),
    Config(1, 1024, 8, 2),
    Config(1, 2048, 16, 2),
    Config(1, 4096, 16),
)
# Rows of a run added at a time, by columns; longer rows take several tiles.
TABLES = (Config(8, 64, 1), Config(8, 128, 1), Config(8, 256, 2), Config(4, 512, 2), Config(4, 1024, 4))
# Programs of a backward launch: enough to fill a GPU of 132 multiprocessors, few enough to keep partial sums small.
BACKWARD_PROGRAMS = 528
NUMBERED_IN_16_BITS = 1 << 15
# Tokens of a run that are summed beforehand: the program of a row in all tokens of 32k adds 126 rows and 512 sums.
CHUNK = 64


@triton.jit
def _number(id, size, first, none):
    """Of a table row among the rows of all tables, or ``none`` if there is no such row."""
    return tl.where((id >= 0) & (id < size), first + id, none)


@triton.jit
def _load(pointers, column, columns, EVEN: tl.constexpr):
    """In float32; EVEN: all columns are inside, else those outside are 0."""
    if EVEN:
        return tl.load(pointers + column).to(tl.float32)
    else:
        return tl.load(pointers + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _gather(table_ptr, id, size, stride, column, columns, EVEN: tl.constexpr):
    """Rows ``id`` of a table in float32; zeros for an id that is not in it, for which the first row is read."""
    valid = (id >= 0) & (id < size)
    return tl.where(valid, _load(table_ptr + tl.where(valid, id, 0) * stride, column, columns, EVEN), 0.0)


@triton.jit
def _normalise(y, column, columns, eps, EVEN: tl.constexpr):
    """(y - mean) * rstd of each row, and rstd; y is 0 outside the columns, and so is the result."""
    mean = tl.sum(y, axis=1, keep_dims=True) / columns
    centered = y - mean
    if not EVEN:
        centered = tl.where(column < columns, centered, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1, keep_dims=True) / columns + eps)
    return centered * rstd, rstd


@triton.jit
def _keep(seed_ptr, rows_ptr, row, column, threshold):
    """Which elements dropout keeps: row i is token ``rows[i]``, or i, of the padded batch."""
    token = row
    if rows_ptr is not None:
        token = tl.load(rows_ptr + row)
    k0, k1 = row_keys(seed_key(seed_ptr), token >> 32, token)
    return keep(k0, k1, column, threshold)


@triton.jit(do_not_specialize=["count", "words", "types", "positions", "threshold"])
def forward_kernel(
    input_ids_ptr,  # [count] int64 each
    token_type_ids_ptr,
    position_ids_ptr,
    word_ptr,  # [words, columns], rows word_stride apart; no table is without a row
    token_type_ptr,  # [types, columns], rows token_type_stride apart
    position_ptr,  # [positions, columns], rows position_stride apart
    weight_ptr,  # [columns]
    bias_ptr,  # [columns]
    seed_ptr,  # [1] int64; None without dropout
    rows_ptr,  # [count] int64 or None
    out_ptr,  # [count, columns] contiguous
    word_stride,
    token_type_stride,
    position_stride,
    words,
    types,
    positions,
    count,
    columns,
    threshold,
    scale,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # columns is COLUMNS
):
    """ROWS tokens, each whole. Tokens past the end read the last one."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = row < count if EVEN else (row < count) & (column < columns)
    row = tl.minimum(row, count - 1)
    y = _gather(word_ptr, tl.load(input_ids_ptr + row), words, word_stride, column, columns, EVEN)
    y += _gather(token_type_ptr, tl.load(token_type_ids_ptr + row), types, token_type_stride, column, columns, EVEN)
    y += _gather(position_ptr, tl.load(position_ids_ptr + row), positions, position_stride, column, columns, EVEN)
    normal, _ = _normalise(y, column, columns, eps, EVEN)
    out = normal * _load(weight_ptr, column, columns, EVEN) + _load(bias_ptr, column, columns, EVEN)
    if seed_ptr is not None:
        out = tl.where(_keep(seed_ptr, rows_ptr, row, column, threshold), out * scale, 0.0)
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "rows_each", "words", "types", "positions", "padding", "threshold"])
def backward_kernel(
    grad_ptr,  # [count, columns], rows grad_stride apart
    input_ids_ptr,  # as forward_kernel has them, to rows_ptr
    token_type_ids_ptr,
    position_ids_ptr,
    word_ptr,
    token_type_ptr,
    position_ptr,
    weight_ptr,
    seed_ptr,
    rows_ptr,
    dsum_ptr,  # [count, columns] float32: the gradient of the sum of the three rows
    numbers_ptr,  # [3, count]: of the rows read, in the numbering token_type, position, word
    sums_ptr,  # [parts, 2, columns] float32: gradients of weight and bias
    grad_stride,
    word_stride,
    token_type_stride,
    position_stride,
    words,
    types,
    positions,
    padding,  # the row of word that gets no gradient, or -1
    count,
    columns,
    rows_each,
    threshold,
    scale,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``rows_each`` tokens, ROWS at a time, each whole. A token past the end reads the last one, and counts as 0."""
    part = tl.program_id(0).to(tl.int64)
    begin = part * rows_each
    end = tl.minimum(begin + rows_each, count)
    column = tl.arange(0, COLUMNS)[None, :]
    weight = _load(weight_ptr, column, columns, EVEN)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    none = types + positions + words
    number_type = numbers_ptr.dtype.element_ty
    for start in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        valid = row < end
        row = tl.minimum(row, end - 1)
        word_id = tl.load(input_ids_ptr + row)
        type_id = tl.load(token_type_ids_ptr + row)
        position_id = tl.load(position_ids_ptr + row)
        y = _gather(word_ptr, word_id, words, word_stride, column, columns, EVEN)
        y += _gather(token_type_ptr, type_id, types, token_type_stride, column, columns, EVEN)
        y += _gather(position_ptr, position_id, positions, position_stride, column, columns, EVEN)
        word_id = tl.where(word_id == padding, -1, word_id)
        numbers = numbers_ptr + row
        tl.store(numbers, _number(type_id, types, 0, none).to(number_type), mask=valid)
        tl.store(numbers + count, _number(position_id, positions, types, none).to(number_type), mask=valid)
        word_number = _number(word_id, words, types + positions, none)
        tl.store(numbers + 2 * count, word_number.to(number_type), mask=valid)
        normal, rstd = _normalise(y, column, columns, eps, EVEN)
        grad = _load(grad_ptr + row * grad_stride, column, columns, EVEN)
        if ROWS > 1:
            grad = tl.where(valid, grad, 0.0)
        if seed_ptr is not None:
            grad = tl.where(_keep(seed_ptr, rows_ptr, row, column, threshold), grad * scale, 0.0)
        dweight += grad * normal
        dbias += grad
        grad *= weight
        c1 = tl.sum(grad * normal, axis=1, keep_dims=True) / columns
        c2 = tl.sum(grad, axis=1, keep_dims=True) / columns
        inside = valid if EVEN else valid & (column < columns)
        tl.store(dsum_ptr + row * columns + column, (grad - c2 - normal * c1) * rstd, mask=inside)
    sums_ptr += part * 2 * columns + column
    tl.store(sums_ptr, tl.sum(dweight, axis=0)[None, :], mask=column < columns)
    tl.store(sums_ptr + columns, tl.sum(dbias, axis=0)[None, :], mask=column < columns)


@triton.jit
def _table(number, types, positions):
    """Which table the row ``number`` is of: 0, 1, 2 for token_type, position, word."""
    return (number >= types).to(tl.int32) + (number >= types + positions).to(tl.int32)


@triton.jit
def _add_tokens(total, dsum_ptr, order_ptr, begin, end, first, column, columns, ROWS: tl.constexpr):
    """``total`` [ROWS, COLUMNS] plus the gradients of tokens ``order[begin:end] - first``."""
    for start in range(begin, end, ROWS):
        place = start + tl.arange(0, ROWS)[:, None]
        token = tl.load(order_ptr + place, mask=place < end, other=0) - first
        total += tl.load(dsum_ptr + token * columns + column, mask=(place < end) & (column < columns), other=0.0)
    return total


@triton.jit(do_not_specialize=["count", "types", "positions", "none"])
def chunks_kernel(
    dsum_ptr,  # [count, columns] float32
    numbers_ptr,  # [3 * count], sorted
    order_ptr,  # [3 * count] int64: table * count + token of each number
    chunks_ptr,  # [3 * count // CHUNK, columns] float32: sums of the chunks that lie within one run
    types,
    positions,
    none,  # number of a token that adds to no row
    count,
    columns,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of one chunk."""
    tiles = tl.cdiv(columns, COLUMNS)
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    begin = chunk * CHUNK
    number = tl.load(numbers_ptr + begin).to(tl.int32)
    if (number == tl.load(numbers_ptr + begin + CHUNK - 1).to(tl.int32)) & (number != none):
        first = _table(number, types, positions) * count.to(tl.int64)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total = _add_tokens(total, dsum_ptr, order_ptr, begin, begin + CHUNK, first, column, columns, ROWS)
        tl.store(chunks_ptr + chunk * columns + column, tl.sum(total, axis=0)[None, :], mask=column < columns)


@triton.jit(do_not_specialize=["count", "types", "positions"])
def tables_kernel(
    dsum_ptr,  # [count, columns] float32
    order_ptr,  # [3 * count] int64: table * count + token of each sorted number
    bounds_ptr,  # [types + positions + words + 1] int32: where the run of each number starts
    chunks_ptr,  # [3 * count // CHUNK, columns] float32
    dtoken_type_ptr,  # [types, columns] float32
    dposition_ptr,  # [positions, columns] float32
    dword_ptr,  # [words, columns] float32
    types,
    positions,
    count,
    columns,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of one row of a table."""
    tiles = tl.cdiv(columns, COLUMNS)
    number = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    table = _table(number, types, positions)
    first_token = table * count.to(tl.int64)
    row = number
    out_ptr = dtoken_type_ptr
    if table == 1:
        row = number - types
        out_ptr = dposition_ptr
    if table == 2:
        row = number - types - positions
        out_ptr = dword_ptr
    out_ptr += row * columns + column
    begin = tl.load(bounds_ptr + number)
    end = tl.load(bounds_ptr + number + 1)
    if begin == end:
        tl.store(out_ptr, tl.zeros([1, COLUMNS], tl.float32), mask=column < columns)
    else:
        # Whole chunks from first to last; the tokens before and after them.
        first, last = tl.cdiv(begin, CHUNK), end // CHUNK
        whole = first < last
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        before = tl.where(whole, first * CHUNK, end)
        total = _add_tokens(total, dsum_ptr, order_ptr, begin, before, first_token, column, columns, ROWS)
        for start in range(first, last, ROWS):
            chunk = start + tl.arange(0, ROWS)[:, None]
            inside = (chunk < last) & (column < columns)
            total += tl.load(chunks_ptr + chunk.to(tl.int64) * columns + column, mask=inside, other=0.0)
        after = tl.where(whole, last * CHUNK, end)
        total = _add_tokens(total, dsum_ptr, order_ptr, after, end, first_token, column, columns, ROWS)
        tl.store(out_ptr, tl.sum(total, axis=0)[None, :], mask=column < columns)


def _tables(word: Tensor, token_type: Tensor, position: Tensor) -> tuple[list[Tensor], list[int], list[int]]:
    """The tables word, token_type, position as rows, a row of zeros for one that has none; strides; numbers of rows."""
    sizes = [table.shape[0] for table in (word, token_type, position)]
    tables = (t if t.shape[0] else t.new_zeros(1, t.shape[1]) for t in (word, token_type, position))
    tables, strides = zip(*map(rows_of, tables), strict=True)
    return list(tables), list(strides), sizes


def forward(
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    token_type: Tensor,
    position: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    dropout_p: float,
    eps: float,
    padding_idx: int,
) -> Tensor:
    count, columns = input_ids.numel(), word.shape[1]
    out = word.new_empty(*input_ids.shape, columns)
    if count == 0:
        return out
    threshold, scale = threshold_and_scale(dropout_p)
    tables, strides, sizes = _tables(word, token_type, position)
    config = choose(FORWARD, columns)
    forward_kernel[(cdiv(count, config.rows),)](
        *(ids.contiguous() for ids in (input_ids, token_type_ids, position_ids)),
        *tables,
        weight.contiguous(),
        bias.contiguous(),
        seed if threshold else None,
        rows,
        out,
        *strides,
        *sizes,
        count,
        columns,
        threshold,
        scale,
        eps,
        config.rows,
        config.columns,
        columns == config.columns,
        num_warps=config.num_warps,
        **OPTIONS,
    )
    return out


def backward(
    grad: Tensor,
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word: Tensor,
    token_type: Tensor,
    position: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    dropout_p: float,
    eps: float,
    padding_idx: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count, columns = input_ids.numel(), word.shape[1]
    if count == 0:
        return tuple(p.new_zeros(p.shape, dtype=torch.float32) for p in (word, token_type, position, weight, bias))
    threshold, scale = threshold_and_scale(dropout_p)
    tables, strides, sizes = _tables(word, token_type, position)
    numbered = sum(sizes)
    grad, grad_stride = rows_of(grad)
    config = choose(BACKWARD, columns)
    parts = max(1, min(BACKWARD_PROGRAMS, cdiv(count, 4 * config.rows)))
    rows_each = cdiv(cdiv(count, parts), config.rows) * config.rows
    parts = cdiv(count, rows_each)
    dsum = word.new_empty((count, columns), dtype=torch.float32)
    numbers = input_ids.new_empty(3 * count, dtype=torch.int16 if numbered < NUMBERED_IN_16_BITS else torch.int32)
    sums = word.new_empty((parts, 2, columns), dtype=torch.float32)
    backward_kernel[(parts,)](
        grad,
        *(ids.contiguous() for ids in (input_ids, token_type_ids, position_ids)),
        *tables,
        weight.contiguous(),
        seed if threshold else None,
        rows,
        dsum,
        numbers,
        sums,
        grad_stride,
        *strides,
        *sizes,
        padding_idx,
        count,
        columns,
        rows_each,
        threshold,
        scale,
        eps,
        config.rows,
        config.columns,
        columns == config.columns,
        config.num_stages,
        num_warps=config.num_warps,
        **OPTIONS,
    )
    return *_table_gradients(dsum, numbers, sizes), *column_sums(sums)


def _table_gradients(dsum: Tensor, numbers: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of word, token_type and position from that of their sum, and which row of each every token read."""
    count, columns = dsum.shape
    numbers, order = torch.sort(numbers, stable=True)
    _, types, positions = sizes
    numbered = sum(sizes)
    bounds = torch.searchsorted(
        numbers, torch.arange(numbered + 1, dtype=numbers.dtype, device=numbers.device), out_int32=True
    )
    rows, block, num_warps, _ = choose(TABLES, columns)
    tiles, whole = cdiv(columns, block), 3 * count // CHUNK
    chunks = dsum.new_empty(whole, columns)
    if whole:
        chunks_kernel[(whole * tiles,)](
            dsum,
            numbers,
            order,
            chunks,
            types,
            positions,
            numbered,
            count,
            columns,
            CHUNK,
            rows,
            block,
            num_warps=num_warps,
            **OPTIONS,
        )
    dword, dtoken_type, dposition = (dsum.new_empty(size, columns) for size in sizes)
    tables_kernel[(numbered * tiles,)](
        dsum,
        order,
        bounds,
        chunks,
        dtoken_type,
        dposition,
        dword,
        types,
        positions,
        count,
        columns,
        CHUNK,
        rows,
        block,
        num_warps=num_warps,
        **OPTIONS,
    )
    return dword, dtoken_type, dposition


def static_cases() -> Iterator[StaticCase]:
    from .offline import bytes_of, meta

    bf16, fp16, fp32, int64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
    # tokens, columns, dtype, dropout_p, packed
    cases = [
        (4096, 768, fp32, 0.1, False),
        (32768, 768, fp32, 0.1, False),
        (32768, 768, fp32, 0.1, True),
        (32768, 768, fp32, 0.0, False),
        (32768, 768, bf16, 0.1, False),
        (32768, 768, fp16, 0.1, False),
        (32768, 771, fp32, 0.1, False),
    ]
    cases += [(4096, config.columns, dtype, 0.1, False) for config in FORWARD for dtype in (bf16, fp32)]
    for tokens, columns, dtype, dropout_p, packed in cases:
        # Rows gathered repeat and come from a cache: a stride of 0 counts one of word.
        word = meta(1, columns, dtype=dtype).expand(30522, columns)
        token_type, position = meta(2, columns, dtype=dtype), meta(512, columns, dtype=dtype)
        ids, vector, seed = meta(tokens, dtype=int64), meta(columns, dtype=fp32), meta(1, dtype=int64)
        rows, out = ids if packed else None, meta(tokens, columns, dtype=dtype)
        shape = f"{tokens} x {columns}, {str(dtype).removeprefix('torch.')}, p {dropout_p}"
        shape += ", packed" if packed else ""
        tables = (word, token_type, position)
        inputs = (ids, ids, ids, *tables, vector, vector, seed, rows, dropout_p, 1e-12, 0)
        integer_ops = OPERATIONS_PER_PAIR * out.numel() // 2 if dropout_p else 0
        read = sum(map(bytes_of, (ids, ids, ids, *tables, vector))) + (bytes_of(ids) if packed else 0)
        least, ci = read + bytes_of(out) + bytes_of(vector), (tokens, columns) == (4096, 768)
        yield StaticCase(f"forward {shape}", partial(forward, *inputs), least, integer_ops=integer_ops, ci=ci)
        least = read + bytes_of(out) + 4 * columns * sum(table.shape[0] for table in tables) + 2 * bytes_of(vector)
        call = partial(backward, out, *inputs)
        yield StaticCase(f"backward {shape}, without the sort", call, least, integer_ops=integer_ops, ci=ci)


def tunables() -> Iterator[Tunable]:
    from .tune import Tunable

    for table, entries in (("FORWARD", FORWARD), ("BACKWARD", BACKWARD), ("TABLES", TABLES)):
        for config in entries:
            tables = [torch.randn(size, config.columns, device="cuda") for size in (30522, 2, 512)]
            # As frequent as words are, roughly: rank r with a probability of 1 / r.
            words = (30522 ** torch.rand(32768, device="cuda")).long().clamp(max=30521)
            ids = words, words % 2, torch.arange(32768, device="cuda") % 512
            vector = torch.ones(config.columns, device="cuda")
            seed = torch.zeros(1, dtype=torch.int64, device="cuda")
            inputs = (*ids, *tables, vector, vector, seed, None, 0.1, 1e-12, 0)
            grad = torch.randn(32768, config.columns, device="cuda")
            yield Tunable(
                table, config, partial(forward, *inputs) if table == "FORWARD" else partial(backward, grad, *inputs)
            )
