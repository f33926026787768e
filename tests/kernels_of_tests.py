"""Small Triton kernels that expose to the tests what the shipped ones are made of."""

import torch
import triton
import triton.language as tl
from fastbert.kernels import dropout


@triton.jit
def conversion_kernel(values_ptr, floats_ptr, widened_ptr, narrowed_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(widened_ptr + i, tl.load(values_ptr + i).to(tl.float32))
    tl.store(narrowed_ptr + i, tl.load(floats_ptr + i).to(tl.bfloat16))


def converted(values, floats):
    """``values``, bfloat16, as float32; ``floats``, float32, as bfloat16; as many of each, a power of two."""
    widened, narrowed = torch.empty_like(values, dtype=torch.float32), torch.empty_like(floats, dtype=torch.bfloat16)
    conversion_kernel[(1,)](values, floats, widened, narrowed, values.numel())
    return widened, narrowed


@triton.jit
def dropout_kernel(
    seed_ptr, rows_ptr, bits_ptr, keep_ptr, tile_ptr, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    i = tl.arange(0, ROWS)[:, None]
    row = tl.load(rows_ptr + i)
    k0, k1 = dropout.row_keys(dropout.seed_key(seed_ptr), row >> 32, row)
    column = tl.arange(0, COLUMNS)[None, :]
    at = i * COLUMNS + column
    tl.store(bits_ptr + at, dropout.bits(k0, k1, column).to(tl.int32))
    tl.store(keep_ptr + at, dropout.keep(k0, k1, column, threshold).to(tl.int8))
    # In two tiles, so that one of them does not start at 0.
    half = i * COLUMNS + tl.arange(0, COLUMNS // 2)[None, :]
    for start in tl.static_range(0, COLUMNS, COLUMNS // 2):
        tile = dropout.keep_tile(k0, k1, start, COLUMNS // 2, threshold)
        tl.store(tile_ptr + half + start, tile.to(tl.int8))


def dropped(seed, rows, columns, threshold):
    """Bits, ``keep`` and ``keep_tile`` for ``rows``, as many as a power of two, and columns, likewise."""
    bits = torch.empty(len(rows), columns, dtype=torch.int32, device=rows.device)
    keep, tile = torch.empty_like(bits, dtype=torch.int8), torch.empty_like(bits, dtype=torch.int8)
    dropout_kernel[(1,)](seed, rows, bits, keep, tile, threshold, len(rows), columns)
    return bits, keep.bool(), tile.bool()
