"""Triton kernels, one file per op; installed as ``fastbert.kernels`` and imported when first called, not before.

``<op>.py`` holds the kernels of one op, the table of their configurations, ``forward`` and ``backward`` with the
arguments of the op's schema in ``fastbert/ops/<op>.py``, and ``static_cases()``: what ``fastbert.kernels.static``
compiles without a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class StaticCase:
    """One kernel in one shipped configuration, at one shape: compiled for every target without a GPU.

    ``name``: op, pass, dtypes and shape. ``signature``: Triton type of each argument that is not a constexpr, by
    name, in any order (``"*bf16"``, ``"i32"``, ``"fp32"``). ``constexprs``: the value of the others. ``aligned``:
    arguments known to be multiples of 16, as a call at this shape would find them. ``programs``: how many a launch
    at this shape has. ``bytes_moved``: read and written by the launch; ``bytes_least``: what any implementation
    must move. ``flops``: of matrix products. ``integer_ops``: integer operations of dropout, over all elements.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    programs: int
    bytes_moved: int
    bytes_least: int
    flops: int = 0
    integer_ops: int = 0
