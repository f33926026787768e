"""The CPU library: loaded once, at import, or the reason why it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent.parent


def _load() -> str | None:
    """Load the C++ kernels into torch; returns why that failed, or None."""
    library = _PACKAGE / "_cpu.so"
    if not library.exists():
        record = _PACKAGE / "_build.json"
        reason = json.loads(record.read_text())["cpu"] if record.exists() else "the package was not built"
        return f"the C++ kernels are not there: {reason}"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the C++ kernels did not load: {error}"
    return None


_reason = _load()


def unavailable() -> str | None:
    """None if the C++ kernels are loaded, else why they are not."""
    return _reason


def why_not(*tensors: torch.Tensor | None) -> str | None:
    """What speaks against the CPU library for these inputs, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            return f"the inputs are on {tensor.device}, not on the CPU"
    return _reason
