import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, DTYPES, TOLERANCE, assert_agree, backends, measure, with_backward

from fastbert.ops.gelu import BACKENDS, gelu

TOKENS, COLUMNS = 4096, 3072  # bert-base's intermediate layer
KERNELS = backends(BACKENDS, torch.empty(1, 1, device=DEVICE), torch.empty(1, device=DEVICE), "none")


@pytest.mark.parametrize("row", [*KERNELS, "eager", "compile"])
@pytest.mark.parametrize("direction", ["forward", "forward + backward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(benchmark, dtype, direction, row):
    x = torch.randn(TOKENS, COLUMNS, device=DEVICE, dtype=dtype, requires_grad=True)
    bias = torch.randn(COLUMNS, device=DEVICE, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    plain = lambda: F.gelu(x + bias)  # noqa: E731
    forwards = {name: (lambda name=name: gelu(x, bias, backend=name)) for name in KERNELS}
    forwards |= {"eager": plain, "compile": torch.compile(plain)}
    rows = {name: with_backward(f, [x, bias], grad) for name, f in forwards.items()}
    assert_agree({name: rows[name]() for name in {row, "eager"}}, TOLERANCE[dtype])
    tensors = 5  # backward: x and dy read, dx written; forward: x read, y written
    if direction == "forward":
        rows, tensors = {name: torch.no_grad()(f) for name, f in forwards.items()}, 2
    group = f"gelu, {TOKENS} x {COLUMNS}, {str(dtype)[6:]}, {direction}"
    measure(benchmark, group, row, rows, bytes_moved=tensors * x.numel() * x.element_size(), dtype=dtype)
