"""Masks of attention scores ``[B, H, Sq, Sk]``: which keys are on for which query, in one form for all backends."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import accumulation_dtype, check_device

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def prepare_mask(mask: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """``mask`` as a view ``[B, H, Sq, Sk]`` (stride 0 where broadcast), bool or the accumulation dtype."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}; a bool or floating tensor is accepted")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(
            f"mask is {mask.dtype}; accepted are bool (True = attend) and floating (added to the scores): "
            "pass mask.bool() if 1 means attend"
        )
    check_device("mask", mask, like)
    trailing = shape[len(shape) - mask.dim() :] if mask.dim() <= 4 else ()
    if mask.dim() > 4 or any(m != 1 and m != s for m, s in zip(mask.shape, trailing, strict=True)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; it must broadcast to [B, H, Sq, Sk] = {list(shape)} (a key "
            "mask [B, Sk] is passed as mask[:, None, None, :])"
        )
    if mask.dtype != torch.bool:
        mask = mask.to(accumulation_dtype(like))
    return mask.expand(shape)


def prepare_lengths(lengths: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """``lengths`` as contiguous int32; the kernels clamp it to 0..Sk."""
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths is a {type(lengths).__name__}; an integer tensor is accepted")
    if lengths.dtype not in _INTEGERS:
        raise TypeError(f"lengths is {lengths.dtype}; an integer tensor is accepted")
    check_device("lengths", lengths, like)
    batch, _, seqlen, keys = shape
    if lengths.shape != (batch,) and lengths.shape != (batch, seqlen):
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)}; accepted are [B] = [{batch}] and [B, Sq] = [{batch}, {seqlen}]"
        )
    if lengths.dtype == torch.int64:
        lengths = lengths.clamp(0, keys)
    return lengths.to(torch.int32).contiguous()


def on_and_bias(mask: Tensor | None, lengths: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are on, ``[B, H or 1, Sq or 1, Sk]`` bool or None for all; what is added to the scores."""
    on = bias = None
    if mask is not None:
        for dim in (1, 2):  # where it was broadcast, once is enough
            if mask.stride(dim) == 0:
                mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
        on, bias = (mask, None) if mask.dtype == torch.bool else (mask != -math.inf, mask)
    if lengths is not None:
        lengths = lengths[:, None, None, None] if lengths.dim() == 1 else lengths[:, None, :, None]
        within = torch.arange(keys, device=lengths.device) < lengths
        on = within if on is None else on & within
    return on, bias
