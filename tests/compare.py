"""The one way an op is checked: against the eager reference in float64, no worse than eager is in its own dtype."""

import mmap

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WITH_FLOAT64 = ("eager", "cpu")  # the backends that have it

# A kernel's error may be twice eager's, plus this many times the dtype's epsilon, relative to the largest value or to
# 1, the size of the inputs. (Eager in float64 is the reference itself and has no error; 16-bit results differ by their
# last rounding.)
EPSILONS = {torch.float64: 256, torch.float32: 16, torch.bfloat16: 0.5, torch.float16: 0.5}


def assert_close_as_eager(actual, eager, exact, name="result", dtype=None):
    """``actual`` is no further from ``exact`` (float64) than twice what ``eager``, of the same dtype, is.

    ``dtype``: the coarsest the result was computed from, if not its own.
    """
    assert actual.dtype == eager.dtype, f"{name} is {actual.dtype}, eager's is {eager.dtype}"
    assert actual.shape == eager.shape == exact.shape, f"{name} is {actual.shape}, eager's {eager.shape}"
    if actual.numel() == 0:
        return
    tiny = max(EPSILONS[d] * torch.finfo(d).eps for d in (actual.dtype, dtype or actual.dtype))
    actual, eager, exact = (t.detach().double().cpu() for t in (actual, eager, exact))
    assert torch.equal(actual.isnan(), exact.isnan()), f"{name} has NaN where the reference has none, or the reverse"
    actual, eager, exact = (t.nan_to_num(0.0) for t in (actual, eager, exact))
    error = (actual - exact).abs().max().item()
    allowed = 2 * (eager - exact).abs().max().item() + tiny * max(1.0, exact.abs().max().item())
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def results(function, tensors, grad):
    """The output of ``function(**tensors)`` and the gradient of each tensor that requires one, by name."""
    output = function(**tensors)
    wanted = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    found = {"output": output}
    if wanted:
        cotangent = grad.to(output.dtype) if isinstance(grad, torch.Tensor) else grad(output)
        found |= dict(zip(wanted, torch.autograd.grad(output, wanted.values(), cotangent), strict=True))
    return found


def check(op, backend, tensors, grad=None, **options):
    """``op(**tensors, **options)`` on ``backend``: output and every gradient as eager's, by assert_close_as_eager.

    ``grad``: the output's gradient, or a function of the output that makes it (to choose its strides); random if
    None. Incoming gradient and inputs must be left as they were.
    """
    if grad is None:
        grad = torch.randn(results(op, _detached(tensors), None)["output"].shape, device=_device(tensors))
    before = {n: t.clone() for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    actual = results(lambda **t: op(**t, **options, backend=backend), tensors, grad)
    for n, t in before.items():
        assert torch.equal(t.nan_to_num(7.0), tensors[n].nan_to_num(7.0)), f"{n} was overwritten"
    eager = results(lambda **t: op(**t, **options, backend="eager"), tensors, grad)
    exact = results(lambda **t: op(**t, **options, backend="eager"), _doubled(tensors), grad)
    dtypes = [t.dtype for t in tensors.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    for name in actual:
        assert_close_as_eager(actual[name], eager[name], exact[name], name, coarsest)
    return actual


def _device(tensors):
    return next(t.device for t in tensors.values() if isinstance(t, torch.Tensor))


def _detached(tensors):
    return {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}


def _doubled(tensors):
    """The same values in float64, as leaves of their own."""

    def double(t):
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t
        return t.detach().double().requires_grad_(t.requires_grad)

    return {n: double(t) for n, t in tensors.items()}


def guarded(tensor):
    """``tensor`` as a view with gaps between its rows inside a buffer of NaN, and a check that the gaps stayed NaN."""
    rows, columns = tensor.flatten(0, -2), tensor.shape[-1]
    buffer = torch.full((rows.shape[0] + 2, columns + 13), torch.nan, dtype=tensor.dtype, device=tensor.device)
    inside = buffer[1:-1, 5 : 5 + columns]
    inside.copy_(rows.detach())
    view = inside.unflatten(0, tensor.shape[:-1]) if tensor.dim() > 2 else inside

    def untouched():
        outside = torch.ones_like(buffer, dtype=torch.bool)
        outside[1:-1, 5 : 5 + columns] = False
        return bool(buffer[outside].isnan().all())

    return view.requires_grad_(tensor.requires_grad), untouched


def far_apart(rows, columns, stride, dtype=torch.float16):
    """[rows, columns] of random numbers, rows ``stride`` apart, in memory of which only these are ever touched."""
    size = dtype.itemsize
    buffer = torch.frombuffer(mmap.mmap(-1, ((rows - 1) * stride + columns) * size), dtype=dtype)
    view = buffer.as_strided((rows, columns), (stride, 1))
    return view.copy_(torch.randn(rows, columns) * (1 if dtype.is_floating_point else 100))
