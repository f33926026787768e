"""Backends: what each one of an op supports, and which one serves a call.

An op lists its backends in order. A call without a backend takes the first that has nothing against the
inputs; a backend asked for by name (argument, :func:`use_backend`, ``FASTBERT_BACKEND``, in this order) serves
the call or the call raises with every reason. There is no silent fallback from a backend asked for.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _AutoDispatchBelowAutograd

BACKENDS = ("eager", "cpu", "triton", "cuda")
# Where both kinds of GPU kernels can serve, which is asked first in each op's table, and the measurement that says so.
GPU_ORDER = {
    "attention": (("triton", "cuda"), "not measured"),
    "masked_softmax": (("triton", "cuda"), "not measured"),
    "add_dropout_layer_norm": (("triton", "cuda"), "not measured"),
    "gelu": (("triton", "cuda"), "not measured"),
    "embedding_layer_norm": (("triton", "cuda"), "not measured"),
}

_asked_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("fastbert_backend", default=None)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    ``call`` takes the op's prepared arguments, differentiably. ``why_not`` takes the same arguments and says in
    one sentence why this backend cannot serve them, or returns None; called without arguments (by
    :mod:`fastbert.info`) through ``unavailable``, it says why it can serve nothing here.
    """

    name: str
    call: Callable[..., torch.Tensor]
    why_not: Callable[..., str | None]
    unavailable: Callable[[], str | None] = lambda: None


def check_backend_name(name: str, argument: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{argument} is {name!r}; accepted are {', '.join(map(repr, BACKENDS))}")


def constant_when_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.assume_constant_result``, which imports torch._dynamo, and that triton, on the spot."""
    function._dynamo_marked_constant = True
    return function


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within the context every op runs on backend ``name``; None restores the choice by inputs.

    Raises ``ValueError`` for an unknown name. An op that ``name`` cannot serve raises ``NotImplementedError``.
    """
    if name is not None:
        check_backend_name(name, "name")
    token = _asked_for.set(name)
    try:
        yield
    finally:
        _asked_for.reset(token)


@constant_when_traced
def _requested() -> str | None:
    """The backend asked for by context or environment; a compiled graph keeps the one it was traced with."""
    name = _asked_for.get()
    if name is None and (name := os.environ.get("FASTBERT_BACKEND") or None) is not None:
        check_backend_name(name, "FASTBERT_BACKEND")
    return name


def select(op: str, backends: tuple[Backend, ...], requested: str | None, args: tuple[Any, ...]) -> Backend:
    """The backend that serves this call; see the module's docstring."""
    if requested is None:
        requested = _requested()
    else:
        check_backend_name(requested, "backend")
    reasons = []
    for backend in backends:
        if requested is None or backend.name == requested:
            reason = backend.why_not(*args)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
    if not reasons:
        reasons.append(f"{requested}: {op} has no such backend; it has {', '.join(b.name for b in backends)}")
    raise NotImplementedError(f"no backend serves this call of {op}: " + "; ".join(reasons))


@dataclasses.dataclass(frozen=True)
class Operator:
    """What the kernels of one op have in common, whatever the backend: schemas, shapes and derivative.

    ``forward``, ``backward``: schemas without the name. ``fake_forward``, ``fake_backward``: outputs without
    data. ``setup_context(ctx, inputs, output)`` and ``gradients(ctx, backward_op, *grads)``: as
    :class:`torch.autograd.Function` and :func:`torch.library.register_autograd` have them.
    """

    name: str
    forward: str
    backward: str
    fake_forward: Callable[..., Any]
    fake_backward: Callable[..., Any]
    setup_context: Callable[..., None]
    gradients: Callable[..., Any]

    def register(self, backend: str) -> Callable[..., Any]:
        """Define the op for ``backend`` as ``fastbert_<backend>::<name>`` and return a differentiable call.

        The implementation itself is registered by the backend, under the same names. Eager calls go through an
        ``autograd.Function`` straight to the kernel, which costs less than half of what torch's registered
        autograd does; a tracer (torch.compile, export, fake tensors) sees the registered op.
        """
        namespace = f"fastbert_{backend}"
        library = _library(namespace)
        library.define(self.name + self.forward)
        library.define(f"{self.name}_backward{self.backward}")
        torch.library.register_fake(f"{namespace}::{self.name}", self.fake_forward, lib=library)
        torch.library.register_fake(f"{namespace}::{self.name}_backward", self.fake_backward, lib=library)
        operators = getattr(torch.ops, namespace)
        forward_op = getattr(operators, self.name).default
        backward_op = getattr(operators, f"{self.name}_backward").default
        setup_context, gradients = self.setup_context, self.gradients

        def backward(ctx, *grads):
            return gradients(ctx, backward_op, *grads)

        torch.library.register_autograd(f"{namespace}::{self.name}", backward, setup_context=setup_context, lib=library)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                with _AutoDispatchBelowAutograd():
                    output = forward_op(*args)
                setup_context(ctx, args, output)
                return output

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, *grads):
                return gradients(ctx, backward_op, *grads)

        Function.__name__ = Function.__qualname__ = f"{self.name}_{backend}"
        apply = Function.apply

        def call(*args):
            if torch.compiler.is_compiling():
                return forward_op(*args)
            return apply(*args)

        return call


_libraries: dict[str, torch.library.Library] = {}


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "DEF")
    return _libraries[namespace]
