"""Better tables for the GPU at hand: measures the neighbours of every shipped configuration, prints the fastest.

What ``fastbert bench --tune`` runs. Nothing is changed: the printed entries are meant to be pasted into the tables of
the kernel modules, which choose by shape alone. A module takes part by ``tunables()``.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import fastbert.kernels
import torch

from .launch import Config


@dataclasses.dataclass(frozen=True)
class Tunable:
    """An entry of a table: ``call`` launches the kernels that it configures, on the GPU."""

    table: str
    config: Config
    call: Callable[[], Any]


def candidates(config: Config) -> Iterator[Config]:
    """``config`` and its neighbours: half and twice the rows and the warps; other depths of a pipelined loop."""
    rows = {config.rows, 2 * config.rows, max(1, config.rows // 2)}
    warps = {config.num_warps, min(32, 2 * config.num_warps), max(1, config.num_warps // 2)}
    stages = {1, 2, 3, 4} if config.num_stages > 1 else {config.num_stages}
    for choice in itertools.product(sorted(rows), sorted(warps), sorted(stages)):
        yield Config(choice[0], config.columns, *choice[1:])


def _microseconds(module: Any, tunable: Tunable, candidate: Config) -> float | None:
    """Median time with ``candidate`` in the place of the entry; None if it needs more than the GPU has."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    shipped = getattr(module, tunable.table)
    setattr(module, tunable.table, tuple(candidate if entry == tunable.config else entry for entry in shipped))
    try:
        return 1e3 * do_bench(tunable.call, return_mode="median")
    except OutOfResources:
        return None
    finally:
        setattr(module, tunable.table, shipped)


def tune(ops: list[str] | None = None, report: Callable[[str], None] = print) -> dict[str, dict[str, list[Config]]]:
    """The fastest table of each op (default: every one that can be tuned), by op and table; told line by line.

    Raises ``RuntimeError`` without a GPU, ``ValueError`` for an op that has nothing to tune.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning measures kernels on a GPU, and torch finds none it can use")
    names = [info.name for info in pkgutil.iter_modules(fastbert.kernels.__path__) if info.name != "static"]
    modules = {name: importlib.import_module(f"fastbert.kernels.{name}") for name in names}
    modules = {name: module for name, module in modules.items() if hasattr(module, "tunables")}
    for op in ops or ():
        if op not in modules:
            raise ValueError(f"nothing to tune in {op!r}; accepted are {', '.join(modules)}")
    found: dict[str, dict[str, list[Config]]] = {}
    report(f"measured on {torch.cuda.get_device_name()}")
    for op in ops or modules:
        tables = found.setdefault(op, {})
        for tunable in modules[op].tunables():
            times = {c: _microseconds(modules[op], tunable, c) for c in candidates(tunable.config)}
            times = {c: time for c, time in times.items() if time is not None}
            best = min(times, key=times.__getitem__)
            tables.setdefault(tunable.table, []).append(best)
            report(
                f"{op}.{tunable.table}: {best}, {times[best]:.1f} µs; shipped {tunable.config}, "
                f"{times.get(tunable.config, float('nan')):.1f} µs"
            )
    return found
