"""Triton kernels, one file per op; installed as ``fastbert.kernels`` and imported when first called, not before.

``<op>.py`` holds the kernels of one op, the table of their configurations, ``forward`` and ``backward`` with the
arguments of the op's schema in ``fastbert/ops/<op>.py``, and ``static_cases()``: the calls that
``python -m fastbert.kernels.static`` compiles without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class StaticCase:
    """One call at one shape, whose launches are compiled and recorded (:mod:`fastbert.kernels.offline`), not run.

    ``name``: pass, dtypes and shape. ``call``: calls ``forward`` or ``backward`` of its module with tensors on the
    "meta" device. ``bytes_least``: what any implementation must move, each input and output once. ``flops``: of matrix
    products. ``integer_ops``: of dropout's bits, over all elements. ``ci``: compiled by the test suite too.
    """

    name: str
    call: Callable[[], Any]
    bytes_least: int
    flops: int = 0
    integer_ops: int = 0
    ci: bool = False
