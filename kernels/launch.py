"""What the launches of row-wise kernels share: configurations, how a tensor is read as rows, and sums of columns."""

from __future__ import annotations

import typing

from torch import Tensor


class Config(typing.NamedTuple):
    """A tile of ``rows`` x ``columns`` per step of a program, and how many warps and pipeline stages serve it."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1


# Given to every launch: products and sums fuse, whatever the default of the Triton at hand.
OPTIONS = {"enable_fp_fusion": True}


def choose(table: tuple[Config, ...], columns: int) -> Config:
    """The first entry whose tile holds ``columns``, or the last: by shape alone, never by timing."""
    for config in table:
        if columns <= config.columns:
            return config
    return table[-1]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """``tensor`` as rows of contiguous columns, and the stride between rows: itself if its strides allow, or a copy."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1] if tensor.dim() else 1
    if tensor.dim() > 1:
        rows = tensor.flatten(0, -2)
        if rows.stride(1) == 1:
            return rows, rows.stride(0)
    return tensor.contiguous(), tensor.shape[-1]
