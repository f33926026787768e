import pytest
import torch
from compare import DTYPES, WITH_FLOAT64, check, guarded, results
from interpreter import fewer, thinned

from fastbert.ops import dropout_bits, masked_softmax

SHAPES = [(2, 3, 5, 7), (3, 4, 33), (2, 2, 17, 64), (1, 1, 1, 1), (2, 1, 3, 513), (0, 2, 3, 4), (2, 2, 0, 5)]
FORMS = ("none", "lengths", "lengths per query", "bool", "bool per query", "additive", "additive column", "both")


def options(form, shape):
    """A mask of one of the FORMS for scores of ``shape``, with rows that have no key on among them."""
    b, q, k = shape[0], shape[-2], shape[-1]
    h = shape[1] if len(shape) == 4 else 1
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    on = torch.rand(b, 1, 1, k, generator=generator) > 0.4
    on[:1] = False
    if form == "none":
        return {}
    if form == "lengths":
        return {"lengths": torch.randint(-1, k + 3, (b,), generator=generator)}
    if form == "lengths per query":
        return {"lengths": torch.randint(0, k + 1, (b, q), generator=generator)}
    if form == "bool":
        return {"mask": on}
    if form == "bool per query":
        return {"mask": torch.rand(b, h, q, k, generator=generator) > 0.6}
    if form == "additive":
        return {"mask": torch.where(on, torch.randn(b, 1, 1, k, generator=generator), -torch.inf)}
    if form == "additive column":
        return {"mask": torch.randn(b, h, q, 1, generator=generator)}
    return {"mask": on, "lengths": torch.randint(0, k + 1, (b,), generator=generator)}


def scores_of(shape, dtype=torch.float32):
    return {"scores": (torch.randn(shape, dtype=torch.float64) * 2).to(dtype).requires_grad_()}


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(backend, shape, dtype, form, dropout_p):
    check(
        masked_softmax, backend, scores_of(shape, dtype), scale=0.7, dropout_p=dropout_p, seed=9, **options(form, shape)
    )


def test_every_length_up_to_130(backend):
    """Fault 10: lengths below, at and past every vector width and block."""
    lengths = torch.tensor(thinned(backend, range(131)))
    for keys in (130, 129, 64, 17):
        scores = {"scores": torch.randn(len(lengths), 1, 2, keys, requires_grad=True)}
        found = check(masked_softmax, backend, scores, lengths=lengths, dropout_p=0.1, seed=2)
        off = torch.arange(keys) >= lengths[:, None, None, None]
        assert (found["output"].masked_select(off) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [256, 512, 520, 1024, 2048, 4096, 8192, 8200])
def test_row_sizes(backend, keys, dtype):
    """Each way in which a kernel may hold a row, and rows too long to be held."""
    shape = (2, 1, 3, keys)
    for form in ("none", "lengths", "bool", "additive", "additive column"):
        check(masked_softmax, backend, scores_of(shape, dtype), dropout_p=0.1, seed=9, **options(form, shape))


@pytest.mark.parametrize("shape", [(66_000, 1, 1, 3), (1, 1, 66_000, 3)], ids=str)
def test_more_than_65535_in_one_dimension(backend, shape):
    """Fault 14."""
    check(masked_softmax, backend, scores_of([fewer(backend, size) for size in shape]))


def test_row_without_a_key_gives_zeros(backend):
    """Faults 6 and 9: no NaN forward or backward, nothing inferred from the output."""
    scores = torch.randn(2, 2, 3, 8, requires_grad=True)
    for mask in (torch.zeros(2, 1, 1, 8, dtype=torch.bool), torch.full((2, 1, 1, 8), -torch.inf)):
        y = masked_softmax(scores, mask=mask, backend=backend)
        (grad,) = torch.autograd.grad(y, scores, torch.randn(y.shape))
        assert (y == 0).all() and (grad == 0).all()
    y = masked_softmax(torch.full((1, 2, 4), -torch.inf), backend=backend)
    assert (y == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_finite_masks_are_arithmetic(backend, dtype):
    """Fault 7: the smallest float plus a score must not overflow, in float16 least of all."""
    for value in (-1e4, torch.finfo(dtype).min):
        mask = torch.zeros(2, 1, 1, 9, dtype=dtype)
        mask[0, ..., 4:] = value
        mask[1] = value
        y = check(masked_softmax, backend, scores_of((2, 3, 4, 9), dtype), mask=mask)["output"]
        assert (y[0, ..., 4:] == 0).all()
        assert torch.allclose(y.float().sum(-1), torch.ones(2, 3, 4), atol=2e-2)


def test_what_is_off_reaches_nothing(backend):
    """Fault 8: NaN and Inf in scores that are off, and in the gradient there."""
    shape = (3, 2, 5, 11)
    for form in ("lengths", "bool", "bool per query", "additive"):
        clean = scores_of(shape)
        on = masked_softmax(torch.zeros(shape), **options(form, shape)) != 0
        grad = torch.randn(shape)
        expected = results(
            lambda scores, f=form: masked_softmax(scores, backend=backend, **options(f, shape)), clean, grad
        )
        for poison in (torch.nan, torch.inf):
            poisoned = {"scores": torch.where(on, clean["scores"].detach(), poison).requires_grad_()}
            found = results(
                lambda scores, f=form: masked_softmax(scores, backend=backend, **options(f, shape)),
                poisoned,
                torch.where(on, grad, poison),
            )
            for name in found:
                assert torch.equal(found[name], expected[name]), (form, poison, name)


def test_nan_that_is_on_shows(backend):
    scores = torch.randn(1, 2, 9)
    scores[0, 0, 3] = torch.nan
    y = masked_softmax(scores, backend=backend)
    assert y[0, 0].isnan().all() and y[0, 1].isfinite().all()


def test_polarity(backend):
    """Fault 12: True means attend."""
    mask = torch.tensor([True, False, True]).view(1, 1, 1, 3)
    y = masked_softmax(torch.zeros(1, 1, 1, 3), mask=mask, backend=backend)
    assert torch.equal(y.flatten(), torch.tensor([0.5, 0.0, 0.5]))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
def test_dropped_elements_are_those_of_the_contract(backend, dropout_p):
    shape, seed = (3, 2, 5, 67), -(1 << 40)
    y = masked_softmax(torch.zeros(shape), dropout_p=dropout_p, seed=seed, backend=backend)
    row_hi = torch.arange(6).view(3, 2, 1)
    kept = dropout_bits(seed, row_hi, torch.arange(5), 67) >= round(dropout_p * 65536)
    assert torch.equal(y != 0, kept)


def test_seed_is_read_by_value(backend):
    scores = torch.randn(2, 2, 8, 32)

    def run(seed):
        return masked_softmax(scores, dropout_p=0.5, seed=seed, backend=backend)

    first, hold = run(torch.tensor([99])), torch.tensor([99])
    assert torch.equal(first, run(hold)) and torch.equal(first, run(99)) and not torch.equal(first, run(98))


def test_dropout_zero_is_no_dropout(backend):
    scores = torch.randn(2, 2, 8, 32)
    assert torch.equal(
        masked_softmax(scores, dropout_p=0.0, seed=4, backend=backend), masked_softmax(scores, backend=backend)
    )


def test_layouts_in_guarded_buffers(backend):
    """Faults 16 and 22: strided scores and masks; sliced, transposed and expanded gradients."""
    shape = (3, 2, 5, 40)
    extra = {"dropout_p": 0.1, "seed": 3} | options("additive", shape)
    scores, untouched = guarded(torch.randn(shape, requires_grad=True))
    grad, grad_untouched = guarded(torch.randn(shape))
    check(masked_softmax, backend, {"scores": scores}, grad=grad, **extra)
    assert untouched() and grad_untouched()
    transposed = torch.randn(40, 5, 2, 3).permute(3, 2, 1, 0).requires_grad_()
    check(masked_softmax, backend, {"scores": transposed}, **extra)
    for grad in (
        torch.ones(()).expand(shape),
        torch.randn(*shape, 2)[..., 0],
        torch.randn(40, 5, 2, 3).permute(3, 2, 1, 0),
    ):
        check(masked_softmax, backend, scores_of(shape), grad=grad, **extra)
    for mask in (torch.rand(40, 5, 2, 3).permute(3, 2, 1, 0), torch.rand(3, 2, 5, 80)[..., ::2]):
        check(masked_softmax, backend, scores_of(shape), mask=mask)
        check(masked_softmax, backend, scores_of(shape), mask=mask > 0.5)


def test_gradient_of_the_mask_is_eagers_alone():
    mask = torch.randn(1, 1, 3, 4, requires_grad=True)
    y = masked_softmax(torch.randn(2, 2, 3, 4), mask=mask)
    assert torch.autograd.grad(y.square().sum(), mask)[0].abs().sum() > 0
    with pytest.raises(NotImplementedError, match="cpu: mask requires a gradient; only eager computes it"):
        masked_softmax(torch.randn(2, 2, 3, 4), mask=mask, backend="cpu")


def test_reproduces_the_d2l_function(backend, golden):
    tensors, _ = golden("d2l_masked_softmax")
    scores, tolerance = tensors["in/scores"], 1e-12
    if backend not in WITH_FLOAT64:
        scores, tolerance = scores.float(), 1e-6
    cases = {"plain": None, "lengths_1d": tensors["in/lengths_1d"], "lengths_2d": tensors["in/lengths_2d"]}
    for name, lengths in cases.items():
        y = masked_softmax(scores, lengths=lengths, backend=backend)
        expected = tensors[f"out/{name}"]
        if lengths is not None:  # the original averages a row without keys uniformly; ours gives zeros
            empty = lengths.reshape(lengths.shape[0], -1, 1) == 0
            expected = torch.where(empty, 0.0, expected)
        assert (y - expected).abs().max() <= tolerance, name


def test_same_bits_twice(backend):
    tensors, grad = scores_of((4, 3, 65, 70)), torch.randn(4, 3, 65, 70)
    run = lambda scores: masked_softmax(scores, dropout_p=0.1, seed=1, backend=backend)  # noqa: E731
    first, second = results(run, tensors, grad), results(run, tensors, grad)
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.float64
def test_gradcheck(backend):
    shape = (2, 2, 3, 5)
    for form in FORMS:
        extra = {"scale": 0.5, "dropout_p": 0.3, "seed": 8, "backend": backend} | options(form, shape)
        assert torch.autograd.gradcheck(
            lambda s, e=extra: masked_softmax(s, **e), tuple(scores_of(shape, torch.float64).values())
        )


def test_opcheck_and_compile(backend):
    if backend == "eager":
        pytest.skip("eager is made of torch's own operators")
    op = getattr(torch.ops, f"fastbert_{backend}")
    scores, lengths = torch.randn(2, 2, 3, 5, requires_grad=True), torch.tensor([2, 5], dtype=torch.int32)
    mask = (torch.rand(2, 1, 1, 5) > 0.3).expand(2, 2, 3, 5)
    torch.library.opcheck(op.masked_softmax.default, (scores, mask, lengths, 0.5, 0.1, torch.tensor([3])))
    torch.library.opcheck(op.masked_softmax.default, (scores, None, None, 1.0, 0.0, None))
    arguments = (torch.randn(2, 2, 3, 5), scores.detach(), mask, lengths, 0.5, 0.1, torch.tensor([3]))
    torch.library.opcheck(op.masked_softmax_backward.default, arguments)
    function = lambda scores, lengths: masked_softmax(scores, lengths=lengths, dropout_p=0.1, seed=2, backend=backend)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        tensors = scores_of((2, 2, n, n)) | {"lengths": torch.tensor([1, n])}
        grad = torch.randn(2, 2, n, n)
        traced, direct = results(compiled, tensors, grad), results(function, tensors, grad)
        assert all(torch.equal(traced[name], direct[name]) for name in direct)


S = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": torch.zeros(4, 5)}, ValueError, r"scores has shape \(4, 5\); \[B, H, Sq, Sk\] or \[B, Sq, Sk\]"),
        ({"scores": S.int()}, TypeError, "scores is torch.int32"),
        ({"mask": torch.ones(2, 5)}, ValueError, r"mask has shape \(2, 5\); it must broadcast to \[B, H, Sq, Sk\]"),
        ({"mask": torch.ones(2, 1, 1, 5, dtype=torch.int64)}, TypeError, "mask is torch.int64; .*pass mask.bool"),
        ({"mask": [True]}, TypeError, "mask is a list"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths is torch.float32; an integer tensor is accepted"),
        ({"lengths": torch.ones(3, dtype=torch.int64)}, ValueError, r"lengths has shape \(3,\); accepted are"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        masked_softmax(**({"scores": S} | change))
