"""Cross-entropy of the labelled rows of a masked language model, from hidden states to loss in one op.

``logits = hidden @ weight^T + bias`` is made for a slice of the rows at a time and turns into its own gradient in
place: neither ``[tokens, vocab]`` nor ``[rows, vocab]`` ever lives, and the gradients of hidden, weight and bias are
made in the same sweep (:func:`sweep`), with three products where recomputation would need four. The products are
torch's; a backend brings what happens to a slice of logits between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu, triton
from .checks import accumulation_dtype, check_device, check_floating
from .linear import keeps_weight, mm_
from .registry import Backend, Operator, select

# Logits alive at once. On a CPU a slice that the outer caches hold between the products on either side of it. On a GPU
# more: with 16-bit weights each slice after the first costs a sum of all of dweight in float32, 0.28 GB or 65 us for
# BERT-base at 4.3 TB/s, as long as the three products of 300 rows take; a slice of 4,400 rows makes that 7%.
SLICE_BYTES = {"cpu": 32 << 20, "triton": 256 << 20}


def masked_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    backend: str | None = None,
) -> Tensor:
    """Mean over the labelled rows of ``-log softmax(hidden @ weight^T + bias)[label]``.

    ``hidden``: ``[..., N]``; ``weight``: ``[V, N]``, the same floating dtype; ``bias``: ``[V]``, any floating dtype, or
    None; ``labels``: int64 ``[...]``, ids 0 to V - 1, or ``ignore_index`` for rows without one. Returns a scalar in
    float32 (float64 for float64): 0, with zero gradients, where no row has a label. Under autocast hidden and weight
    are cast to its dtype, as a linear layer casts them.

    On the CPU rows without a label cost nothing. On a GPU, where their number is known to the device alone, they cost
    as much as the others: give it the rows that can have one.

    Raises ``TypeError`` or ``ValueError`` naming the argument, on the CPU also for a label outside the vocabulary (on a
    GPU, where looking would synchronise, the loss is then NaN); ``NotImplementedError`` if the backend asked for cannot
    serve the call.
    """
    check_floating("hidden", hidden)
    check_floating("weight", weight)
    device_type, kept = hidden.device.type, False
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
        hidden = hidden.to(dtype)
        kept = backend in (None, "cpu") and keeps_weight(weight, dtype)
        if not kept:
            weight = weight.to(dtype)
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; hidden {tuple(hidden.shape)} needs [vocab, hidden.shape[-1]]"
        )
    if weight.dtype != hidden.dtype and not kept:
        raise TypeError(f"weight is {weight.dtype}; it must be {hidden.dtype}, the dtype of hidden")
    check_device("weight", weight, hidden)
    if bias is not None:
        check_floating("bias", bias)
        check_device("bias", bias, hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}; weight needs ({weight.shape[0]},)")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        what = labels.dtype if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise TypeError(f"labels is {what}; an int64 tensor is accepted")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; hidden needs {tuple(hidden.shape[:-1])}")
    check_device("labels", labels, hidden)
    if device_type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= weight.shape[0]))]
        if wrong.numel():
            raise ValueError(
                f"labels holds {int(wrong[0])}; accepted are 0 to {weight.shape[0] - 1} and ignore_index, "
                f"{ignore_index}"
            )
    args = (hidden.flatten(0, -2) if hidden.dim() > 1 else hidden[None], weight, bias, labels.flatten(), ignore_index)
    return select("masked_lm_loss", BACKENDS, backend, args).call(*args)


def reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> Tensor:
    """Plain PyTorch; what every backend is checked against."""
    dtype = accumulation_dtype(hidden)
    logits = F.linear(hidden, weight)
    if bias is not None:
        logits = logits.to(dtype) + bias.to(dtype)
    total = F.cross_entropy(logits.to(dtype), labels, ignore_index=ignore_index, reduction="sum")
    return total / (labels != ignore_index).sum().clamp(min=1)


def _with_gradients_wanted(call):
    """``call`` with the last argument filled in: which of hidden, weight and bias need a gradient."""

    def wanted(hidden, weight, bias, labels, ignore_index):
        tracked = torch.is_grad_enabled()
        wants = [tracked and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        return call(hidden, weight, bias, labels, ignore_index, wants)[0]

    return wanted


def _setup_context(ctx, inputs, output):
    _, dhidden, dweight, dbias, scale = output
    ctx.wanted = inputs[-1]
    ctx.bias_dtype = None if inputs[2] is None else inputs[2].dtype
    ctx.mark_non_differentiable(dhidden, dweight, dbias, scale)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dhidden, dweight, dbias, scale)


def _gradients(ctx, backward_op, grad, *_):
    if grad is None:
        return (None,) * 6
    *found, scale = ctx.saved_tensors
    factor = grad * scale
    # The loss is nearly always the root of backward or a summand of it: its gradient is 1, and where nothing is to be
    # scaled and looking costs no synchronisation, the gradients are handed on as they are.
    if type(factor) is not Tensor or factor.device.type != "cpu" or factor.item() != 1.0:
        found = backward_op(factor, *found)
    dhidden, dweight, dbias = (g if want else None for g, want in zip(found, ctx.wanted, strict=True))
    return dhidden, dweight, None if dbias is None else dbias.to(ctx.bias_dtype), None, None, None


def _fake_forward(hidden, weight, bias, labels, ignore_index, wanted):
    dtype = accumulation_dtype(hidden)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(hidden.shape if wanted[0] else (0,)),
        weight.new_empty(weight.shape if wanted[1] else (0,)),
        weight.new_empty(weight.shape[:1] if wanted[2] else (0,), dtype=dtype),
        hidden.new_empty((), dtype=dtype),
    )


OPERATOR = Operator(
    name="masked_lm_loss",
    # The loss and, where wanted (of hidden, weight, bias), its gradients but for a factor, else empty tensors; dbias in
    # the accumulation dtype; the factor, a scalar. (A backend that leaves 1 / rows to it keeps the probabilities of a
    # large vocabulary out of float16's subnormal range.)
    forward="(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward="(Tensor factor, Tensor dhidden, Tensor dweight, Tensor dbias) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=lambda factor, *found: tuple(torch.empty_like(g) for g in found),
    setup_context=_setup_context,
    gradients=_gradients,
)


def sweep(
    hidden: Tensor,
    weight: Tensor,
    wanted: list[bool],
    slice_bytes: int,
    pitch: int,
    to_gradient: Callable[[Tensor, int, int], Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden ``[R, N]``, weight ``[V, N]`` and bias ``[V]`` that are ``wanted``, a slice at a time.

    ``to_gradient(logits, begin, end)``: turns the logits ``[end - begin, V]`` of a slice, whose rows lie ``pitch``
    elements apart, into their gradient in place, and returns its column sums if a gradient of the bias is wanted.
    """
    (count, _), vocabulary = hidden.shape, weight.shape[0]
    dtype = accumulation_dtype(hidden)
    dhidden = hidden.new_empty(hidden.shape if wanted[0] else (0,))
    dweight = weight.new_empty(weight.shape if wanted[1] else (0,))
    dbias = weight.new_empty(vocabulary if wanted[2] else 0, dtype=dtype)
    if count == 0:
        return dhidden, dweight.zero_(), dbias.zero_()
    slices = -(-count * pitch * hidden.element_size() // slice_bytes)
    step = min(count, -(-count // (64 * slices)) * 64)
    # Over several slices a 16-bit dweight would be rounded as often: it is summed in float32.
    total = dweight if step == count or dtype == weight.dtype else dweight.to(dtype)
    buffer = hidden.new_empty(step, pitch)
    for begin in range(0, count, step):
        h = hidden[begin : begin + step]
        end = begin + h.shape[0]
        logits = buffer[: h.shape[0], :vocabulary]
        mm_(logits, h, weight.t())
        sums = to_gradient(logits, begin, end)
        if wanted[0]:
            mm_(dhidden[begin:end], logits, weight)
        if wanted[1]:
            mm_(total, logits.t(), h, add=begin > 0)
        if wanted[2]:
            dbias = sums if begin == 0 else dbias.add_(sums)
    return dhidden, dweight if total is dweight else dweight.copy_(total), dbias


def _cpu_forward(hidden, weight, bias, labels, ignore_index, wanted):
    rows = (labels != ignore_index).nonzero().flatten()
    count = rows.shape[0]
    labels = labels.index_select(0, rows)
    losses = []

    def to_gradient(logits, begin, end):
        loss, sums = torch.ops.fastbert_cpu.masked_lm_loss_rows_(logits, bias, labels[begin:end], 1.0 / count)
        losses.append(loss)
        return sums

    gradients = sweep(hidden.index_select(0, rows), weight, wanted, SLICE_BYTES["cpu"], weight.shape[0], to_gradient)
    dhidden, dweight, dbias = gradients
    if wanted[0]:
        dhidden = hidden.new_zeros(hidden.shape).index_copy_(0, rows, dhidden)
    scale = hidden.new_ones((), dtype=accumulation_dtype(hidden))
    loss = sum(losses) / count if losses else hidden.new_zeros(())
    return loss.to(scale.dtype), dhidden, dweight, dbias, scale


def _cpu_backward(factor, *found):
    # As a number: in float16 a loss scale of 65,536 would be infinite.
    return tuple(g * factor.item() for g in found)


CPU = OPERATOR.register("cpu")
torch.library.define(
    "fastbert_cpu::masked_lm_loss_rows_",
    "(Tensor(a!) logits, Tensor? bias, Tensor labels, float scale) -> (Tensor, Tensor)",
)
torch.library.impl("fastbert_cpu::masked_lm_loss", "cpu", _cpu_forward)
torch.library.impl("fastbert_cpu::masked_lm_loss_backward", "cpu", _cpu_backward)


def _cpu_why_not(hidden, *rest) -> str | None:
    return cpu.why_not(hidden)


def _triton_why_not(hidden, weight, bias, *rest) -> str | None:
    return triton.why_not(hidden, weight, bias)


BACKENDS = (
    Backend("cpu", _with_gradients_wanted(CPU), _cpu_why_not, cpu.unavailable),
    Backend("triton", _with_gradients_wanted(triton.register(OPERATOR)), _triton_why_not, triton.unavailable),
    Backend("eager", reference, lambda *args: None),
)
