"""The CUDA library beside a torch without CUDA, or without a GPU: there, whole, and silent for a stated reason."""

import importlib
import json
import os
import subprocess

import pytest
import torch
from compare import far_apart, results

from fastbert import info, ops
from fastbert.ops import OPS, cuda, gelu
from fastbert.ops.registry import GPU_ORDER

LIBRARY = cuda._PACKAGE / "_cuda.so"
WITHOUT_CUDA = torch.version.cuda is None


def test_state_is_what_the_build_says():
    built = json.loads((cuda._PACKAGE / "_build.json").read_text())
    assert LIBRARY.exists() == (built["cuda"] is None) == bool(built["cuda_architectures"])
    if WITHOUT_CUDA:
        assert cuda.unavailable() == "this torch was built without CUDA"
    elif not torch.cuda.is_available() and built["cuda"] is None:
        assert cuda.unavailable() == "no GPU that torch can use"


@pytest.mark.skipif(not LIBRARY.exists(), reason="no nvcc when the package was built")
def test_needs_what_torch_with_cuda_has():
    """Also when linked beside a torch without it, or its stream could not be found; and no C++ symbol of torch."""
    needed = subprocess.run(["readelf", "-d", LIBRARY], check=True, capture_output=True, text=True).stdout
    assert all(f"[{name}.so]" in needed for name in ("libtorch_cuda", "libtorch_cpu"))
    assert "libcudart" not in needed and "libtorch.so" not in needed
    symbols = subprocess.run(["nm", "-D", "-u", LIBRARY], check=True, capture_output=True, text=True).stdout
    assert "aoti_torch_get_current_cuda_stream" in symbols
    mangled = subprocess.run(["c++filt"], input=symbols, check=True, capture_output=True, text=True).stdout
    assert not [line for line in mangled.splitlines() if "at::" in line or "c10::" in line or "torch::" in line]


@pytest.mark.skipif(not WITHOUT_CUDA, reason="torch has CUDA")
def test_asked_for_it_refuses_with_the_reason():
    with pytest.raises(NotImplementedError, match="cuda: this torch was built without CUDA"):
        gelu(torch.ones(2, 8), backend="cuda")


def test_float64_is_refused():
    assert "float64" in cuda.unsupported(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert cuda.unsupported(torch.ones(2), None, torch.ones(2).half()) is None


def test_info_says_what_was_built_for_which_architectures():
    built = json.loads((cuda._PACKAGE / "_build.json").read_text())
    line = next(line for line in info.report().splitlines() if line.startswith("CUDA kernels for"))
    assert line.endswith(" ".join(built["cuda_architectures"]) if built["cuda"] is None else built["cuda"])


@pytest.mark.parametrize(
    ("built", "device", "runs"),
    [
        ("80 90", (8, 0), True),
        ("80 90", (8, 9), True),
        ("80 90", (7, 5), False),
        ("86", (8, 0), False),
        ("80 90", (10, 0), False),
        ("80 90+PTX", (12, 1), True),
        ("90+PTX", (8, 9), False),
    ],
)
def test_a_gpu_that_nothing_was_built_for_is_refused(monkeypatch, built, device, runs):
    monkeypatch.setattr(cuda, "_BUILT", {"cuda": None, "cuda_architectures": built.split()})
    monkeypatch.setattr(cuda, "_devices", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: device)
    reason = f"the CUDA kernels were built for {built}; this GPU is of {device[0]}.{device[1]}"
    assert cuda._not_built_for(0) == (None if runs else reason)


def test_order_on_a_gpu_is_the_tables():
    """Of measured results; the report says what they rest on."""
    tables = {op: [b.name for b in importlib.import_module(f"fastbert.ops.{op}").BACKENDS] for op in OPS}
    both = {op: tuple(n for n in names if n in ("triton", "cuda")) for op, names in tables.items()}
    assert {op: order for op, order in both.items() if len(order) > 1} == {op: o for op, (o, _) in GPU_ORDER.items()}
    assert "attention triton (not measured)" in info.report()


# Of the emulated kernels: their names tell tests/simt/run.py to run them.
emulated = pytest.mark.skipif(os.environ.get("FASTBERT_SIMT") != "1", reason="FASTBERT_SIMT is not 1")
SIMT = pytest.param("cuda-simt", marks=emulated)


@pytest.mark.parametrize("name", [SIMT])
def test_launches_are_observed(name):
    """What info shows of each kernel; registers and occupancy are the device's to say."""
    from simt import build

    launches = info.cuda_launches(name, "cpu", library=build.library())
    names = [launch.kernel for launch in launches]
    assert {name for op in GPU_ORDER for name in (op, f"{op}_backward")} <= set(names)
    attention = launches[names.index("attention")]
    assert attention.threads == 128 and attention.dynamic_shared_bytes > 4 * 128 * 64
    table = info.cuda_table([attention._replace(registers=228, resident_blocks=2)], 2048)
    assert table[1].split() == ["attention", "128", "228", "0", str(attention.dynamic_shared_bytes), "12%"]


def assert_same_far_apart(function, tensors, grad):
    """``function`` gives the same bits for rows far apart and side by side."""
    far, near = (
        results(
            function,
            {n: place(t).requires_grad_(t.is_floating_point() and n != "mask") for n, t in tensors.items()},
            place(grad),
        )
        for place in (torch.Tensor.detach, lambda t: t.detach().contiguous())
    )
    assert all(torch.equal(far[name], near[name]) for name in near)


@pytest.mark.parametrize("name", [SIMT])
def test_offsets_past_two_to_the_31(name):
    """Fault 29: rows further apart than 32 bits count, in every input that is read in place."""
    rows, columns, stride = 5, 64, (1 << 30) + 64
    x, other, grad = (far_apart(rows, columns, stride) for _ in range(3))
    weight, bias, options = torch.randn(columns), torch.randn(columns), {"dropout_p": 0.1, "seed": 3, "backend": name}

    def norm(x, residual):
        return ops.add_dropout_layer_norm(x, residual, weight, bias, **options)

    def softmax(scores, mask):
        shape = (1, 1, rows, columns)
        return ops.masked_softmax(scores.view(shape), mask=mask.view(shape), **options).view(rows, columns)

    def embed(**tables):
        ids = torch.tensor([4, 0, 3, 4, 1])
        return ops.embedding_layer_norm(ids, ids, ids, **tables, weight=weight, bias=bias, **options)

    assert_same_far_apart(lambda x: ops.gelu(x, backend=name), {"x": x}, grad)
    assert_same_far_apart(norm, {"x": x, "residual": other}, grad)
    mask = far_apart(rows, columns, stride, torch.float32)
    assert_same_far_apart(softmax, {"scores": x, "mask": mask}, grad)
    tables = ("word", "token_type", "position")
    assert_same_far_apart(embed, {table: far_apart(rows, columns, stride) for table in tables}, grad)


@pytest.mark.parametrize("name", [SIMT])
@pytest.mark.parametrize("rows, form", [(5, "additive"), (5, "bool per query"), (300, "none")])
def test_offsets_of_attention_past_two_to_the_31(name, rows, form):
    """Fault 29: tokens, and rows of a mask, so far apart; in one tile and in several."""
    size, stride = 32, (1 << 30) + 64 if rows == 5 else 1 << 23
    tensors = {n: far_apart(rows, size, stride).view(1, rows, 1, size) for n in ("query", "key", "value")}
    if form == "additive":
        tensors["mask"] = far_apart(rows, rows, stride, torch.float32).view(1, 1, rows, rows)
    elif form == "bool per query":
        tensors["mask"] = far_apart(rows, rows, stride, torch.uint8).bitwise_and_(1).view(torch.bool)[None, None]
    grad = far_apart(rows, size, stride).view(1, rows, 1, size)
    assert_same_far_apart(lambda **t: ops.attention(**t, dropout_p=0.1, seed=3, backend=name), tensors, grad)
