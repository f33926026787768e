import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_as_eager, guarded, results

from fastbert import use_backend
from fastbert.ops import linear as module
from fastbert.ops.linear import linear, mm_

# The result is torch's own where the kernels do not serve: these tests are of the kernels.
pytestmark = pytest.mark.skipif(not module.FAST, reason="needs AVX2")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(params=[F32, BF16], ids=str)
def dtype(request):
    if request.param not in module.FAST:
        pytest.skip("products of bfloat16 need AVX512_BF16")
    return request.param


needs_bfloat16 = pytest.mark.skipif(BF16 not in module.FAST, reason="needs AVX512_BF16")


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(module, "LEAST_SIZE", 0)
    monkeypatch.setattr(module, "LEAST_SIDE", 0)


def inputs(rows, columns, outputs, bias=True, dtype=torch.float32):
    shape = (rows,) if isinstance(rows, int) else rows
    tensors = {"x": torch.randn(*shape, columns), "weight": torch.randn(outputs, columns)}
    if bias:
        tensors["bias"] = torch.randn(outputs)
    return {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}


def check(tensors, grad=None):
    """Output and every gradient against float64, no worse than torch's own; and that the kernels were asked."""
    if grad is None:
        grad = torch.randn(*tensors["x"].shape[:-1], tensors["weight"].shape[0]).to(tensors["x"].dtype)
    before = {name: t.clone() for name, t in tensors.items()}
    actual = results(linear, tensors, grad)
    for name, t in before.items():
        assert torch.equal(t.nan_to_num(7.0), tensors[name].nan_to_num(7.0)), f"{name} was overwritten"
    doubled = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in tensors.items()}
    eager, exact = (
        results(lambda x, weight, bias=None: F.linear(x, weight, bias), tensors, grad),
        results(lambda x, weight, bias=None: F.linear(x, weight, bias), doubled, grad),
    )
    if any(t.requires_grad for t in tensors.values()):
        assert type(actual["output"].grad_fn).__name__ == "_LinearBackward"
    for name in actual:
        assert_close_as_eager(actual[name], eager[name], exact[name], name)
    return actual


def test_every_number_of_rows(dtype):
    for rows in range(71):
        check(inputs(rows, 24, 40, dtype=dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"),
    [
        (1, 1, 1),
        (3, 5, 7),
        (64, 64, 64),
        (129, 191, 193),  # one step past the length of a chain, one before it
        (100, 769, 63),  # two blocks of the sum, the second short of whole vectors
        (50, 1537, 65),
        (1100, 800, 67),  # more strips than one packing of b serves
        (300, 129, 900),  # several groups of panels
        (2049, 31, 47),  # dw in chunks
        (17001, 33, 50),
        (70, 3300, 40),  # a sum of bfloat16 that one panel does not hold
    ],
)
def test_sizes(rows, columns, outputs, bias, dtype):
    check(inputs(rows, columns, outputs, bias, dtype))


def test_widths_around_vectors_and_panels(dtype):
    for n in (*range(1, 35), 47, 48, 49, 63, 65, 79, 80, 81, 127, 128, 129):
        check(inputs(9, n, 20, dtype=dtype))
        check(inputs(9, 20, n, dtype=dtype))


def test_long_sum_of_few_rows_in_chunks_with_bias(dtype):
    check(inputs(5, 9001, 30, dtype=dtype))


@pytest.mark.parametrize(("shape", "columns", "outputs"), [((0,), 8, 5), ((4, 0), 8, 5), ((3,), 0, 5), ((3,), 8, 0)])
def test_empty(shape, columns, outputs, dtype):
    check(inputs(shape, columns, outputs, dtype=dtype))


def test_leading_dimensions(dtype):
    check(inputs((2, 3, 5), 40, 24, dtype=dtype))
    check(inputs((), 40, 24, dtype=dtype))


def test_layouts_in_guarded_buffers(dtype):
    tensors = inputs(37, 40, 30, dtype=dtype)
    tensors["x"], x_untouched = guarded(tensors["x"])
    tensors["weight"], weight_untouched = guarded(tensors["weight"])
    grad, grad_untouched = guarded(torch.randn(37, 30).to(dtype))
    check(tensors, grad)
    assert x_untouched() and weight_untouched() and grad_untouched()
    tensors = inputs(37, 40, 30, dtype=dtype)

    def drawn(*shape):
        return torch.randn(shape).to(dtype)

    for x in (
        drawn(40, 37).t(),
        drawn(37, 80)[:, ::2],
        drawn(1, 40).expand(37, 40),
        drawn(37, 1).expand(37, 40),
        drawn(40).as_strided((37, 4), (1, 1)),  # rows that overlap
        drawn(5, 3, 40).transpose(0, 1),
    ):
        weight = drawn(30, x.shape[-1]).requires_grad_()
        check({"x": x.requires_grad_(), "weight": weight, "bias": tensors["bias"]})
        check({"x": drawn(37, x.shape[-1]).requires_grad_(), "weight": drawn(x.shape[-1], 30).t()})
    for grad in (
        torch.ones((), dtype=dtype).expand(37, 30),
        drawn(30).expand(37, 30),
        drawn(37, 1).expand(37, 30),
        drawn(30, 37).t(),
        drawn(37, 30, 2)[..., 0],
    ):
        check(tensors, grad)


def test_subset_of_gradients(dtype):
    for wanted in ("x", "weight", "bias", None):
        tensors = inputs(20, 30, 40, dtype=dtype)
        for name in tensors:
            tensors[name].requires_grad_(name == wanted)
        check(tensors)


@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1003, 200, 300), (9001, 40, 50), (5, 9001, 30)])
def test_same_bits_twice_and_for_any_number_of_threads(rows, columns, outputs, dtype):
    tensors, grad = inputs(rows, columns, outputs, dtype=dtype), torch.randn(rows, outputs).to(dtype)
    threads = torch.get_num_threads()
    first, second = results(linear, tensors, grad), results(linear, tensors, grad)
    try:
        torch.set_num_threads(1)
        third = results(linear, tensors, grad)
        torch.set_num_threads(3)
        fourth = results(linear, tensors, grad)
    finally:
        torch.set_num_threads(threads)
    for other in (second, third, fourth):
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(7, 20, 30), (200, 300, 77), (10, 5000, 20), (10, 0, 20)])
def test_into_rows_of_a_buffer(rows, depth, columns, add):
    for a in (torch.randn(rows, depth), torch.randn(depth, rows).t()):
        for b in (torch.randn(depth, columns), torch.randn(columns, depth).t()):
            start = torch.randn(rows, columns)
            out, untouched = guarded(start)
            mm_(out, a, b, add)
            assert untouched()
            exact = a.double() @ b.double() + (start.double() if add else 0.0)
            assert_close_as_eager(out, a @ b + (start if add else 0.0), exact)


@needs_bfloat16
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(7, 21, 30), (200, 300, 77), (10, 6000, 20), (10, 0, 20)])
def test_float32_and_bfloat16_mixed(rows, depth, columns, add):
    """Operands are rounded to bfloat16, sums are float32: every mix of types and layouts."""
    for dtypes in itertools.product((F32, BF16), repeat=3):
        if BF16 not in dtypes:
            continue
        for a in (torch.randn(rows, depth), torch.randn(depth, rows).t()):
            for b in (torch.randn(depth, columns), torch.randn(columns, depth).t()):
                a, b, start = (t.to(dtype) for t, dtype in zip((a, b, torch.randn(rows, columns)), dtypes, strict=True))
                out, untouched = guarded(start)
                mm_(out, a, b, add)
                assert untouched()
                rounded = a.bfloat16(), b.bfloat16()
                exact = rounded[0].double() @ rounded[1].double() + (start.double() if add else 0.0)
                single = rounded[0].float() @ rounded[1].float() + (start.float() if add else 0.0)
                assert_close_as_eager(out, single.to(out.dtype), exact)


@needs_bfloat16
def test_autocast_gives_bfloat16_and_float32_gradients_of_float32_weights():
    """As torch's, but weights are not converted, and their gradients not rounded."""
    tensors = inputs(300, 64, 48)
    for x_dtype in (F32, BF16):
        tensors["x"] = tensors["x"].detach().to(x_dtype).requires_grad_()
        grad = torch.randn(300, 48).bfloat16()
        found = {}
        for backend in ("cpu", "eager"):
            with torch.autocast("cpu", dtype=BF16), use_backend(backend):
                found[backend] = results(linear, tensors, grad)
        rounded = {name: t.detach().bfloat16().double().requires_grad_() for name, t in tensors.items()}
        exact = results(linear, rounded, grad.double())
        for name, actual in found["cpu"].items():
            assert actual.dtype == found["eager"][name].dtype, name
            assert_close_as_eager(actual, found["eager"][name], exact[name], name)
        error, eager_error = ((found[b]["weight"] - exact["weight"]).abs().max() for b in ("cpu", "eager"))
        assert error < eager_error / 100


@needs_bfloat16
def test_changing_numbers_of_rows_leave_no_memory_behind():
    """torch's bfloat16 products keep compiled code for each number of rows."""
    script = """
import resource, torch
from fastbert.ops.linear import linear
weight = torch.randn(768, 768, dtype=torch.bfloat16, requires_grad=True)
def peak(sizes):
    for rows in sizes:
        linear(torch.randn(rows, 768, dtype=torch.bfloat16), weight).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak(range(1000, 1010))
print(peak(range(900, 1000)) - before)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 5000  # KiB


def test_nan_of_a_row_stays_in_its_row(dtype):
    x, weight = torch.randn(50, 41).to(dtype), torch.randn(70, 41).to(dtype)
    clean = linear(x, weight)
    x[13] = torch.nan
    found = linear(x, weight)
    assert found[13].isnan().all()
    assert torch.equal(torch.cat([found[:13], found[14:]]), torch.cat([clean[:13], clean[14:]]))


def _kernels_serve(x, weight, bias=None):
    y = linear(x, weight, bias)
    assert torch.allclose(y, F.linear(x, weight, bias), atol=0.1 if y.dtype == BF16 else 1e-2)
    return type(y.grad_fn).__name__ == "_LinearBackward"


def test_elsewhere_it_is_torch():
    """Other types, another backend asked for, few rows or columns: the same layer, torch's own."""
    tensors = inputs(64, 40, 30)
    assert _kernels_serve(**tensors)
    for dtype in (torch.float16, torch.float64):
        assert not _kernels_serve(**inputs(64, 40, 30, dtype=dtype))
    for dtype in (BF16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert _kernels_serve(**tensors) == (dtype in module.FAST)
            assert linear(**tensors).dtype == dtype
    for name, served in (("cpu", True), ("eager", False), ("triton", False), ("cuda", False)):
        with use_backend(name):
            assert _kernels_serve(**tensors) == served
    for side, served in ((30, True), (31, False), (65, False)):
        module.LEAST_SIDE = side
        assert _kernels_serve(**tensors) == served


def test_without_the_instructions_bfloat16_is_torch_s(monkeypatch):
    monkeypatch.setattr(module, "FAST", frozenset({F32}))
    assert not _kernels_serve(**inputs(64, 40, 30, dtype=BF16))
    out = torch.zeros(20, 30)
    mm_(out, torch.ones(20, 40, dtype=BF16), torch.ones(40, 30, dtype=BF16), add=True)
    assert (out == 40).all()


def test_compile_traces_torch_and_gives_the_same():
    tensors, grad = inputs(40, 24, 32), torch.randn(40, 32)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    traced, direct = results(compiled, tensors, grad), results(linear, tensors, grad)
    for name in direct:
        assert torch.allclose(traced[name], direct[name], rtol=1e-4, atol=1e-4)


def test_gradcheck():
    assert torch.autograd.gradcheck(linear, tuple(inputs(4, 5, 3, dtype=torch.float64).values()))


def test_second_derivative_is_refused():
    tensors = inputs(20, 30, 40)
    (g,) = torch.autograd.grad(linear(**tensors).square().sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_errors_are_torch_s():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.randn(20, 30), torch.randn(40, 31))
    with pytest.raises(RuntimeError):
        linear(torch.randn(20, 30), torch.randn(40, 30), torch.randn(39))
    with pytest.raises(RuntimeError, match=r"\[20, 30\] times \[31, 40\] does not fit"):
        torch.ops.fastbert_cpu.product_(torch.randn(20, 40), torch.randn(20, 30), torch.randn(31, 40), False)
