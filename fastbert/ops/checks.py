"""Checks that several ops share: every message names the argument, what it is, and what is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a tensor is accepted")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} is {tensor.dtype}; accepted are {', '.join(map(str, FLOATING))}")


def check_vector(name: str, tensor: Tensor | None, size: int, like: Tensor) -> None:
    """``tensor`` is None or a floating vector of ``size`` elements on the device of ``like``."""
    if tensor is None:
        return
    check_floating(name, tensor)
    if tensor.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the last dimension of x needs ({size},)")
    check_device(name, tensor, like)


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {like.device}, with the other inputs")


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where an input is, else float32: what statistics and sums are kept in."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32
