"""Linear layers, ``x @ weight^T + bias``: torch's, but for float32 on the CPU, where torch's products are slow.

Not an op with backends of its own: a linear layer belongs to torch wherever torch is fast, whatever backend the ops are
asked for. ``eager`` asked for is torch throughout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd

from . import cpu
from .registry import _requested

# Fewer multiply-adds cost less than the way to the kernel; with fewer rows or columns packing outweighs the product.
LEAST_SIZE, LEAST_SIDE = 1 << 20, 8


def _fast() -> bool:
    """Whether the kernels beat torch's products here: with AVX2 by a little, with AVX-512 by far."""
    if cpu.unavailable() is not None:
        return False
    from .. import _build

    return _build.instruction_set() != "baseline"


FAST = _fast()

torch.library.define("fastbert_cpu::product", "(Tensor a, Tensor b, Tensor? bias) -> Tensor")
torch.library.define("fastbert_cpu::product_", "(Tensor(c!) c, Tensor a, Tensor b, bool add) -> ()")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: x ``[..., K]``, weight ``[N, K]``, bias ``[N]`` or None; differentiable once
    where the kernels serve it."""
    if _served(x, weight, bias) and x.shape[-1] == weight.shape[-1]:
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def mm_(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """``out (+)= a @ b``, without a derivative."""
    if _served(a, b.t(), None):
        torch.ops.fastbert_cpu.product_(out, a, b, add)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _served(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels are to make ``x @ weight^T``."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return (
        FAST
        and weight.dim() == 2
        and x.numel() * weight.shape[0] >= LEAST_SIZE
        and x.numel() >= LEAST_SIDE * x.shape[-1]
        and weight.shape[0] >= LEAST_SIDE
        and _requested() in (None, "cpu")
        and not torch.is_autocast_enabled("cpu")
        and all(t is None or (t.dtype == x.dtype and t.device == x.device) for t in (weight, bias))
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
    )


_PLAIN = (Tensor, torch.nn.Parameter)  # not tensors that stand for others, as a tracer's do


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2) if t.dim() > 1 else t[None]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        with _AutoDispatchBelowAutograd():
            y = torch.ops.fastbert_cpu.product(_rows(x), weight.t(), bias)
            return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        product = torch.ops.fastbert_cpu.product
        dy = _rows(grad)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight, None).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = product(dy.t(), _rows(x), None)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0)
        return dx, dweight, dbias
