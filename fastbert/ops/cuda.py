"""The CUDA library: loaded once, at import, where torch has CUDA; or the reason why it is not there."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from .registry import constant_when_traced

_PACKAGE = Path(__file__).resolve().parent.parent
_record = _PACKAGE / "_build.json"
_BUILT = {"cuda": "the package was not built", "cuda_architectures": []}
if _record.exists():
    _BUILT |= json.loads(_record.read_text())


def _load() -> str | None:
    """Load the CUDA kernels into torch; returns why that failed, or None."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    library = _PACKAGE / "_cuda.so"
    if not library.exists():
        return f"the CUDA kernels are not there: {_BUILT['cuda']}"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the CUDA kernels did not load: {error}"
    return None


_reason = _load()


def unavailable() -> str | None:
    """None if the CUDA kernels are loaded and there is a GPU, else what is missing."""
    if _reason is not None:
        return _reason
    return _not_built_for(torch.cuda.current_device()) if torch.cuda.is_available() else "no GPU that torch can use"


_devices: dict[int, str | None] = {}


@constant_when_traced
def _not_built_for(device: int) -> str | None:
    """None if a GPU can run what was built: a binary of its generation, no newer than itself, or older PTX."""
    if device not in _devices:
        major, minor = torch.cuda.get_device_capability(device)
        _devices[device] = f"the CUDA kernels were built for {architectures()}; this GPU is of {major}.{minor}"
        for name in _BUILT["cuda_architectures"]:
            built = divmod(int(name.removesuffix("+PTX")), 10)
            if built <= (major, minor) and (built[0] == major or name.endswith("+PTX")):
                _devices[device] = None
    return _devices[device]


def unsupported(*tensors: torch.Tensor | None) -> str | None:
    """What no CUDA kernel takes, on whatever device, or None."""
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return "an input is float64; float32, bfloat16 and float16 are supported"
    return None


def why_not(*tensors: torch.Tensor | None) -> str | None:
    """What speaks against the CUDA kernels for these inputs, or None."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_cuda:
            return _reason or f"the inputs are on {tensor.device}, not on a GPU"
    device = next(t.get_device() for t in tensors if t is not None)
    return _reason or _not_built_for(device) or unsupported(*tensors)


def architectures() -> str:
    """What the CUDA kernels were compiled for, such as "80 90+PTX", or why there are none."""
    return " ".join(_BUILT["cuda_architectures"]) or f"none: {_BUILT['cuda']}"


class Launch(NamedTuple):
    """A launch of a kernel; what the device says of it is 0 where the kernels are emulated."""

    kernel: str
    threads: int
    dynamic_shared_bytes: int
    registers: int
    spilled_bytes: int
    static_shared_bytes: int
    resident_blocks: int


@contextlib.contextmanager
def observed_launches(library: Path = _PACKAGE / "_cuda.so") -> Iterator[list[Launch]]:
    """Fills a list with every launch of a CUDA kernel within the context, from any thread."""
    launches: list[Launch] = []
    observer_type = ctypes.CFUNCTYPE(None, ctypes.c_char_p, *(ctypes.c_int,) * 6)
    observe = ctypes.CDLL(str(library)).fastbert_observe_launches
    observe.argtypes = [observer_type]
    observer = observer_type(lambda name, *facts: launches.append(Launch(name.decode(), *facts)))
    observe(observer)
    try:
        yield launches
    finally:
        observe(observer_type())
