import pytest
import torch
from compare import DTYPES, check, guarded, results
from interpreter import fewer, thinned

from fastbert.ops import gelu

SHAPES = [(1,), (7,), (3, 5), (64, 16), (5, 3, 33), (2, 3, 771), (37, 3072), (0, 8), (4, 0)]


def inputs(shape, dtype, bias=True):
    x = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype).requires_grad_()
    tensors = {"x": x}
    if bias:
        tensors["bias"] = torch.randn(shape[-1], dtype=torch.float64).to(dtype).requires_grad_()
    return tensors


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(backend, shape, dtype, bias, approximate):
    check(gelu, backend, inputs(shape, dtype, bias), approximate=approximate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length_up_to_130(backend, dtype):
    for n in thinned(backend, range(1, 131)):
        check(gelu, backend, inputs((2, n), dtype))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_whole_range(backend, dtype, approximate):
    """Tails, zeros of both signs and huge arguments: also relatively, where 1 + erf cancels in float32."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, 80.0, -80.0, 3e4, -3e4])]).to(dtype)
    y = gelu(x, approximate=approximate, backend=backend)
    exact = (
        x.double() * torch.special.ndtr(x.double())
        if approximate == "none"
        else gelu(x.double(), approximate="tanh", backend="eager")
    )
    assert torch.allclose(y.double(), exact, rtol=0, atol=4e-6 if dtype == torch.float32 else 1e-13)
    if backend != "eager":
        near = x.abs() < 5
        assert torch.allclose(y.double()[near], exact[near], rtol=2e-5, atol=1e-35)


def test_subset_of_gradients(backend):
    for wanted in ("x", "bias"):
        tensors = inputs((6, 40), torch.float32)
        for name in tensors:
            tensors[name].requires_grad_(name == wanted)
        check(gelu, backend, tensors)


def test_layouts_in_guarded_buffers(backend):
    """Strided and three-dimensional inputs, sliced, transposed and expanded gradients (faults 16 and 22)."""
    x = torch.randn(3, 5, 40, requires_grad=True)
    bias = torch.randn(40, requires_grad=True)
    view, untouched = guarded(x)
    grad, grad_untouched = guarded(torch.randn(3, 5, 40))
    check(gelu, backend, {"x": view, "bias": bias}, grad=grad)
    assert untouched() and grad_untouched()
    check(gelu, backend, {"x": torch.randn(40, 5, 3).permute(2, 1, 0).requires_grad_(), "bias": bias})
    check(gelu, backend, {"x": torch.randn(5, 3, 40).transpose(0, 1).requires_grad_(), "bias": bias})
    check(gelu, backend, {"x": torch.randn(3, 1, 40).expand(3, 5, 40).clone().requires_grad_()})
    for make in (
        lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
        lambda y: torch.randn(*y.shape, 2, dtype=y.dtype)[..., 0],
        lambda y: torch.randn(y.shape[::-1], dtype=y.dtype).permute(2, 1, 0),
    ):
        torch.manual_seed(1)
        fixed = make(gelu(x))
        check(gelu, backend, {"x": x, "bias": bias}, grad=lambda y, g=fixed: g.to(y.dtype))


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_pairs(backend, dtype, bias_dtype):
    tensors = inputs((9, 24), dtype)
    tensors["bias"] = tensors["bias"].detach().to(bias_dtype).requires_grad_()
    found = check(gelu, backend, tensors)
    assert found["output"].dtype == dtype and found["bias"].dtype == bias_dtype


def test_bias_gradient_over_many_rows(backend):
    """Sums of 16-bit gradients over 100,000 rows are kept in float32 (fault 23)."""
    rows = fewer(backend, 100_000)
    x = torch.randn(rows, 8).bfloat16()
    bias = torch.zeros(8, requires_grad=True)
    grad = torch.rand(rows, 8).bfloat16()
    (actual,) = torch.autograd.grad(gelu(x, bias, backend=backend), bias, grad)
    wide = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(gelu(x.double(), wide, backend="eager"), wide, grad.double())
    assert (actual - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_same_bits_twice_and_for_any_number_of_threads(backend):
    rows = fewer(backend, 4099)
    tensors, grad = inputs((rows, 64), torch.float32), torch.randn(rows, 64)

    def run():
        y = gelu(**tensors, backend=backend)
        return (y, *torch.autograd.grad(y, tensors.values(), grad))

    threads = torch.get_num_threads()
    first, second = run(), run()
    try:
        torch.set_num_threads(1)
        third = run()
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    if backend != "eager":
        assert all(torch.equal(a, c) for a, c in zip(first, third, strict=True))


@pytest.mark.float64
def test_gradcheck(backend):
    tensors = inputs((4, 5), torch.float64)
    for approximate in ("none", "tanh"):
        assert torch.autograd.gradcheck(
            lambda x, bias, a=approximate: gelu(x, bias, approximate=a, backend=backend), tuple(tensors.values())
        )


def test_exact_and_tanh_are_told_apart(backend):
    """Fault 26: the two forms differ by up to 5e-4 and neither stands in for the other."""
    x = torch.linspace(-4, 4, 1001)
    exact, tanh = (gelu(x, approximate=a, backend=backend) for a in ("none", "tanh"))
    assert torch.allclose(exact, torch.nn.functional.gelu(x), atol=1e-6)
    assert torch.allclose(tanh, torch.nn.functional.gelu(x, approximate="tanh"), atol=1e-6)
    assert 1e-4 < (exact - tanh).abs().max() < 1e-3


def test_opcheck_and_compile(backend):
    if backend == "eager":
        pytest.skip("eager is made of torch's own operators")
    op = getattr(torch.ops, f"fastbert_{backend}")
    tensors = inputs((6, 10), torch.float32)
    torch.library.opcheck(op.gelu.default, (tensors["x"], tensors["bias"], "none"))
    torch.library.opcheck(op.gelu.default, (tensors["x"], None, "tanh"))
    torch.library.opcheck(op.gelu_backward.default, (torch.randn(6, 10), torch.randn(6, 10), None, "none"))
    compiled = torch.compile(lambda x, bias: gelu(x, bias, backend=backend), fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        tensors, grad = inputs((n, 10), torch.float32), torch.randn(n, 10)
        traced = results(compiled, tensors, grad)
        direct = results(lambda **t: gelu(**t, backend=backend), tensors, grad)
        assert all(torch.equal(traced[name], direct[name]) for name in direct)


def test_second_derivative_is_refused():
    x = torch.randn(3, requires_grad=True)
    (g,) = torch.autograd.grad(gelu(x, backend="cpu").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(3, dtype=torch.int64)}, TypeError, "x is torch.int64; accepted are torch.float32"),
        ({"x": [1.0]}, TypeError, "x is a list; a tensor is accepted"),
        ({"bias": torch.ones(4)}, ValueError, r"bias has shape \(4,\); the last dimension of x needs \(3,\)"),
        ({"bias": torch.ones(3, dtype=torch.int32)}, TypeError, "bias is torch.int32"),
        ({"bias": torch.ones(3, device="meta")}, ValueError, "bias is on meta; it must be on cpu"),
        ({"approximate": "quick"}, ValueError, "approximate is 'quick'; accepted are 'none' and 'tanh'"),
        ({"backend": "cuda11"}, ValueError, "backend is 'cuda11'; accepted are 'eager', 'cpu'"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        gelu(**({"x": torch.ones(2, 3)} | change))
