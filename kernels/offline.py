"""Launches without a GPU: what a call compiles for a given GPU, exactly as Triton's own launch would, and how often.

Within ``offline(target)`` a launch compiles its kernel for ``target`` (once per variant, in Triton's own cache) and is
recorded instead of run. Tensors may live on the "meta" device: only their types, shapes, strides and alignment count.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """``kernel`` on ``grid``; ``bytes_moved``: its tensors, each once; ``compiled``: for the target."""

    kernel: JITFunction
    compiled: Any
    grid: tuple[int, ...]
    bytes_moved: int

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__.removesuffix('_kernel')}"


class _Driver:
    """All that a launch asks of a driver before it runs; every target counts as a device of its own."""

    def __init__(self, name: str):
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def offline(target: str) -> Iterator[list[Launch]]:
    """Within it, launches are compiled for ``target``, one of TARGETS, and appended to the list it gives."""
    if not isinstance(_probe, JITFunction):
        raise RuntimeError("Triton interprets (TRITON_INTERPRET=1), so it compiles nothing; unset the variable")
    launches: list[Launch] = []
    run, active = JITFunction.run, driver._active

    def record(self, *args, grid, warmup, **options):
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        launches.append(Launch(self, compiled, tuple(grid), sum(bytes_of(t) for t in tensors)))

    JITFunction.run = record
    driver.set_active(_Driver(target))
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver._active = active


def bytes_of(tensor: torch.Tensor) -> int:
    """What reading ``tensor`` once moves: elements that several indices share (stride 0) count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    count = tensor.element_size()
    for size in sizes:
        count *= size
    return count


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


@triton.jit
def _probe():
    pass
