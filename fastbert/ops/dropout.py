"""Dropout bits: which elements are dropped, as a function of seed and coordinates alone.

Every backend computes the same bits (``csrc/common/dropout.h`` states the same arithmetic for C++), so the
same elements fall in every layout and tile size, and backward recomputes them instead of storing a mask. All
arithmetic is uint32, wrapping; it is written on int32 tensors, whose products wrap alike, with the sign bits
that an arithmetic shift brings in masked off. ``mix`` is the "lowbias32" finaliser
(https://nullprogram.com/blog/2018/07/31/).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _int32(x: int) -> int:
    """The int32 with the bit pattern of a uint32."""
    return x - (1 << 32) if x >= 1 << 31 else x


_MULTIPLIER_1 = _int32(0x7FEB352D)
_MULTIPLIER_2 = _int32(0x846CA68B)
_GOLDEN = _int32(0x9E3779B9)
_SECOND_KEY = _int32(0xA511E9B3)


def _shift_right(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (32 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x ^ _shift_right(x, 16)
    x = x * _MULTIPLIER_1
    x = x ^ _shift_right(x, 15)
    x = x * _MULTIPLIER_2
    return x ^ _shift_right(x, 16)


def _low_word(x: Tensor) -> Tensor:
    """The low 32 bits of an int64 tensor, as int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def dropout_bits(seed: int | Tensor, row_hi: Tensor | int, row_lo: Tensor | int, columns: int | Tensor) -> Tensor:
    """The 16 random bits of each element, int32 in 0..65535; an element is kept if they are >= ``threshold(p)``.

    ``seed``: int (64 bits count) or one-element int64 tensor. ``row_hi``, ``row_lo``: the two 32-bit words of a
    row's coordinate, broadcast against each other. ``columns``: how many columns from 0 on, or the column
    numbers as a 1-D tensor. Returns ``[*rows, columns]``.
    """
    device = next((t.device for t in (row_hi, row_lo, seed, columns) if isinstance(t, Tensor)), None)
    if not isinstance(seed, Tensor):
        seed = seed_tensor(seed, torch.device("cpu") if device is None else device)
    row_hi, row_lo = (torch.as_tensor(r, dtype=torch.int64, device=seed.device) for r in (row_hi, row_lo))
    if not isinstance(columns, Tensor):
        columns = torch.arange(columns, device=seed.device)
    seed = seed.reshape(())
    k0 = _mix(_low_word(seed) + _GOLDEN)
    k0 = _mix(k0 + _low_word(seed >> 32))
    k0 = _mix(_mix(k0 + _low_word(row_hi)) + _low_word(row_lo)).unsqueeze(-1)
    k1 = _mix(k0 ^ _SECOND_KEY)
    x = k0 + _low_word(columns >> 1) * _GOLDEN
    x = x ^ _shift_right(x, 16)
    x = x * _MULTIPLIER_1
    x = x ^ _shift_right(x, 15) ^ k1
    x = x * _MULTIPLIER_2
    x = x ^ _shift_right(x, 16)
    return torch.where((columns & 1).bool(), _shift_right(x, 16), x & 0xFFFF)


def threshold(dropout_p: float) -> int:
    """The 16-bit threshold that drops a share ``dropout_p`` of all elements; 65536 drops every one."""
    return round(dropout_p * 65536)


def multiplier(bits: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """What each element is multiplied by: 0 where dropped, 1 / (1 - p) where kept, p as the bits resolve it."""
    cut = threshold(dropout_p)
    scale = 65536 / (65536 - cut) if cut < 65536 else 0.0
    return (bits >= cut).to(dtype) * scale


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """A one-element int64 tensor on ``device``: of ``seed``, or drawn from the device's default generator.

    Raises ``TypeError`` or ``ValueError`` for anything but None, an int of 64 bits or such a tensor.
    """
    if seed is None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed is a tensor of {seed.dtype} and shape {tuple(seed.shape)}; an int64 tensor of one element "
                "is accepted"
            )
        if seed.device != device:
            raise ValueError(f"seed is on {seed.device}; it must be on {device}, with the inputs")
        return seed
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed is {seed!r}; None, an int or a one-element int64 tensor is accepted")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; it must fit in 64 bits")
    return torch.full((1,), seed - (1 << 64) if seed >= 1 << 63 else seed, dtype=torch.int64, device=device)


def check_dropout_p(dropout_p: float) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p is {dropout_p}; a probability from 0 to 1 is accepted")
