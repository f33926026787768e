"""GELU with the bias of the product before it: ``gelu(x + bias)``, exact or tanh.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", https://arxiv.org/abs/1606.08415.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from . import cpu, cuda, triton
from .checks import accumulation_dtype, check_floating, check_vector
from .registry import Backend, Operator, select


def gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """``gelu(x + bias)``, with the sum and the function in float32 (float64 for float64).

    ``x``: ``[..., N]``, float32, bfloat16, float16 or float64. ``bias``: ``[N]`` of any of these, or None.
    ``approximate``: ``"none"``, ``x * Phi(x)``; or ``"tanh"``. Returns the shape and dtype of ``x``. Backward
    keeps ``x`` alone and sums the bias gradient in the same pass.

    Raises ``TypeError`` or ``ValueError`` for other dtypes, shapes and names, ``NotImplementedError`` if the
    backend asked for cannot serve the call.
    """
    check_floating("x", x)
    if x.dim() == 0 and bias is not None:
        raise ValueError("x has no dimension; a bias needs [..., N]")
    if bias is not None:
        check_vector("bias", bias, x.shape[-1], x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; accepted are 'none' and 'tanh'")
    args = (x, bias, approximate)
    return select("gelu", BACKENDS, backend, args).call(*args)


def reference(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Plain PyTorch; what every backend is checked against."""
    dtype = accumulation_dtype(x)
    y = x.to(dtype) if bias is None else x.to(dtype) + bias.to(dtype)
    return F.gelu(y, approximate=approximate).to(x.dtype)


def _setup_context(ctx, inputs, output):
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _gradients(ctx, backward_op, grad):
    x, bias = ctx.saved_tensors
    dx, dbias = backward_op(grad, x, bias, ctx.approximate)
    return dx, None if bias is None else dbias.to(bias.dtype), None


OPERATOR = Operator(
    name="gelu",
    forward="(Tensor x, Tensor? bias, str approximate) -> Tensor",
    # dbias [N] in the accumulation type; empty without a bias
    backward="(Tensor grad, Tensor x, Tensor? bias, str approximate) -> (Tensor, Tensor)",
    fake_forward=lambda x, bias, approximate: x.new_empty(x.shape),
    fake_backward=lambda grad, x, bias, approximate: (
        x.new_empty(x.shape),
        x.new_empty(0 if bias is None else x.shape[-1], dtype=accumulation_dtype(x)),
    ),
    setup_context=_setup_context,
    gradients=_gradients,
)


def _cpu_why_not(x: Tensor, bias: Tensor | None, approximate: str) -> str | None:
    return cpu.why_not(x)


def _triton_why_not(x: Tensor, bias: Tensor | None, approximate: str) -> str | None:
    return triton.why_not(x, bias)


def _cuda_why_not(x: Tensor, bias: Tensor | None, approximate: str) -> str | None:
    return cuda.why_not(x, bias)


BACKENDS = (
    Backend("cpu", OPERATOR.register("cpu"), _cpu_why_not, cpu.unavailable),
    Backend("triton", triton.register(OPERATOR), _triton_why_not, triton.unavailable),
    Backend("cuda", OPERATOR.register("cuda"), _cuda_why_not, cuda.unavailable),
    Backend("eager", reference, lambda *args: None),
)
