import importlib

import pytest
import torch
from compare import DTYPES, assert_close_as_eager, check, results

from fastbert.ops import masked_lm_loss


def inputs(shape=(3, 7), dtype=torch.float32, columns=24, vocabulary=101, bias=True, share=0.4):
    def make(*size):
        return torch.randn(*size, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(0, vocabulary, shape)
    labels[torch.rand(shape) > share] = -100
    tensors = {"hidden": make(*shape, columns), "weight": make(vocabulary, columns)}
    return tensors | ({"bias": make(vocabulary)} if bias else {"bias": None}) | {"labels": labels}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("vocabulary", [2, 31, 101, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (40,), (1,), (0,), (2, 0)], ids=str)
def test_matches_reference(backend, shape, dtype, vocabulary, bias):
    check(masked_lm_loss, backend, inputs(shape, dtype, vocabulary=vocabulary, bias=bias), grad=torch.tensor(1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_slices(backend, dtype, monkeypatch):
    """More labelled rows than one slice of logits holds; the sums over slices are in float32."""
    limits = importlib.import_module("fastbert.ops.masked_lm_loss").SLICE_BYTES
    for name in limits:
        monkeypatch.setitem(limits, name, 1)
    check(masked_lm_loss, backend, inputs((5, 90), dtype, share=0.9), grad=torch.tensor(0.7))


def test_scaled_gradient(backend):
    """A loss scaled, as for float16, or one of several summands."""
    for scale in (1.0, 0.25, 1024.0):
        check(masked_lm_loss, backend, inputs(), grad=torch.tensor(scale))


def test_no_label_gives_zero_loss_and_gradients(backend):
    """Fault 30."""
    tensors = inputs(share=0.0)
    found = results(lambda **t: masked_lm_loss(**t, backend=backend), tensors, torch.tensor(1.0))
    assert all((t == 0).all() for t in found.values())


def test_label_zero_counts(backend):
    """Fault 31."""
    tensors = inputs() | {"labels": torch.zeros(3, 7, dtype=torch.int64)}
    found = check(masked_lm_loss, backend, tensors, grad=torch.tensor(1.0))
    assert found["output"] > 0 and (found["hidden"] != 0).any(-1).all()


def test_rows_without_a_label_do_not_count(backend):
    """Fault 32: padded predictions move neither the loss nor a gradient, whatever they hold."""
    tensors = inputs()
    found = results(lambda **t: masked_lm_loss(**t, backend=backend), tensors, torch.tensor(1.0))
    on = tensors["labels"] != -100
    poisoned = tensors | {"hidden": torch.where(on[..., None], tensors["hidden"].detach(), 1e4).requires_grad_()}
    again = results(lambda **t: masked_lm_loss(**t, backend=backend), poisoned, torch.tensor(1.0))
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert (found["hidden"][~on] == 0).all()
    selected = {"hidden": tensors["hidden"][on], "labels": tensors["labels"][on]}
    alone = masked_lm_loss(**(tensors | selected), backend=backend)
    assert torch.allclose(alone, found["output"])


def test_what_a_row_without_a_label_holds_reaches_nothing(backend):
    """NaN and infinity included; in eager, which multiplies them by zeros, they do."""
    if backend == "eager":
        pytest.skip("plain PyTorch gives NaN")
    tensors = inputs()
    found = results(lambda **t: masked_lm_loss(**t, backend=backend), tensors, torch.tensor(1.0))
    on = tensors["labels"] != -100
    for value in (torch.nan, torch.inf):
        poisoned = torch.where(on[..., None], tensors["hidden"].detach(), value).requires_grad_()
        again = results(
            lambda **t: masked_lm_loss(**t, backend=backend), tensors | {"hidden": poisoned}, torch.tensor(1.0)
        )
        assert all(torch.equal(found[name], again[name]) for name in found)


def test_a_loss_scale_that_float16_cannot_hold(backend):
    tensors = inputs(dtype=torch.float16)
    found = check(masked_lm_loss, backend, tensors, grad=torch.tensor(65536.0))
    assert all(t.isfinite().all() for t in found.values())


def test_words_outside_the_vocabulary(backend):
    """The registered op itself must not read or write past a row: the CPU says so, on a GPU the loss is NaN."""
    if backend == "eager":
        pytest.skip("torch's own cross-entropy checks its labels")
    op = getattr(torch.ops, f"fastbert_{backend}").masked_lm_loss.default
    tensors = {name: t.detach() for name, t in inputs((4,), share=1.0).items()}
    for wrong in (101, -1, 1 << 32):
        tensors["labels"][2] = wrong
        if backend == "cpu":
            with pytest.raises(RuntimeError, match=f"a label is outside the vocabulary: {wrong}"):
                op(*tensors.values(), -100, [True] * 3)
        else:
            loss, *gradients = op(*tensors.values(), -100, [True] * 3)
            assert loss.isnan() and all(g.isfinite().all() for g in gradients)


def test_another_ignore_index(backend):
    tensors = inputs()
    tensors["labels"] = torch.where(tensors["labels"] == -100, 7, tensors["labels"])
    check(masked_lm_loss, backend, tensors, grad=torch.tensor(1.0), ignore_index=7)


def test_large_logits(backend):
    tensors = inputs()
    tensors["hidden"] = (tensors["hidden"].detach() * 300).requires_grad_()
    check(masked_lm_loss, backend, tensors, grad=torch.tensor(1.0))


def test_subset_of_gradients(backend):
    for wanted in ("hidden", "weight", "bias"):
        tensors = inputs()
        for name in ("hidden", "weight", "bias"):
            tensors[name].requires_grad_(name == wanted)
        check(masked_lm_loss, backend, tensors, grad=torch.tensor(1.0))
    with torch.no_grad():
        assert not masked_lm_loss(**inputs(), backend=backend).requires_grad


def test_strided_inputs(backend):
    tensors = inputs((6, 5))
    tensors["hidden"] = torch.randn(24, 5, 6).permute(2, 1, 0).requires_grad_()
    tensors["weight"] = torch.randn(24, 101).t().requires_grad_()
    tensors["labels"] = tensors["labels"].t().contiguous().t()
    check(masked_lm_loss, backend, tensors, grad=torch.tensor(1.0))


def test_gradients_survive_a_second_backward(backend):
    """The gradients are made in forward and handed on as they are: accumulation must not write into them."""
    tensors = inputs()
    loss = masked_lm_loss(**tensors, backend=backend)
    loss.backward(retain_graph=True)
    first = {name: tensors[name].grad.clone() for name in ("hidden", "weight", "bias")}
    loss.backward()
    for name, grad in first.items():
        assert torch.allclose(tensors[name].grad, 2 * grad)


def test_tied_weight(backend):
    """The weight is the word embedding as well: both gradients arrive."""

    def loss(weight, hidden, labels, backend):
        embedded = torch.nn.functional.embedding(labels.clamp(min=0), weight)
        return masked_lm_loss(hidden + embedded, weight, None, labels, backend=backend)

    tensors = inputs(bias=False)
    del tensors["bias"]
    check(loss, backend, tensors, grad=torch.tensor(1.0))


def test_under_autocast(backend):
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = results(lambda **t: masked_lm_loss(**t, backend=backend), tensors, torch.tensor(1.0))
        eager = results(lambda **t: masked_lm_loss(**t, backend="eager"), tensors, torch.tensor(1.0))
    exact = results(lambda **t: masked_lm_loss(**t, backend="eager"), tensors, torch.tensor(1.0))
    assert found["output"].dtype == torch.float32 and found["weight"].dtype == torch.float32
    for name in found:
        assert_close_as_eager(found[name], eager[name], exact[name].double(), name, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("slices", [1, 3])
def test_a_float32_weight_under_autocast_is_not_converted(rows, slices, monkeypatch):
    """However few rows have a label; its gradient comes in float32, unrounded where bfloat16 is multiplied here."""
    tensors = inputs((rows,), columns=64, vocabulary=520, share=1.0)
    sizes = importlib.import_module("fastbert.ops.linear")
    monkeypatch.setattr(sizes, "LEAST_SIZE", 0)
    monkeypatch.setitem(
        importlib.import_module("fastbert.ops.masked_lm_loss").SLICE_BYTES, "cpu", rows * 1040 // slices
    )
    with torch.autocast("cpu", torch.bfloat16):
        found, eager = (
            results(lambda b=b, **t: masked_lm_loss(**t, backend=b), tensors, torch.tensor(1.0))
            for b in (None, "eager")
        )
    exact = results(lambda **t: masked_lm_loss(**t, backend="eager"), tensors, torch.tensor(1.0))
    for name in found:
        assert found[name].dtype == eager[name].dtype
        assert_close_as_eager(found[name], eager[name], exact[name], name, torch.bfloat16)
    rounded = torch.equal(found["weight"], found["weight"].bfloat16().float())
    assert rounded == (torch.bfloat16 not in sizes.FAST)


def test_types_that_differ_are_refused_whatever_the_size():
    tensors = inputs((300,), torch.bfloat16, columns=768, vocabulary=2000, bias=False)
    tensors["weight"] = tensors["weight"].detach().float()
    with pytest.raises(TypeError, match=r"weight is torch\.float32; it must be torch\.bfloat16"):
        masked_lm_loss(**tensors)


@pytest.mark.float64
def test_gradcheck(backend):
    tensors = inputs((4,), torch.float64, columns=3, vocabulary=5, share=0.8)
    labels = tensors.pop("labels")
    assert torch.autograd.gradcheck(
        lambda *t: masked_lm_loss(**dict(zip(tensors, t, strict=True)), labels=labels, backend=backend),
        tuple(tensors.values()),
    )


def test_opcheck_and_compile(backend):
    if backend == "eager":
        pytest.skip("eager is made of torch's own operators")
    ops = getattr(torch.ops, f"fastbert_{backend}")
    tensors = inputs((9,))
    torch.library.opcheck(ops.masked_lm_loss.default, (*tensors.values(), -100, [True, True, True]))
    torch.library.opcheck(ops.masked_lm_loss.default, (*tensors.values(), -100, [False, True, False]))
    grads = torch.randn(9, 24), torch.randn(101, 24), torch.randn(101)
    torch.library.opcheck(ops.masked_lm_loss_backward.default, (torch.tensor(0.5), *grads))
    function = lambda **t: masked_lm_loss(**t, backend=backend)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        tensors = inputs((n,))
        traced = results(compiled, tensors, torch.tensor(0.5))
        direct = results(function, tensors, torch.tensor(0.5))
        assert all(torch.equal(traced[name], direct[name]) for name in direct)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.ones(3, 7, 23)}, ValueError, r"weight has shape \(101, 24\); hidden \(3, 7, 23\) needs"),
        ({"weight": torch.ones(101, 24).half()}, TypeError, "weight is torch.float16; it must be torch.float32"),
        ({"bias": torch.ones(100)}, ValueError, r"bias has shape \(100,\); weight needs \(101,\)"),
        ({"labels": torch.ones(3, 7)}, TypeError, "labels is torch.float32; an int64 tensor is accepted"),
        (
            {"labels": torch.ones(3, 6, dtype=torch.int64)},
            ValueError,
            r"labels has shape \(3, 6\); hidden needs \(3, 7\)",
        ),
        (
            {"labels": torch.full((3, 7), 101)},
            ValueError,
            "labels holds 101; accepted are 0 to 100 and ignore_index, -100",
        ),
        ({"labels": torch.full((3, 7), -1)}, ValueError, "labels holds -1"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        masked_lm_loss(**(inputs() | change))
