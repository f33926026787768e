"""Triton's kernels: whether they can run here, and their ops. Nothing here imports triton; a first call does."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable

import torch

from .registry import Operator


def _interpreted() -> bool:
    """Whether kernels will run in Triton's interpreter, which is settled when triton is first imported."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "on", "yes", "y"):
        return False
    language = sys.modules.get("triton.language")
    return language is None or type(language.zeros).__name__ == "InterpretedFunction"


# Settled at import, so that a tracer sees constants.
INTERPRETED = _interpreted()
_missing = None if importlib.util.find_spec("triton") else "triton is not installed"
_library = torch.library.Library("fastbert_triton", "FRAGMENT")


def unavailable() -> str | None:
    """None if Triton's kernels can run on this machine, else what is missing."""
    if _missing or INTERPRETED or torch.cuda.is_available():
        return _missing
    return "no GPU that torch can use, and Triton is not interpreting (TRITON_INTERPRET=1)"


def why_not(*tensors: torch.Tensor | None) -> str | None:
    """What speaks against Triton's kernels for these inputs, or None."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu")):
            break
        if tensor.dtype == torch.float64:
            return "an input is float64; float32, bfloat16 and float16 are supported"
    else:
        return _missing
    return _missing or f"the inputs are on {tensor.device} and Triton is not interpreting (TRITON_INTERPRET=1)"


def register(operator: Operator) -> Callable[..., torch.Tensor]:
    """The differentiable call of ``forward`` and ``backward`` in ``fastbert.kernels.<operator.name>``."""
    call = operator.register("triton")
    for name, function in ((operator.name, "forward"), (f"{operator.name}_backward", "backward")):
        implementation = _lazily(f"fastbert.kernels.{operator.name}", function)
        _library.impl(name, implementation, "CUDA")
        _library.impl(name, implementation, "CPU")
    return call


def _lazily(module: str, function: str) -> Callable[..., object]:
    """``module.function``, imported by its first call; runs on the device of its first argument."""
    kernel = None

    def implementation(first: torch.Tensor, *rest):
        nonlocal kernel
        if kernel is None:
            kernel = getattr(importlib.import_module(module), function)
        if not first.is_cuda or first.get_device() == torch.cuda.current_device():
            return kernel(first, *rest)
        with torch.cuda.device(first.get_device()):
            return kernel(first, *rest)

    return implementation
