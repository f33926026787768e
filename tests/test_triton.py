"""Triton's backend beside the suites of the ops: what it needs, what it says, what only its kernels can get wrong."""

import os
import subprocess
import sys

import pytest
import torch
from compare import far_apart, results

from fastbert import info
from fastbert.ops import (
    add_dropout_layer_norm,
    attention,
    dropout_bits,
    embedding_layer_norm,
    gelu,
    masked_lm_loss,
    masked_softmax,
    triton,
)

runs = pytest.mark.skipif(
    triton.unavailable() is not None, reason=f"Triton's kernels cannot run: {triton.unavailable()}"
)
interpreted = pytest.mark.skipif(not triton.INTERPRETED, reason="Triton does not interpret")
DEVICE = "cpu" if triton.INTERPRETED else "cuda"


def test_importing_fastbert_imports_neither_triton_nor_a_kernel():
    code = "import sys, fastbert\nprint([m for m in sys.modules if m == 'triton' or m.startswith('fastbert.kernels')])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_no_package_called_kernels_is_installed(tmp_path):
    """It would shadow Hugging Face's."""
    code = "import fastbert.kernels, importlib.util\nprint(importlib.util.find_spec('kernels'))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "None"


def test_what_is_missing_is_named(monkeypatch):
    x = torch.ones(2, 3)
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(NotImplementedError, match="triton: the inputs are on cpu and Triton is not interpreting"):
        gelu(x, backend="triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU that torch can use, and Triton is not interpreting" in info.report()
    monkeypatch.setattr(triton, "INTERPRETED", True)
    assert triton.unavailable() is None
    with pytest.raises(NotImplementedError, match="triton: an input is float64; float32, bfloat16 and float16 are"):
        gelu(x.double(), backend="triton")
    monkeypatch.setattr(triton, "_missing", "triton is not installed")
    with pytest.raises(NotImplementedError, match="triton: triton is not installed"):
        gelu(x, backend="triton")
    assert triton.unavailable() == "triton is not installed"


def test_without_triton_the_package_works(tmp_path):
    """And says so: nothing else fails for want of it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'triton': raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch, fastbert
print(fastbert.ops.gelu(torch.ones(2)).sum().item())
from fastbert import info
print(info.report())
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "triton is not installed" in done.stdout


@interpreted
def test_the_repaired_interpreter_has_bfloat16(device_of_the_backend):
    """Fault 28: every one of the 65,536 values widens exactly, and float32 is rounded to nearest even."""
    from kernels_of_tests import converted

    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    floats = torch.randint(-(1 << 31), (1 << 31) - 1, (65536,), dtype=torch.int32)
    floats[::2] = floats[::2] & -65536 | 0x8000  # halfway between two
    floats = floats.view(torch.float32)
    widened, narrowed = converted(every, floats)
    assert torch.equal(widened.nan_to_num(0), every.float().nan_to_num(0))
    assert torch.equal(narrowed.isnan(), floats.isnan())
    assert torch.equal(narrowed.nan_to_num(0), floats.bfloat16().nan_to_num(0))


@runs
@pytest.mark.parametrize("seed", [0, -1, 123456789123456789, -(1 << 40)])
def test_dropout_bits_are_those_of_the_contract(seed):
    from kernels_of_tests import dropped

    rows = torch.tensor([0, 1, 77, (1 << 31) + 3, (1 << 32) + 5, (1 << 45) + 6, -1, 12345], device=DEVICE)
    expected = dropout_bits(seed, rows >> 32, rows, 64)
    for threshold in (1, 6554, 65535, 65536):
        bits, keep, keep_tile = dropped(torch.tensor([seed], device=DEVICE), rows, 64, threshold)
        assert torch.equal(bits, expected)
        assert torch.equal(keep, expected >= threshold) and torch.equal(keep_tile, keep)


@interpreted
def test_offsets_past_two_to_the_31():
    """Fault 29: rows further apart than 32 bits count, in every input that is read in place."""
    rows, columns, stride = 5, 64, (1 << 30) + 64
    x, other, grad = (far_apart(rows, columns, stride) for _ in range(3))
    near = {"x": x.contiguous(), "residual": other.contiguous()}
    vectors = {"weight": torch.randn(columns), "bias": torch.randn(columns)}
    options = {"dropout_p": 0.1, "seed": 3, "backend": "triton"}

    def same(function, far, close):
        found = results(function, {n: t.requires_grad_() for n, t in far.items()}, grad)
        expected = results(function, {n: t.requires_grad_() for n, t in close.items()}, grad.contiguous())
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    same(lambda x: gelu(x, backend="triton"), {"x": x}, {"x": near["x"]})
    same(
        lambda x, residual: add_dropout_layer_norm(x, residual, **vectors, **options),
        {"x": x, "residual": other},
        near,
    )
    scores = {"scores": x.detach().view(1, 1, rows, columns)}
    mask = far_apart(rows, columns, stride, torch.float32).view(1, 1, rows, columns)
    grad = grad.view(1, 1, rows, columns)
    far = results(lambda scores: masked_softmax(scores, mask=mask, **options), scores, grad)
    close = masked_softmax(scores["scores"].contiguous(), mask=mask.contiguous(), **options)
    assert torch.equal(far["output"], close)


@interpreted
@pytest.mark.parametrize("rows, form", [(5, "additive"), (5, "bool per query"), (300, "lengths")])
def test_offsets_of_attention_past_two_to_the_31(rows, form):
    """Fault 29: tokens, and rows of a mask, so far apart; in one tile and in several."""
    # Rows of a tile reach past 2^31 elements, or only its first one does.
    size, stride = 16, (1 << 30) + 64 if rows == 5 else 1 << 23
    mask = lengths = None
    if form == "additive":
        mask = far_apart(rows, 1, stride, torch.float32).view(1, 1, 1, rows)
    elif form == "bool per query":
        mask = far_apart(rows, rows, stride, torch.uint8).bitwise_and_(1).view(torch.bool).view(1, 1, rows, rows)
    else:
        lengths = torch.tensor([rows - 3])
    tensors = {name: far_apart(rows, size, stride).view(1, rows, 1, size) for name in ("query", "key", "value")}
    grad = far_apart(rows, size, stride).view(1, rows, 1, size)

    def run(mask, tensors, grad):
        options = {"mask": mask, "lengths": lengths, "dropout_p": 0.1, "seed": 3, "backend": "triton"}
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        return results(lambda **t: attention(**t, **options), leaves, grad)

    far = run(mask, tensors, grad)
    near = {name: t.contiguous() for name, t in tensors.items()}
    close = run(None if mask is None else mask.contiguous(), near, grad.contiguous())
    assert all(torch.equal(far[name], close[name]) for name in close)


@interpreted
def test_offsets_of_tables_and_hidden_states_past_two_to_the_31():
    """Fault 29."""
    columns, stride = 64, (1 << 30) + 64
    tables = {name: far_apart(5, columns, stride) for name in ("word", "token_type", "position")}
    vectors = {"weight": torch.randn(columns).half(), "bias": torch.randn(columns).half()}
    ids, grad = torch.tensor([4, 0, 3, 4]), far_apart(4, columns, stride)
    labels = torch.tensor([0, -100, 0, 0])
    embed = lambda **t: embedding_layer_norm(ids, ids, ids, **t, **vectors, backend="triton")  # noqa: E731
    loss = lambda hidden: masked_lm_loss(hidden, vectors["weight"][None], None, labels, backend="triton")  # noqa: E731
    for function, tensors, given in ((embed, tables, grad), (loss, {"hidden": grad.detach()}, torch.ones(()))):
        far, close = (
            results(
                function,
                {n: (t.contiguous() if near else t).detach().requires_grad_() for n, t in tensors.items()},
                given.contiguous() if near else given,
            )
            for near in (False, True)
        )
        assert all(torch.equal(far[name], close[name]) for name in close)


@runs
def test_rows_longer_than_a_program_holds():
    for columns in (8193, 12288):
        x, residual, grad = torch.randn(3, 3, columns, device=DEVICE)
        weight, bias, x_bias = torch.randn(3, columns, device=DEVICE)
        tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias, "x_bias": x_bias}
        for dropout_p in (0.0, 0.1):
            compare(add_dropout_layer_norm, tensors, grad, dropout_p=dropout_p, seed=5)
        lengths = torch.tensor([columns - 5], device=DEVICE)
        scores = {"scores": x[None]}
        compare(masked_softmax, scores, grad[None], lengths=lengths, dropout_p=0.1, seed=5)
        compare(masked_softmax, scores, grad[None], mask=residual[None], scale=0.5)
        compare(masked_softmax, scores, grad[None], mask=residual[None] > 1)
    empty = masked_softmax(x[None], mask=torch.zeros(1, 3, columns, dtype=torch.bool, device=DEVICE), backend="triton")
    assert (empty == 0).all()


def compare(op, tensors, grad, **options):
    from compare import check

    check(op, "triton", {name: t.detach().requires_grad_() for name, t in tensors.items()}, grad=grad, **options)


@runs
def test_infinities_and_nan():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0], device=DEVICE, requires_grad=True)
    y = gelu(x, backend="triton")
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.isnan().tolist() == [False, False, True, False, False, False] and torch.equal(dx.isnan(), y.isnan())
    assert y[0] == torch.inf and y[1] == 0 and y[3] == x[3] and y[4] == 0
    assert dx[[0, 1, 3, 4, 5]].tolist() == [1.0, 0.0, 1.0, 0.0, 0.5]
