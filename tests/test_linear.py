import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_as_eager, guarded, results

from fastbert import use_backend
from fastbert.ops import linear as module
from fastbert.ops.linear import linear, mm_

# The result is torch's own where the kernels do not serve: these tests are of the kernels.
pytestmark = pytest.mark.skipif(not module.FAST, reason="needs AVX2")


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
    """Output and every gradient against float64, no worse than torch's float32; and that the kernels were asked."""
    if grad is None:
        grad = torch.randn(*tensors["x"].shape[:-1], tensors["weight"].shape[0])
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


def test_every_number_of_rows():
    for rows in range(71):
        check(inputs(rows, 24, 40))


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
    ],
)
def test_sizes(rows, columns, outputs, bias):
    check(inputs(rows, columns, outputs, bias))


def test_widths_around_vectors_and_panels():
    for n in (*range(1, 35), 47, 48, 49, 63, 65, 79, 80, 81, 127, 128, 129):
        check(inputs(9, n, 20))
        check(inputs(9, 20, n))


def test_long_sum_of_few_rows_in_chunks_with_bias():
    check(inputs(5, 9001, 30))


@pytest.mark.parametrize(("shape", "columns", "outputs"), [((0,), 8, 5), ((4, 0), 8, 5), ((3,), 0, 5), ((3,), 8, 0)])
def test_empty(shape, columns, outputs):
    check(inputs(shape, columns, outputs))


def test_leading_dimensions():
    check(inputs((2, 3, 5), 40, 24))
    check(inputs((), 40, 24))


def test_layouts_in_guarded_buffers():
    tensors = inputs(37, 40, 30)
    tensors["x"], x_untouched = guarded(tensors["x"])
    tensors["weight"], weight_untouched = guarded(tensors["weight"])
    grad, grad_untouched = guarded(torch.randn(37, 30))
    check(tensors, grad)
    assert x_untouched() and weight_untouched() and grad_untouched()
    tensors = inputs(37, 40, 30)
    for x in (
        torch.randn(40, 37).t(),
        torch.randn(37, 80)[:, ::2],
        torch.randn(1, 40).expand(37, 40),
        torch.randn(37, 1).expand(37, 40),
        torch.randn(40).as_strided((37, 4), (1, 1)),  # rows that overlap
        torch.randn(5, 3, 40).transpose(0, 1),
    ):
        weight = torch.randn(30, x.shape[-1], requires_grad=True)
        check({"x": x.requires_grad_(), "weight": weight, "bias": tensors["bias"]})
        check({"x": torch.randn(37, x.shape[-1], requires_grad=True), "weight": torch.randn(x.shape[-1], 30).t()})
    for grad in (
        torch.ones(()).expand(37, 30),
        torch.randn(30).expand(37, 30),
        torch.randn(37, 1).expand(37, 30),
        torch.randn(30, 37).t(),
        torch.randn(37, 30, 2)[..., 0],
    ):
        check(tensors, grad)


def test_subset_of_gradients():
    for wanted in ("x", "weight", "bias", None):
        tensors = inputs(20, 30, 40)
        for name in tensors:
            tensors[name].requires_grad_(name == wanted)
        check(tensors)


@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1003, 200, 300), (9001, 40, 50), (5, 9001, 30)])
def test_same_bits_twice_and_for_any_number_of_threads(rows, columns, outputs):
    tensors, grad = inputs(rows, columns, outputs), torch.randn(rows, outputs)
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


def test_nan_of_a_row_stays_in_its_row():
    x, weight = torch.randn(50, 40), torch.randn(70, 40)
    clean = linear(x, weight)
    x[13] = torch.nan
    found = linear(x, weight)
    assert found[13].isnan().all()
    assert torch.equal(torch.cat([found[:13], found[14:]]), torch.cat([clean[:13], clean[14:]]))


def _kernels_serve(x, weight, bias=None):
    y = linear(x, weight, bias)
    assert torch.allclose(y, F.linear(x, weight, bias), atol=1e-2)
    return type(y.grad_fn).__name__ == "_LinearBackward"


def test_elsewhere_it_is_torch():
    """Other types, autocast, another backend asked for, few rows or columns: the same layer, torch's own."""
    tensors = inputs(64, 40, 30)
    assert _kernels_serve(**tensors)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert not _kernels_serve(**inputs(64, 40, 30, dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not _kernels_serve(**tensors)
        assert linear(**tensors).dtype == torch.bfloat16
    for name, served in (("cpu", True), ("eager", False), ("triton", False), ("cuda", False)):
        with use_backend(name):
            assert _kernels_serve(**tensors) == served
    with use_backend("cpu"):
        assert not _kernels_serve(**inputs(64, 40, 30, dtype=torch.bfloat16))
    for side, served in ((30, True), (31, False), (65, False)):
        module.LEAST_SIDE = side
        assert _kernels_serve(**tensors) == served


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
