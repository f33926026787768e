import pytest
import torch
from compare import DTYPES, WITH_FLOAT64, check, guarded, results
from interpreter import fewer

from fastbert.ops import Packing, attention, dropout_bits
from fastbert.ops.attention import CUDA_HEAD_SIZES
from fastbert.ops.packing import take

# B, Sq, Sk, H, D: one element; less than a vector; whole vectors and tiles; a rest in every dimension.
SHAPES = [(1, 1, 1, 1, 8), (3, 5, 7, 2, 16), (2, 48, 128, 2, 64), (2, 67, 83, 3, 17)]
FORMS = (
    "none",
    "lengths",
    "lengths per query",
    "left padding",
    "holes",
    "bool per query",
    "additive",
    "column",
    "both",
)


def options(form, shape):
    """A mask of one of the FORMS, with rows that have no key on among them."""
    b, q, k, h, _ = shape
    generator = torch.Generator().manual_seed(5)
    on = torch.rand(b, 1, 1, k, generator=generator) > 0.4
    on[:1] = False
    lengths = torch.randint(-1, k + 3, (b,), generator=generator)
    if form == "none":
        return {}
    if form == "lengths":
        return {"lengths": lengths}
    if form == "lengths per query":
        return {"lengths": torch.randint(0, k + 1, (b, q), generator=generator)}
    if form == "left padding":
        return {"mask": (torch.arange(k) >= lengths[:, None])[:, None, None]}
    if form == "holes":
        return {"mask": on}
    if form == "bool per query":
        return {"mask": torch.rand(b, h, q, k, generator=generator) > 0.6}
    if form == "additive":
        return {"mask": torch.where(on, torch.randn(b, 1, q, k, generator=generator), -torch.inf)}
    if form == "column":
        return {"mask": torch.randn(h, q, 1, generator=generator)}
    return {"mask": on, "lengths": lengths}


def qkv(shape, dtype=torch.float32):
    b, q, k, h, d = shape
    sizes = {"query": q, "key": k, "value": k}
    return {n: torch.randn(b, s, h, d, dtype=torch.float64).to(dtype).requires_grad_() for n, s in sizes.items()}


def packed_qkv(tokens, heads, size, dtype=torch.float32):
    names = ("query", "key", "value")
    return {n: torch.randn(tokens, heads, size, dtype=torch.float64).to(dtype).requires_grad_() for n in names}


def head_size(backend, size):
    """``size``, or the next that the backend has."""
    return next(s for s in CUDA_HEAD_SIZES if s >= size) if backend.startswith("cuda") else size


def cu_seqlens(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(backend, shape, dtype, form, dropout_p):
    shape = (*shape[:4], head_size(backend, shape[4]))
    check(attention, backend, qkv(shape, dtype), dropout_p=dropout_p, seed=9, **options(form, shape))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(7, 1, 64, 0, 0, 33), (130,), (0, 0)], ids=str)
def test_packed_matches_reference(backend, lengths, dtype, dropout_p):
    """Fault 15 among others: zero-length sequences, repeated cu_seqlens."""
    size = head_size(backend, 24)
    tensors, grad = packed_qkv(sum(lengths), 2, size, dtype), torch.randn(sum(lengths), 2, size)
    check(attention, backend, tensors, grad, cu_seqlens=cu_seqlens(*lengths), dropout_p=dropout_p, seed=3)


@pytest.mark.parametrize("form", ["none", "lengths", "causal", "band", "holes"])
def test_long_rows(backend, form):
    """More keys than one tile, with tiles that are off for some queries, or for all."""
    shape = (1, 300, 1100, 1, head_size(backend, 16))
    below = torch.arange(1100) - torch.arange(300)[:, None] * 3
    extra = {
        "none": {},
        "lengths": {"lengths": torch.tensor([700])},
        "causal": {"mask": below <= 0},
        "band": {"mask": torch.where(below.abs() < 60, below / 60, -torch.inf)},
        "holes": {"mask": torch.arange(1100) % 900 > 600},
    }[form]
    check(attention, backend, qkv(shape), dropout_p=0.1, seed=3, **extra)


@pytest.mark.parametrize("size", [8, 9, 16, 31, 40, 64, 72, 96, 128, 129, 256])
def test_head_sizes(backend, size):
    for dtype in (torch.float32, torch.bfloat16):
        tensors, extra = qkv((2, 19, 21, 2, size), dtype), {"lengths": torch.tensor([21, 8]), "scale": 0.2}
        if backend.startswith("cuda") and size not in CUDA_HEAD_SIZES:
            with pytest.raises(NotImplementedError, match=f"a head has {size} elements; 32, 64, 128 are supported"):
                attention(**tensors, **extra, backend=backend)
        else:
            check(attention, backend, tensors, **extra)


def test_every_length_up_to_130(backend):
    """Fault 10: lengths below, at and past every vector width and tile."""
    lengths, size = torch.arange(131), head_size(backend, 8)
    for keys in (130, 64):
        check(attention, backend, qkv((131, 2, keys, 1, size)), lengths=lengths, dropout_p=0.1, seed=2)
    tensors, grad = packed_qkv(int(lengths.sum()), 1, size), torch.randn(int(lengths.sum()), 1, size)
    check(attention, backend, tensors, grad, cu_seqlens=cu_seqlens(*lengths.tolist()))


def test_more_than_65535_sequences(backend):
    """Fault 14. Most are empty, for the sake of those that emulate."""
    lengths = torch.zeros(fewer(backend, 66_000), dtype=torch.int32)
    lengths[:: len(lengths) // 5], lengths[-1] = 3, 2
    shape = int(lengths.sum()), 1, head_size(backend, 8)
    check(attention, backend, packed_qkv(*shape), torch.randn(shape), cu_seqlens=cu_seqlens(*lengths.tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_without_a_key_gives_zeros(backend, dtype):
    """Fault 6: no NaN forward or backward."""
    shape = (2, 5, 9, 2, head_size(backend, 8))
    nothing = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    forms = ({"mask": nothing}, {"mask": nothing.expand(2, 2, 5, 9).contiguous()}, {"lengths": torch.tensor([0, -3])})
    for extra in (*forms, {"lengths": torch.zeros(2, 5).int()}, {"mask": torch.full((5, 9), -torch.inf)}):
        found = results(lambda e=extra, **t: attention(**t, **e, backend=backend), qkv(shape, dtype), torch.ones_like)
        for name, tensor in found.items():
            assert (tensor == 0).all(), (name, list(extra))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_finite_masks_are_arithmetic(backend, dtype):
    """Fault 7: the smallest float plus a score must not overflow, in float16 least of all; a row that is all so is
    an average, and so are its gradients, though the logarithm of its sum is too coarse to tell."""
    shape = (2, 3, 9, 2, head_size(backend, 16))
    for value in (-1e4, torch.finfo(dtype).min):
        mask = torch.zeros(2, 1, 1, 9, dtype=dtype)
        mask[0, ..., 4:] = value
        mask[1] = value
        tensors = qkv(shape, dtype)
        y = check(attention, backend, tensors, mask=mask)["output"]
        if value < -1e5:
            mean = tensors["value"][1].double().mean(0)
            assert (y[1] - mean).abs().max() < 2e-2
        without = attention(**tensors, lengths=torch.tensor([4, 9]), backend=backend)
        assert (y[0] - without[0]).abs().max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["lengths", "lengths per query", "left padding", "holes", "additive", "both"])
def test_what_is_off_reaches_nothing(backend, form, poison):
    """Fault 8: NaN and Inf in keys and values that are off for every query."""
    shape = (3, 5, 40, 2, head_size(backend, 16))
    extra = options(form, shape)
    if form == "lengths per query":
        extra["lengths"] = extra["lengths"].clamp(max=30)
    tensors = qkv(shape)
    zeros = torch.zeros(3, 5, 1, 40)
    seen = attention(zeros, torch.zeros(3, 40, 1, 40), torch.eye(40).expand(3, 40, 40)[:, :, None], **extra) != 0
    off = ~seen.any(1)[:, 0, :, None, None]  # [B, Sk, 1, 1]
    assert off.any()
    poisoned = {n: t.detach().clone() for n, t in tensors.items()}
    for name in ("key", "value"):
        poisoned[name] = torch.where(off, poison, poisoned[name])
        poisoned[name][..., :3] = tensors[name].detach()[..., :3]  # not every element of such a row
    poisoned = {n: t.requires_grad_() for n, t in poisoned.items()}
    grad = torch.randn(3, 5, 2, shape[4])
    clean, found = (
        results(lambda **t: attention(**t, **extra, backend=backend), inputs, grad) for inputs in (tensors, poisoned)
    )
    for name in found:
        assert torch.equal(found[name], clean[name]), name


@pytest.mark.parametrize("name", ["key", "value"])
def test_what_is_off_for_one_query_reaches_the_others(backend, name):
    """Fault 8, per query: NaN shows in the rows that see it, and in no other."""
    shape = (2, 30, 40, 2, head_size(backend, 16))
    tensors = qkv(shape)
    mask = torch.ones(30, 40, dtype=torch.bool).tril()
    clean = attention(**tensors, mask=mask, backend=backend)
    with torch.no_grad():
        tensors[name][:, 20, :, 5] = torch.nan
    found = attention(**tensors, mask=mask, backend=backend)
    assert torch.equal(found[:, :20], clean[:, :20])
    assert found[:, 20:, :, 5].isnan().all()


def test_nan_that_is_on_shows(backend):
    for name in ("query", "key", "value"):
        tensors = qkv((2, 4, 9, 1, head_size(backend, 16)))
        with torch.no_grad():
            tensors[name][0, 3] = torch.nan
        y = attention(**tensors, lengths=torch.tensor([9, 5]), backend=backend)
        assert y[0, 3].isnan().all() and y[1].isfinite().all(), name


def test_polarity(backend):
    """Fault 12: True means attend."""
    size = head_size(backend, 8)
    value = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1).expand(1, 3, 1, size)
    mask = torch.tensor([True, False, True]).view(1, 1, 1, 3)
    y = attention(torch.zeros(1, 1, 1, size), torch.zeros(1, 3, 1, size), value, mask=mask, backend=backend)
    assert torch.equal(y, torch.full_like(y, 50.5))


def test_a_mask_of_ones_and_zeros(backend):
    """Fault 13: bool chooses, float is added, an integer mask is refused."""
    size = head_size(backend, 8)
    tensors, keys = qkv((2, 4, 6, 1, size)), torch.tensor([1, 1, 0, 1, 0, 0]).view(1, 1, 1, 6)
    chosen = attention(**tensors, mask=keys.bool(), backend=backend)
    added = attention(**tensors, mask=keys.float(), backend=backend)
    by_hand = attention(**tensors, mask=keys.double().log(), backend=backend)
    assert torch.allclose(chosen, by_hand) and not torch.allclose(chosen, added)
    q, k, v = (t.transpose(1, 2) for t in tensors.values())
    expected = ((q @ k.mT) / size**0.5 + keys).softmax(-1) @ v
    assert torch.allclose(added, expected.transpose(1, 2), atol=1e-6)
    with pytest.raises(TypeError, match=r"mask is torch.int64; accepted are bool .*mask.bool"):
        attention(**tensors, mask=keys, backend=backend)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
def test_dropped_elements_are_those_of_the_contract(backend, dropout_p):
    """With an identity as value the output is the dropped probabilities."""
    batch, seqlen, heads, seed = 3, 67, 2, -(1 << 40)
    size = head_size(backend, seqlen)
    zeros = torch.zeros(batch, seqlen, heads, size)
    identity = torch.eye(seqlen, size)[:, None].expand(batch, seqlen, heads, size)

    def dropped(**extra):
        y = attention(zeros, zeros, identity, dropout_p=dropout_p, seed=seed, backend=backend, **extra)
        return y.transpose(1, 2)[..., :seqlen]

    y = dropped()
    row_hi = torch.arange(batch * heads).view(batch, heads, 1)
    kept = dropout_bits(seed, row_hi, torch.arange(seqlen), seqlen) >= round(dropout_p * 65536)
    assert torch.equal(y != 0, kept)
    lengths = torch.tensor([67, 0, 30])
    on = torch.arange(seqlen) < lengths[:, None, None, None]
    assert torch.equal(dropped(lengths=lengths) != 0, kept & on)


def test_packed_is_padded(backend):
    """Outputs and gradients of a packed batch are those of the padded one, dropout included."""
    mask = torch.arange(90) < torch.tensor([90, 1, 0, 64, 33])[:, None]
    packing = Packing.from_mask(mask)
    tensors = qkv((5, 90, 90, 2, head_size(backend, 16)))
    extra = {"dropout_p": 0.2, "seed": 11, "backend": backend}
    padded = attention(**tensors, lengths=mask.sum(1), **extra)
    packed = attention(
        *(take(t, packing) for t in tensors.values()),
        cu_seqlens=packing.cu_seqlens,
        max_seqlen=packing.max_seqlen,
        **extra,
    )
    assert torch.allclose(take(padded, packing), packed, atol=1e-6)
    grad = torch.randn_like(packed)
    first = torch.autograd.grad(take(padded, packing), tensors.values(), grad)
    second = torch.autograd.grad(packed, tensors.values(), grad)
    for name, a, b in zip(tensors, first, second, strict=True):
        assert torch.allclose(a, b, atol=2e-6), name


def test_seed_is_read_by_value(backend):
    """Fault 20."""
    tensors = qkv((2, 9, 33, 2, head_size(backend, 8)))

    def run(seed):
        return attention(**tensors, dropout_p=0.5, seed=seed, backend=backend)

    first, hold = run(torch.tensor([99])), torch.tensor([99])
    assert torch.equal(first, run(hold)) and torch.equal(first, run(99)) and not torch.equal(first, run(98))
    torch.manual_seed(3)
    drawn = run(None)
    assert not torch.equal(drawn, run(None))
    torch.manual_seed(3)
    assert torch.equal(drawn, run(None))


def test_dropout_zero_is_no_dropout(backend):
    """Fault 19: what evaluation passes."""
    tensors = qkv((2, 9, 33, 2, head_size(backend, 8)))
    without = attention(**tensors, backend=backend)
    assert torch.equal(attention(**tensors, dropout_p=0.0, seed=4, backend=backend), without)
    assert torch.equal(attention(**tensors, dropout_p=0.0, backend=backend), without)


def test_checkpointing_draws_the_same_mask_again(backend):
    """Fault 21."""
    tensors = qkv((2, 9, 33, 2, head_size(backend, 8)))

    def run(*inputs):
        return attention(*inputs, dropout_p=0.5, backend=backend).square()

    def gradients(function):
        torch.manual_seed(1)
        return torch.autograd.grad(function(*tensors.values()).sum(), tensors.values())

    for reentrant in (False, True):
        if reentrant:
            torch.manual_seed(1)
            leaves = [t.detach().requires_grad_() for t in tensors.values()]
            torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=True).sum().backward()
            recomputed = [t.grad for t in leaves]
        else:
            recomputed = gradients(lambda *t: torch.utils.checkpoint.checkpoint(run, *t, use_reentrant=False))
        assert all(torch.equal(a, b) for a, b in zip(gradients(run), recomputed, strict=True))


def test_subset_of_gradients(backend):
    shape = (2, 9, 33, 2, head_size(backend, 8))
    for wanted in ("q", "k", "v", "qk", "kv", ""):
        tensors = {n: t.detach().requires_grad_(n[0] in wanted) for n, t in qkv(shape).items()}
        found = check(attention, backend, tensors, **options("lengths", shape))
        assert len(found) == 1 + len(wanted)


def test_layouts_in_guarded_buffers(backend):
    """Faults 9 and 16: views of a fused projection, any strides, any layout of mask and gradient; no write outside."""
    size = head_size(backend, 24)
    shape = (3, 5, 5, 2, size)
    extra = {"dropout_p": 0.1, "seed": 3} | options("additive", shape)
    pairs = {name: guarded(t) for name, t in qkv(shape).items()}
    grad, grad_untouched = guarded(torch.randn(3, 5, 2, size))
    check(attention, backend, {name: view for name, (view, _) in pairs.items()}, grad=grad, **extra)
    assert grad_untouched() and all(untouched() for _, untouched in pairs.values())
    fused = torch.randn(3, 5, 3, 2, size).unbind(2)
    by_head = torch.randn(3, 3, 2, 5, size).transpose(2, 3).unbind(0)
    strided = torch.randn(3, size, 5, 2, 3).permute(0, 4, 2, 3, 1).unbind(1)
    for views in (fused, by_head, strided):
        tensors = {n: t.requires_grad_() for n, t in zip(("query", "key", "value"), views, strict=True)}
        check(attention, backend, tensors, **extra)
    for grad in (
        torch.ones(()).expand(3, 5, 2, size),
        torch.randn(3, 5, 2, 2 * size)[..., ::2],
        torch.randn(size, 2, 5, 3).permute(3, 2, 1, 0),
        torch.randn(3, 2, 5, size).transpose(1, 2),
    ):
        check(attention, backend, qkv(shape), grad=grad, **extra)
    for mask in (torch.rand(5, 5, 2, 3).permute(3, 2, 1, 0), torch.rand(3, 2, 5, 10)[..., ::2], torch.rand(5)):
        check(attention, backend, qkv(shape), mask=mask)
        check(attention, backend, qkv(shape), mask=mask > 0.5)
    shared = torch.randn(3, 5, 2, size, requires_grad=True)
    check(lambda x, **o: attention(x, x, x, **o), backend, {"x": shared})


@pytest.mark.parametrize("shape", [(0, 4, 5, 2, 8), (2, 0, 5, 2, 8), (2, 4, 0, 2, 8), (2, 4, 5, 0, 8)], ids=str)
def test_empty(backend, shape):
    size = head_size(backend, shape[4])
    shape = (*shape[:4], size)
    for extra in ({}, {"lengths": torch.zeros(shape[0]).int()}, {"mask": torch.ones(shape[1], shape[2]).bool()}):
        check(attention, backend, qkv(shape), dropout_p=0.1, seed=1, **extra)
    check(attention, backend, packed_qkv(0, 2, size), torch.zeros(0, 2, size), cu_seqlens=cu_seqlens())


def test_same_bits_twice_and_for_any_number_of_threads(backend):
    threads = torch.get_num_threads()
    size = head_size(backend, 16)
    for shape in ((3, 65, 70, 2, size), (1, 300, 600, 1, size)):
        for form in ("none", "bool per query"):
            tensors, grad = qkv(shape), torch.randn(shape[0], shape[1], shape[3], shape[4])
            extra = {"dropout_p": 0.1, "seed": 1, "backend": backend} | options(form, shape)

            def run(t=tensors, g=grad, e=extra):
                return results(lambda **inputs: attention(**inputs, **e), t, g)

            found = [run(), run()]
            try:
                for count in (1, 3):
                    torch.set_num_threads(count)
                    found.append(run() if backend != "eager" else found[0])
            finally:
                torch.set_num_threads(threads)
            for other in found[1:]:
                assert all(torch.equal(found[0][name], other[name]) for name in other)


@pytest.mark.float64
@pytest.mark.parametrize("form", [*FORMS, "packed"])
def test_gradcheck(backend, form):
    shape = (2, 3, 5, 2, 4)
    extra = {"scale": 0.5, "dropout_p": 0.3, "seed": 8, "backend": backend}
    if form == "packed":
        tensors, extra["cu_seqlens"] = packed_qkv(7, 2, 4, torch.float64), cu_seqlens(3, 0, 4)
    else:
        tensors = qkv(shape, torch.float64)
        extra |= options(form, shape)
    assert torch.autograd.gradcheck(lambda *t: attention(*t, **extra), tuple(tensors.values()))


def test_gradient_of_the_mask_is_eagers_alone():
    tensors, mask = qkv((2, 3, 4, 2, 8)), torch.randn(3, 4, requires_grad=True)
    y = attention(**tensors, mask=mask)
    assert torch.autograd.grad(y.square().sum(), mask)[0].abs().sum() > 0
    with pytest.raises(NotImplementedError, match="cpu: mask requires a gradient; only eager computes it"):
        attention(**tensors, mask=mask, backend="cpu")


def test_autocast(backend):
    """As scaled_dot_product_attention: in the autocast dtype, outputs and gradients of the inputs' own dtype."""
    tensors = qkv((2, 9, 33, 2, head_size(backend, 8)))
    narrow = {n: t.detach().bfloat16() for n, t in tensors.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(**tensors, backend=backend)
        if backend in WITH_FLOAT64:
            wide = attention(**{n: t.double() for n, t in tensors.items()}, backend=backend)
            assert wide.dtype == torch.float64
        mixed = attention(tensors["query"], narrow["key"], narrow["value"], backend=backend)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, attention(**narrow, backend=backend)) and torch.equal(y, mixed)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), tensors.values()))


def test_opcheck(backend):
    if backend == "eager":
        pytest.skip("eager is made of torch's own operators")
    op = getattr(torch.ops, f"fastbert_{backend}")
    seed, lengths = torch.tensor([3]), torch.tensor([2, 5], dtype=torch.int32)
    size = head_size(backend, 8)
    dense, packed = tuple(qkv((2, 3, 5, 2, size)).values()), tuple(packed_qkv(7, 2, size).values())
    mask = (torch.rand(2, 1, 1, 5) > 0.3).expand(2, 2, 3, 5)
    calls = (
        (dense, (mask, lengths, None, 0, 0.5, 0.1, seed)),
        (dense, (None, None, None, 0, 0.5, 0.0, None)),
        (packed, (None, None, cu_seqlens(3, 4), 4, 0.5, 0.1, seed)),
    )
    for inputs, rest in calls:
        torch.library.opcheck(op.attention.default, (*inputs, *rest))
        inputs = [t.detach() for t in inputs]
        out, lse = op.attention(*inputs, *rest)
        torch.library.opcheck(op.attention_backward.default, (torch.randn(out.shape), *inputs, out, lse, *rest))


def test_compile(backend):
    """One graph, whatever the shape, and the same bits."""

    def dense(lengths, **tensors):
        return attention(**tensors, lengths=lengths, dropout_p=0.1, seed=2, backend=backend)

    def packed(starts, max_seqlen, **tensors):
        return attention(**tensors, cu_seqlens=starts, max_seqlen=max_seqlen, backend=backend)

    size = head_size(backend, 8)
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dense, fullgraph=True, dynamic=True, backend=counter)
    for n in (6, 9, 12):
        tensors, grad = qkv((n - 3, n, n, 2, size)) | {"lengths": torch.arange(n - 3)}, torch.randn(n - 3, n, 2, size)
        traced, direct = results(compiled, tensors, grad), results(dense, tensors, grad)
        assert all(torch.equal(traced[name], direct[name]) for name in direct)
    assert counter.frame_count == 1
    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (6, 9):
        tensors, grad = (
            packed_qkv(n + 2, 2, size) | {"starts": cu_seqlens(n, 2), "max_seqlen": n},
            torch.randn(n + 2, 2, size),
        )
        traced, direct = results(compiled, tensors, grad), results(packed, tensors, grad)
        assert all(torch.allclose(traced[name], direct[name], atol=1e-6) for name in direct)


def test_a_head_too_large_for_the_kernels():
    tensors = qkv((1, 2, 2, 1, 257))
    assert torch.equal(attention(**tensors), attention(**tensors, backend="eager"))
    with pytest.raises(NotImplementedError, match="cpu: a head has 257 elements; up to 256 are supported"):
        attention(**tensors, backend="cpu")


D = torch.zeros(2, 3, 4, 8)
P = torch.zeros(5, 4, 8)
STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)
PACKED = {"query": P, "key": P, "value": P, "cu_seqlens": STARTS}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": P}, ValueError, r"query has shape \(5, 4, 8\); \[B, Sq, H, D\] is accepted, or \[T, H, D\] with cu"),
        ({"query": [1.0]}, TypeError, "query is a list; a tensor is accepted"),
        ({"query": D.int()}, TypeError, "query is torch.int32; accepted are torch.float32"),
        ({"key": D.double()}, TypeError, "key is torch.float64; it must be torch.float32, the dtype of query"),
        ({"value": D.to("meta")}, ValueError, "value is on meta; it must be on cpu"),
        ({"key": D[..., :4]}, ValueError, r"key has shape \(2, 3, 4, 4\); query .* needs \[2, Sk, 4, 8\]"),
        ({"value": D[:, :2]}, ValueError, r"value has shape \(2, 2, 4, 8\); it must be that of key, \(2, 3, 4, 8\)"),
        ({"mask": torch.ones(2, 3)}, ValueError, r"mask has shape \(2, 3\); it must broadcast .*\[2, 4, 3, 3\]"),
        ({"mask": torch.ones(3, 3).int()}, TypeError, "mask is torch.int32; .*pass mask.bool"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths is torch.float32; an integer tensor is accepted"),
        ({"lengths": torch.ones(3).int()}, ValueError, r"lengths has shape \(3,\); accepted are \[B\] = \[2\]"),
        ({"max_seqlen": 3}, ValueError, "max_seqlen is 3, without cu_seqlens"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5; a probability"),
        ({"dropout_p": 0.5, "seed": 0.5}, TypeError, "seed is 0.5; None, an int or a one-element int64 tensor"),
        (PACKED | {"query": D}, ValueError, r"query has shape .*; with cu_seqlens \[T, H, D\] is accepted"),
        (PACKED | {"key": P[:4]}, ValueError, r"key has shape \(4, 4, 8\); with cu_seqlens it must be that of query"),
        (PACKED | {"mask": torch.ones(5)}, ValueError, "mask is given with cu_seqlens; packed sequences take neither"),
        (PACKED | {"lengths": STARTS}, ValueError, "lengths is given with cu_seqlens"),
        (PACKED | {"cu_seqlens": STARTS.long()}, TypeError, "cu_seqlens is torch.int64; an int32 tensor is accepted"),
        (PACKED | {"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens is a list; an int32 tensor is accepted"),
        (PACKED | {"cu_seqlens": STARTS[None]}, ValueError, r"cu_seqlens has shape \(1, 3\); \[B \+ 1\] is accepted"),
        (PACKED | {"cu_seqlens": STARTS + 1}, ValueError, r"cu_seqlens is \[1, 3, 6\]; it must start at 0"),
        (PACKED | {"cu_seqlens": STARTS[[0, 2, 1, 2]]}, ValueError, r"\[0, 5, 2, 5\]; .* not decrease"),
        (PACKED | {"cu_seqlens": STARTS[:2]}, ValueError, "end at 5, the number of tokens"),
        (PACKED | {"max_seqlen": 2}, ValueError, "max_seqlen is 2; the longest sequence of cu_seqlens has 3 tokens"),
        (PACKED | {"max_seqlen": torch.tensor(3)}, TypeError, "max_seqlen is a tensor; a Python int is accepted"),
        (PACKED | {"max_seqlen": 3.0}, TypeError, "max_seqlen is 3.0; a Python int is accepted"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        attention(**({"query": D, "key": D, "value": D} | change))


def test_packed_on_a_device_needs_max_seqlen():
    """Fault 18: no synchronisation to find it."""
    with pytest.raises(ValueError, match="max_seqlen is None; on meta it must be given"):
        attention(*(P.to("meta") for _ in range(3)), cu_seqlens=STARTS.to("meta"))
