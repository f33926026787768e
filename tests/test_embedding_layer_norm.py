import importlib

import pytest
import torch
from compare import DTYPES, WITH_FLOAT64, check, guarded, results
from interpreter import fewer, thinned

from fastbert.ops import dropout_bits, embedding_layer_norm
from fastbert.ops.triton import INTERPRETED

VOCABULARY, TYPES, POSITIONS = 11, 2, 19
IDS = ("input_ids", "token_type_ids", "position_ids")


def inputs(shape, dtype=torch.float32, columns=40):
    def make(*size):
        return torch.randn(*size, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "input_ids": torch.randint(0, VOCABULARY, shape),
        "token_type_ids": torch.randint(0, TYPES, shape),
        "position_ids": torch.arange(shape[-1]) if shape[-1] <= POSITIONS else torch.randint(0, POSITIONS, shape),
        "word": make(VOCABULARY, columns),
        "token_type": make(TYPES, columns),
        "position": make(POSITIONS, columns),
        "weight": make(columns),
        "bias": make(columns),
    }


OPTIONS = {"eps": 1e-3, "seed": 77}
SHAPES = [(shape, 40) for shape in [(1,), (70,), (3, 19), (2, 3, 5), (0,), (0, 7)]]
SHAPES += [((70,), 1), ((70,), 7), ((2, 3, 5), 768), ((2, 3, 5), 771), ((1,), 771), ((0, 7), 768)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "columns"), SHAPES, ids=str)
def test_matches_reference(backend, shape, dtype, columns, dropout_p):
    check(embedding_layer_norm, backend, inputs(shape, dtype, columns), dropout_p=dropout_p, padding_idx=0, **OPTIONS)


def test_every_length_up_to_130(backend):
    for n in thinned(backend, range(1, 131)):
        check(embedding_layer_norm, backend, inputs((3,), columns=n), dropout_p=0.1, **OPTIONS)


def test_repeated_ids_and_padding(backend):
    """One id many times; the padding row gets no gradient, any other does."""
    tensors = inputs((500,)) | {"input_ids": torch.randint(0, 3, (500,)), "position_ids": torch.zeros(500).long()}
    found = check(embedding_layer_norm, backend, tensors, padding_idx=1, **OPTIONS)
    assert (found["word"][1] == 0).all() and (found["word"][0] != 0).any() and (found["word"][3:] == 0).all()
    found = check(embedding_layer_norm, backend, tensors, **OPTIONS)
    assert (found["word"][1] != 0).any()


def test_parameters_of_another_dtype(backend):
    for dtype in DTYPES if backend in WITH_FLOAT64 else DTYPES[:3]:
        tensors = inputs((2, 9), dtype)
        for name in ("weight", "bias"):
            tensors[name] = tensors[name].detach().float().requires_grad_()
        found = check(embedding_layer_norm, backend, tensors, dropout_p=0.1, **OPTIONS)
        assert found["output"].dtype == dtype and found["weight"].dtype == torch.float32


def test_rows_are_what_packing_says(backend):
    tensors = inputs((4, 6))
    tensors["position_ids"] = tensors["position_ids"].expand(4, 6)
    options = {"dropout_p": 0.3, "seed": 7, "backend": backend}
    padded = embedding_layer_norm(**tensors, **options).flatten(0, 1)
    indices = torch.tensor([0, 1, 5, 6, 12, 13, 23])
    packed = tensors | {name: tensors[name].flatten()[indices] for name in IDS}
    assert torch.equal(embedding_layer_norm(**packed, rows=indices, **options), padded[indices])


def test_dropped_elements_are_those_of_the_contract(backend):
    tensors = inputs((3, 5), columns=67)
    y = embedding_layer_norm(**tensors, dropout_p=0.4, seed=-9, backend=backend)
    kept = dropout_bits(-9, 0, torch.arange(15), 67).view(3, 5, 67) >= round(0.4 * 65536)
    assert torch.equal(y != 0, kept)


def test_seed_is_read_by_value(backend):
    """Fault 20."""
    tensors = inputs((3, 5))

    def run(seed):
        return embedding_layer_norm(**tensors, dropout_p=0.5, seed=seed, backend=backend)

    first, hold = run(torch.tensor([99])), torch.tensor([99])
    assert torch.equal(first, run(hold)) and torch.equal(first, run(99)) and not torch.equal(first, run(98))


def test_gradients_over_many_rows(backend):
    """Fault 23: sums over 10,000 rows of bfloat16, of parameters and of tables, are kept in float32."""
    tensors = inputs((fewer(backend, 10_000),), torch.bfloat16, columns=8)
    for name in ("weight", "bias"):
        tensors[name] = tensors[name].detach().float().requires_grad_()
    check(embedding_layer_norm, backend, tensors, **OPTIONS)
    exact = results(
        lambda **t: embedding_layer_norm(**t, backend="eager", **OPTIONS),
        {n: t.detach().double().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()},
        torch.ones_like,
    )
    found = results(lambda **t: embedding_layer_norm(**t, backend=backend, **OPTIONS), tensors, torch.ones_like)
    for name in ("weight", "bias"):
        assert (found[name].double() - exact[name]).norm() <= 1e-5 * exact[name].norm(), name


@pytest.mark.parametrize("make", [lambda s: torch.ones(()).expand(s), lambda s: torch.randn(*s, 2)[..., 0]])
def test_strided_gradients_and_tables(backend, make):
    tensors = inputs((3, 5))
    check(embedding_layer_norm, backend, tensors, grad=make((3, 5, 40)), dropout_p=0.1, **OPTIONS)
    for name in ("word", "position"):
        tensors[name] = torch.randn(40, tensors[name].shape[0]).t().requires_grad_()
    wide = torch.randn(2, 80)
    tensors["token_type"] = wide[:, 10:50].requires_grad_()
    check(embedding_layer_norm, backend, tensors, grad=make((3, 5, 40)), dropout_p=0.1, **OPTIONS)


def test_subset_of_gradients(backend):
    for wanted in ("word", "token_type", "position", "weight", "bias"):
        tensors = inputs((6, 4))
        for name, t in tensors.items():
            if name not in IDS:
                t.requires_grad_(name == wanted)
        check(embedding_layer_norm, backend, tensors, dropout_p=0.1, **OPTIONS)


def test_same_bits_twice_and_for_any_number_of_threads(backend):
    tokens = len(thinned(backend, range(4099 if backend != "triton" else 1400)))
    tensors, grad = inputs((tokens,)), torch.randn(tokens, 40)

    def run():
        return results(lambda **t: embedding_layer_norm(**t, dropout_p=0.1, seed=1, backend=backend), tensors, grad)

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
    tensors = inputs((2, 3), torch.float64, columns=5)
    ids = {name: tensors.pop(name) for name in IDS}
    assert torch.autograd.gradcheck(
        lambda *p: embedding_layer_norm(
            **ids, **dict(zip(tensors, p, strict=True)), dropout_p=0.2, backend=backend, **OPTIONS
        ),
        tuple(tensors.values()),
    )


def test_opcheck_and_compile(backend):
    if backend == "eager":
        pytest.skip("eager is made of torch's own operators")
    ops = getattr(torch.ops, f"fastbert_{backend}")
    tensors = inputs((3, 4))
    tensors["position_ids"] = tensors["position_ids"].expand(3, 4).contiguous()
    arguments = (*tensors.values(), torch.tensor([3]), torch.arange(12), 0.1, 1e-3, 0)
    torch.library.opcheck(ops.embedding_layer_norm.default, arguments)
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    torch.library.opcheck(ops.embedding_layer_norm_backward.default, (torch.randn(3, 4, 40), *plain))
    function = lambda **t: embedding_layer_norm(**t, dropout_p=0.1, backend=backend, **OPTIONS)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        tensors, grad = inputs((2, n)), torch.randn(2, n, 40)
        traced, direct = results(compiled, tensors, grad), results(function, tensors, grad)
        assert all(torch.equal(traced[name], direct[name]) for name in direct)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": torch.ones(2, 3)}, TypeError, "input_ids is torch.float32; an int64 tensor is accepted"),
        ({"input_ids": torch.tensor([[11]])}, ValueError, "input_ids holds 11; its table has rows 0 to 10"),
        ({"token_type_ids": torch.tensor([-1])}, ValueError, "token_type_ids holds -1; its table has rows 0 to 1"),
        ({"position_ids": torch.arange(4)}, ValueError, r"position_ids has shape \(4,\); it must broadcast"),
        ({"word": torch.ones(53)}, ValueError, r"word has shape \(53,\)"),
        ({"position": torch.ones(19, 39)}, ValueError, r"position has shape \(19, 39\); \[ids, 40\] is accepted"),
        ({"position": torch.ones(19, 40).half()}, TypeError, "position is torch.float16; it must be torch.float32"),
        ({"weight": torch.ones(39)}, ValueError, r"weight has shape \(39,\)"),
        ({"padding_idx": 11}, ValueError, "padding_idx is 11; word has rows 0 to 10"),
        ({"rows": torch.arange(5)}, ValueError, r"rows is torch.int64 of shape \(5,\); int64 of \(6,\)"),
        ({"dropout_p": 2}, ValueError, "dropout_p is 2"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        embedding_layer_norm(**(inputs((2, 3)) | change))


def direct(backend, name="embedding_layer_norm"):
    return getattr(getattr(torch.ops, f"fastbert_{backend}"), name).default


def test_a_direct_call_with_bad_ids(backend):
    """The registered op itself must not read or write outside its tables: the CPU says so, a GPU takes zeros."""
    if backend == "eager":
        pytest.skip("torch's own embedding checks its ids")
    tensors = {name: t.detach() for name, t in inputs((6,)).items()}
    for name, wrong in zip(IDS, (VOCABULARY, -1, 1 << 40), strict=True):
        tensors[name] = tensors[name].clone()
        tensors[name][IDS.index(name)] = wrong
    options = (None, None, 0.0, 1e-3, -1)
    if backend == "cpu":
        with pytest.raises(RuntimeError, match="an id is outside its table: 11"):
            direct(backend)(*tensors.values(), *options)
        return
    # The same with a row of zeros at the end of each table, and ids that point there.
    longer, guards = dict(tensors), []
    for name, table in zip(IDS, ("word", "token_type", "position"), strict=True):
        size = tensors[table].shape[0]
        longer[table], _ = guarded(torch.nn.functional.pad(tensors[table], (0, 0, 0, 1)))  # aligned as the others are
        longer[name] = torch.where((tensors[name] < 0) | (tensors[name] > size), size, tensors[name])
        tensors[table], untouched = guarded(tensors[table])
        guards.append(untouched)
    assert torch.equal(direct(backend)(*tensors.values(), *options), direct(backend)(*longer.values(), *options))
    grad = torch.randn(6, 40)
    found = direct(backend, "embedding_layer_norm_backward")(grad, *tensors.values(), *options)
    expected = direct(backend, "embedding_layer_norm_backward")(grad, *longer.values(), *options)
    assert all(torch.equal(a, b[: a.shape[0]]) for a, b in zip(found, expected, strict=True))
    assert all(untouched() for untouched in guards)


@pytest.mark.parametrize("tokens", [63, 64, 65, 200])
def test_runs_of_any_length_and_place(backend, tokens):
    """A frequent id's tokens are summed in chunks; runs that start and end anywhere in a chunk lose nothing."""
    for frequent in (0, 5, VOCABULARY - 1):
        tensors = inputs((tokens,))
        tensors["input_ids"] = torch.where(torch.rand(tokens) < 0.9, frequent, tensors["input_ids"])
        check(embedding_layer_norm, backend, tensors, padding_idx=3, **OPTIONS)


def test_tables_of_more_rows_than_16_bits_number(backend, monkeypatch):
    tensors = inputs((9,), columns=2)
    if backend == "triton" and INTERPRETED:  # a program for each row: the numbers are widened instead
        monkeypatch.setattr(importlib.import_module("fastbert.kernels.embedding_layer_norm"), "NUMBERED_IN_16_BITS", 0)
    else:
        tensors |= {"word": torch.randn(33_000, 2, requires_grad=True), "input_ids": torch.arange(9) * 4_111}
    check(embedding_layer_norm, backend, tensors, **OPTIONS)


def test_rows_too_long_are_refused_by_name():
    tensors = inputs((2,), columns=4097)
    with pytest.raises(NotImplementedError, match="triton: the tables have 4097 columns; up to 4096 are supported"):
        embedding_layer_norm(**tensors, backend="triton")
