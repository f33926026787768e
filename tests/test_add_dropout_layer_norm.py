import pytest
import torch
from compare import DTYPES, check, guarded, results
from interpreter import fewer, thinned

from fastbert.ops import add_dropout_layer_norm, dropout_bits

SHAPES = [(1, 1), (3, 1), (3, 2), (2, 7), (5, 64), (2, 3, 33), (37, 768), (4, 771), (2, 4097), (0, 8), (2, 0, 8)]


def inputs(shape, dtype, x_bias=True, parameter_dtype=None):
    def make(*size, dtype=dtype):
        return torch.randn(*size, dtype=torch.float64).to(dtype).requires_grad_()

    n, dtype_p = shape[-1], parameter_dtype or dtype
    tensors = {"x": make(*shape), "residual": make(*shape)}
    tensors |= {"weight": make(n, dtype=dtype_p), "bias": make(n, dtype=dtype_p)}
    return tensors | ({"x_bias": make(n, dtype=dtype_p)} if x_bias else {})


# With one or two columns and a tiny eps the variance can be nearly nothing, and the result nearly arbitrary.
OPTIONS = {"eps": 1e-3, "seed": 1234567890123456789}


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("x_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(backend, shape, dtype, x_bias, dropout_p):
    check(add_dropout_layer_norm, backend, inputs(shape, dtype, x_bias), dropout_p=dropout_p, **OPTIONS)


def test_every_length_up_to_130(backend):
    for n in thinned(backend, range(1, 131)):
        check(add_dropout_layer_norm, backend, inputs((3, n), torch.float32), dropout_p=0.1, **OPTIONS)


@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("float16", "float32")], ids=str)
@pytest.mark.parametrize("n", [256, 512, 520, 1024, 1536, 4096, 8192, 8200])
def test_row_sizes(backend, n, dtypes):
    """Each way in which a kernel may hold a row, and rows too long to be held."""
    x, residual = (getattr(torch, name) for name in dtypes)
    tensors = inputs((5, n), x, parameter_dtype=torch.float32)
    tensors["residual"] = tensors["residual"].detach().to(residual).requires_grad_()
    check(add_dropout_layer_norm, backend, tensors, dropout_p=0.1, **OPTIONS)


@pytest.mark.parametrize("parameters", DTYPES, ids=str)
@pytest.mark.parametrize("residual", DTYPES, ids=str)
@pytest.mark.parametrize("x", DTYPES, ids=str)
def test_dtype_mixes(backend, x, residual, parameters):
    """Every pair of input and parameter dtype, and of the two inputs (fault 24)."""
    tensors = inputs((9, 40), x, parameter_dtype=parameters)
    tensors["residual"] = tensors["residual"].detach().to(residual).requires_grad_()
    found = check(add_dropout_layer_norm, backend, tensors, dropout_p=0.2, **OPTIONS)
    assert found["output"].dtype == torch.promote_types(x, residual)
    assert all(found[name].dtype == tensors[name].dtype for name in tensors)


def test_under_autocast(backend):
    """A 16-bit product, a float32 residual and float32 parameters, as autocast mixes them (fault 24)."""
    linear = torch.nn.Linear(24, 24)
    tensors = inputs((5, 24), torch.float32, x_bias=False)

    def run(backend):
        with torch.autocast(tensors["x"].device.type, torch.bfloat16):
            y = linear(tensors["x"])
            assert y.dtype == torch.bfloat16
            parameters = [tensors[name] for name in ("residual", "weight", "bias")]
            return add_dropout_layer_norm(y, *parameters, backend=backend)

    y, eager = run(backend), run("eager")
    assert y.dtype == torch.float32
    assert torch.allclose(y, eager, atol=1e-5)
    y.sum().backward()


def test_eps_is_honoured(backend):
    """Fault 25: eps of 1e-5 and 1e-12 give clearly different results on a row of small variance."""
    x, zero, one, bias = torch.randn(4, 32) * 1e-3, torch.zeros(4, 32), torch.ones(32), torch.zeros(32)
    for eps in (1e-12, 1e-5):
        y = add_dropout_layer_norm(x, zero, one, bias, eps=eps, backend=backend)
        assert torch.allclose(y, torch.nn.functional.layer_norm(x, (32,), eps=eps), atol=1e-5)
    default = add_dropout_layer_norm(x, zero, one, bias, backend=backend)
    assert torch.allclose(default, torch.nn.functional.layer_norm(x, (32,), eps=1e-12), atol=1e-5)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.999, 1.0])
def test_dropped_elements_are_those_of_the_contract(backend, dropout_p):
    """With a zero residual and unit weights, what was dropped can be read off the gradient of x, exactly."""
    n, seed, rows = 67, -3, torch.tensor([5, 0, (1 << 33) + 7])
    tensors = inputs((3, n), torch.float32, x_bias=False)
    grad = torch.randn(3, n)
    options = {"dropout_p": dropout_p, "seed": seed, "rows": rows, "eps": 1e-3}
    found = check(add_dropout_layer_norm, backend, tensors, grad=grad, **options)
    kept = dropout_bits(seed, rows >> 32, rows, n) >= round(dropout_p * 65536)
    assert torch.equal(found["x"] != 0, kept & (found["residual"] != 0))


def test_rows_are_what_packing_says(backend):
    """Dropout of packed rows is that of the padded batch."""
    tensors = inputs((4, 6, 24), torch.float32)
    options = {"dropout_p": 0.3, "seed": 7, "backend": backend}
    padded = add_dropout_layer_norm(**tensors, **options).flatten(0, 1)
    indices = torch.tensor([0, 1, 5, 6, 12, 13, 23])
    packed = {n: t.flatten(0, 1)[indices] if t.dim() == 3 else t for n, t in tensors.items()}
    assert torch.equal(add_dropout_layer_norm(**packed, rows=indices, **options), padded[indices])


def test_seed_is_read_by_value(backend):
    """Fault 20: the same seed from different allocations, as int and as tensor; another seed differs."""
    tensors = {name: t.detach() for name, t in inputs((8, 64), torch.float32).items()}

    def run(seed):
        return add_dropout_layer_norm(**tensors, dropout_p=0.5, seed=seed, backend=backend)

    first, hold = run(torch.tensor([99])), torch.tensor([99])
    assert torch.equal(first, run(hold)) and torch.equal(first, run(99)) and torch.equal(first, run(hold.clone()))
    assert not torch.equal(first, run(98)) and not torch.equal(first, run(99 + (1 << 32)))


def test_seed_none_follows_the_generator(backend):
    tensors = {name: t.detach() for name, t in inputs((8, 64), torch.float32).items()}

    def run():
        return add_dropout_layer_norm(**tensors, dropout_p=0.5, backend=backend)

    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    assert torch.equal(first, run()) and not torch.equal(first, second)


def test_recomputation_draws_the_same_mask(backend):
    """Fault 21: activation checkpointing gives the gradients of a run without it."""
    tensors, grad = inputs((6, 32), torch.float32), torch.randn(6, 32)

    def block(**t):
        return add_dropout_layer_norm(**t, dropout_p=0.5, backend=backend)

    torch.manual_seed(11)
    plain = results(block, tensors, grad)
    torch.manual_seed(11)
    again = results(
        lambda **t: torch.utils.checkpoint.checkpoint(
            lambda *a: block(**dict(zip(t, a, strict=True))), *t.values(), use_reentrant=False
        ),
        tensors,
        grad,
    )
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_nan_in_a_dropped_element_is_dropped(backend):
    tensors = {name: t.detach() for name, t in inputs((2, 64), torch.float32, x_bias=False).items()}
    dropped = dropout_bits(5, 0, torch.arange(2), 64) < round(0.5 * 65536)
    tensors["x"] = torch.where(dropped, torch.nan, tensors["x"])
    y = add_dropout_layer_norm(**tensors, dropout_p=0.5, seed=5, backend=backend)
    assert y.isfinite().all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_layouts_in_guarded_buffers(backend, dropout_p):
    """Strided and three-dimensional inputs; sliced, transposed and expanded gradients (faults 16 and 22)."""
    options = OPTIONS | {"dropout_p": dropout_p}
    tensors = inputs((3, 5, 40), torch.float32)
    x, x_untouched = guarded(tensors["x"])
    residual, residual_untouched = guarded(tensors["residual"])
    grad, grad_untouched = guarded(torch.randn(3, 5, 40))
    check(add_dropout_layer_norm, backend, tensors | {"x": x, "residual": residual}, grad=grad, **options)
    assert x_untouched() and residual_untouched() and grad_untouched()
    transposed = {
        "x": torch.randn(40, 5, 3).permute(2, 1, 0).requires_grad_(),
        "residual": torch.randn(5, 3, 40).transpose(0, 1).requires_grad_(),
    }
    check(add_dropout_layer_norm, backend, tensors | transposed, **options)
    for grad in (torch.ones(()).expand(3, 5, 40), torch.randn(3, 5, 40, 2)[..., 0], torch.randn(40, 5, 3).T):
        check(add_dropout_layer_norm, backend, tensors, grad=grad, **options)


def test_subset_of_gradients(backend):
    for wanted in ("x", "residual", "weight", "bias", "x_bias"):
        tensors = inputs((6, 40), torch.float32)
        for name in tensors:
            tensors[name].requires_grad_(name == wanted)
        check(add_dropout_layer_norm, backend, tensors, dropout_p=0.1, **OPTIONS)


def test_one_tensor_as_x_and_residual(backend):
    """Without dropout both gradients are one tensor: adding them up must not count one twice or lose one."""
    tensors = {"x": torch.randn(4, 16, requires_grad=True)}
    weight, bias = torch.randn(2, 16).double()

    def twice(x, **options):
        return add_dropout_layer_norm(x, x, weight.to(x.dtype), bias.to(x.dtype), **options)

    for dropout_p in (0.0, 0.3):
        check(twice, backend, tensors, dropout_p=dropout_p, seed=3, eps=1e-3)


def test_weight_gradients_over_many_rows(backend):
    """Fault 23: sums over 100,000 rows of bfloat16 are kept in float32."""
    rows = fewer(backend, 100_000)
    tensors = inputs((rows, 8), torch.float32, parameter_dtype=torch.float32)
    for name in ("x", "residual"):
        tensors[name] = tensors[name].detach().bfloat16().requires_grad_()
    grad = torch.rand(rows, 8).bfloat16()
    actual = results(lambda **t: add_dropout_layer_norm(**t, eps=1e-3, backend=backend), tensors, grad)
    wide = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    exact = results(lambda **t: add_dropout_layer_norm(**t, eps=1e-3, backend="eager"), wide, grad)
    for name in ("weight", "bias", "x_bias"):
        difference = (actual[name].double() - exact[name]).abs().max()
        assert difference <= 2e-5 * max(exact[name].abs().max(), 100.0), name


def test_same_bits_twice_and_for_any_number_of_threads(backend):
    rows = fewer(backend, 4099)
    tensors, grad = inputs((rows, 64), torch.float32), torch.randn(rows, 64)

    def run():
        return results(lambda **t: add_dropout_layer_norm(**t, dropout_p=0.1, seed=1, backend=backend), tensors, grad)

    threads = torch.get_num_threads()
    first, second = run(), run()
    try:
        torch.set_num_threads(1)
        third = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[n], second[n]) for n in first)
    if backend != "eager":
        assert all(torch.equal(first[n], third[n]) for n in first)


@pytest.mark.float64
def test_gradcheck(backend):
    tensors = inputs((4, 5), torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, r, w, b, xb: add_dropout_layer_norm(x, r, w, b, x_bias=xb, dropout_p=0.3, backend=backend, **OPTIONS),
        tuple(tensors.values()),
    )


def test_opcheck_and_compile(backend):
    if backend == "eager":
        pytest.skip("eager is made of torch's own operators")
    op = getattr(torch.ops, f"fastbert_{backend}").add_dropout_layer_norm.default
    tensors = inputs((6, 10), torch.float32)
    torch.library.opcheck(op, (*tensors.values(), torch.tensor([3]), torch.arange(6), 0.1, 1e-3))
    torch.library.opcheck(op, (*list(tensors.values())[:4], None, None, None, 0.0, 1e-3))
    backward = getattr(torch.ops, f"fastbert_{backend}").add_dropout_layer_norm_backward.default
    plain = [t.detach() for t in tensors.values()]
    for p, seed in ((0.0, None), (0.1, torch.tensor([3]))):
        torch.library.opcheck(backward, (torch.randn(6, 10), *plain, seed, None, p, 1e-3))
    function = lambda **t: add_dropout_layer_norm(**t, dropout_p=0.1, backend=backend, **OPTIONS)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        tensors, grad = inputs((n, 10), torch.float32), torch.randn(n, 10)
        traced, direct = results(compiled, tensors, grad), results(function, tensors, grad)
        assert all(torch.equal(traced[name], direct[name]) for name in direct)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X.long()}, TypeError, "x is torch.int64"),
        ({"residual": torch.ones(3, 2)}, ValueError, r"residual has shape \(3, 2\); x has \(2, 3\)"),
        ({"weight": torch.ones(2)}, ValueError, r"weight has shape \(2,\); the last dimension of x needs \(3,\)"),
        ({"bias": None}, TypeError, "bias is None; a tensor is accepted"),
        ({"x_bias": torch.ones(3, 1)}, ValueError, r"x_bias has shape \(3, 1\)"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5; a probability from 0 to 1 is accepted"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p is nan"),
        ({"rows": torch.arange(3)}, ValueError, r"rows is torch.int64 of shape \(3,\); int64 of \(2,\)"),
        ({"rows": torch.arange(2, dtype=torch.int32)}, ValueError, "rows is torch.int32"),
        ({"dropout_p": 0.1, "seed": 1.5}, TypeError, "seed is 1.5; None, an int or a one-element int64 tensor"),
        ({"dropout_p": 0.1, "seed": 1 << 64}, ValueError, "seed is 18446744073709551616; it must fit in 64 bits"),
        ({"dropout_p": 0.1, "seed": torch.tensor([1, 2])}, ValueError, "seed is a tensor of torch.int64 and shape"),
        ({"x": torch.ones(2, 0), "residual": torch.ones(2, 0)}, ValueError, r"x has shape \(2, 0\)"),
        ({"residual": torch.ones(2, 3, device="meta")}, ValueError, "residual is on meta; it must be on cpu"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {"x": X, "residual": X, "weight": torch.ones(3), "bias": torch.ones(3)} | change
    with pytest.raises(error, match=message):
        add_dropout_layer_norm(**arguments)
