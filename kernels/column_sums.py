"""The second step of a sum over rows: what the programs of a backward kernel found, added up in a fixed order.

Reads [parts, width, columns] float32, mostly from the second-level cache, and writes ``width`` vectors: at most a few
percent of what the kernel before it moved. The outputs are tensors of their own, since an op's may not be views of one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import OPTIONS, Config, cdiv

CONFIG = Config(64, 32, 4, 3)


@triton.jit(do_not_specialize=["parts"])
def kernel(
    sums_ptr,  # [parts, width, columns]
    out0_ptr,  # [columns] each; None beyond width
    out1_ptr,
    out2_ptr,
    parts,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(columns, COLUMNS)
    which = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    width: tl.constexpr = 1 if out1_ptr is None else 2 if out2_ptr is None else 3
    sums_ptr += which * columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, parts, ROWS, num_stages=STAGES):
        part = start + tl.arange(0, ROWS)[:, None]
        inside = (part < parts) & (column < columns)
        total += tl.load(sums_ptr + part.to(tl.int64) * width * columns + column, mask=inside, other=0.0)
    total = tl.sum(total, axis=0)[None, :]
    out_ptr = out0_ptr
    if out1_ptr is not None and which == 1:
        out_ptr = out1_ptr
    if out2_ptr is not None and which == 2:
        out_ptr = out2_ptr
    tl.store(out_ptr + column, total, mask=column < columns)


def column_sums(sums: Tensor) -> list[Tensor]:
    """The sums over the first dimension of ``sums`` ``[parts, width, columns]``, float32, width up to 3, one by one."""
    parts, width, columns = sums.shape
    outputs = [sums.new_empty(columns) for _ in range(width)]
    kernel[(width * cdiv(columns, CONFIG.columns),)](
        sums,
        *outputs,
        *(None,) * (3 - width),
        parts,
        columns,
        CONFIG.rows,
        CONFIG.columns,
        CONFIG.num_stages,
        num_warps=CONFIG.num_warps,
        **OPTIONS,
    )
    return outputs
