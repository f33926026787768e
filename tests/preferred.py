"""Whole models on one backend, where that has a kernel for each of their calls or not."""

import contextlib
import importlib

import fastbert
from fastbert.ops import OPS


@contextlib.contextmanager
def preferred(backend):
    """Every op runs on ``backend``, strictly; on a CUDA one, which lacks ops and head sizes, where it can serve the
    call, and else on the next in order: what a user gets where it comes first."""
    if not backend.startswith("cuda"):
        with fastbert.use_backend(backend):
            yield
        return
    modules = [importlib.import_module(f"fastbert.ops.{op}") for op in OPS]
    tables = [module.BACKENDS for module in modules]
    try:
        for module, table in zip(modules, tables, strict=True):
            module.BACKENDS = tuple(sorted(table, key=lambda entry: entry.name != backend))
        yield
    finally:
        for module, table in zip(modules, tables, strict=True):
            module.BACKENDS = table
