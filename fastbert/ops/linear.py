"""Linear layers, ``x @ weight^T + bias``: torch's, but on a CPU whose float32 or bfloat16 products are faster here.

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


def _fast() -> frozenset[torch.dtype]:
    """What the kernels multiply faster than torch here: float32 with AVX2 by a little, with AVX-512 by far; bfloat16
    with its own instructions."""
    if cpu.unavailable() is not None:
        return frozenset()
    from .. import _build

    found = {"baseline": (), "avx512_bf16": (torch.float32, torch.bfloat16)}
    return frozenset(found.get(_build.instruction_set(), (torch.float32,)))


FAST = _fast()

# Of float32 and bfloat16 matrices; where one of them or the result is bfloat16, in bfloat16 with sums in float32.
torch.library.define("fastbert_cpu::product", "(Tensor a, Tensor b, Tensor? bias, bool bfloat16) -> Tensor")
torch.library.define("fastbert_cpu::product_", "(Tensor(c!) c, Tensor a, Tensor b, bool add) -> ()")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: x ``[..., K]``, weight ``[N, K]``, bias ``[N]`` or None; differentiable once
    where the kernels serve it. Under autocast to bfloat16 they take float32 weights as they are, and give their
    gradients unrounded."""
    if x.device.type == "cpu":  # first: on a GPU the host's time per layer counts
        dtype = _dtype(x, weight, bias)
        if _served(dtype, x, weight) and x.shape[-1] == weight.shape[-1]:
            return _Linear.apply(x, weight, bias, dtype == torch.bfloat16)
    return F.linear(x, weight, bias)


def mm_(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """``out (+)= a @ b``, without a derivative. Where one of them has 16 bits beside float32, so has the product."""
    dtypes = {t.dtype for t in (out, a, b)}
    dtype = out.dtype if len(dtypes) == 1 else (dtypes - {torch.float32}).pop()
    if _served(dtype, a, b.t()):
        torch.ops.fastbert_cpu.product_(out, a, b, add)
    elif len(dtypes) > 1:
        product = a.to(dtype) @ b.to(dtype)
        out.add_(product) if add else out.copy_(product)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def keeps_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether products in ``dtype`` take ``weight`` as it is, float32, so that nobody need convert it."""
    return weight.dtype == torch.float32 and dtype == torch.bfloat16 and _served(dtype, weight, weight)


def _dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Of the products and the result; None if the arguments disagree."""
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") if dtypes <= {torch.float32, torch.bfloat16} else None
    return x.dtype if len(dtypes) == 1 else None


def _served(dtype: torch.dtype | None, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels are to make ``x @ weight^T`` in ``dtype``."""
    if dtype not in FAST or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return (
        weight.dim() == 2
        and x.numel() * weight.shape[0] >= LEAST_SIZE
        and x.numel() >= LEAST_SIDE * x.shape[-1]
        and weight.shape[0] >= LEAST_SIDE
        and _requested() in (None, "cpu")
        and weight.device == x.device
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
    )


_PLAIN = (Tensor, torch.nn.Parameter)  # not tensors that stand for others, as a tracer's do


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2) if t.dim() > 1 else t[None]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, bfloat16):
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        with _AutoDispatchBelowAutograd():
            y = torch.ops.fastbert_cpu.product(_rows(x), weight.t(), bias, bfloat16)
            return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        product = torch.ops.fastbert_cpu.product
        dy = _rows(grad)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight, None, x.dtype == torch.bfloat16).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = product(dy.t(), _rows(x), None, weight.dtype == torch.bfloat16)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0, dtype=ctx.bias_dtype)
        return dx, dweight, dbias, None
