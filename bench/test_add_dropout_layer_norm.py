import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, DTYPES, TOLERANCE, assert_agree, backends, measure, with_backward

from fastbert.ops.add_dropout_layer_norm import BACKENDS, add_dropout_layer_norm

TOKENS, COLUMNS = 4096, 768
X = torch.empty(1, 1, device=DEVICE)
KERNELS = backends(BACKENDS, X, X, X[0], X[0], X[0], None, None, 0.0, 1e-12)


@pytest.mark.parametrize("row", [*KERNELS, "eager", "compile"])
@pytest.mark.parametrize("direction", ["forward", "forward + backward"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_dropout_layer_norm(benchmark, dtype, dropout_p, direction, row):
    x, residual = (torch.randn(TOKENS, COLUMNS, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, bias, x_bias = (torch.randn(COLUMNS, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    wanted, grad = [x, residual, weight, bias, x_bias], torch.randn_like(x)

    def ours(name, p):
        return add_dropout_layer_norm(x, residual, weight, bias, x_bias=x_bias, dropout_p=p, backend=name)

    def plain(p):
        return F.layer_norm(residual + F.dropout(x + x_bias, p), (COLUMNS,), weight, bias, 1e-12)

    forwards = {name: (lambda p, name=name: ours(name, p)) for name in KERNELS}
    forwards |= {"eager": plain, "compile": torch.compile(plain)}
    undropped = {name: with_backward(lambda f=forwards[name]: f(0.0), wanted, grad) for name in {row, "eager"}}
    assert_agree({name: f() for name, f in undropped.items()}, TOLERANCE[dtype])
    timed = {name: (lambda f=f: f(dropout_p)) for name, f in forwards.items()}
    if direction == "forward":
        rows, tensors = {name: torch.no_grad()(f) for name, f in timed.items()}, 3
    else:
        # backward: x, residual and dy read, dresidual written, dx too where it differs
        rows = {name: with_backward(f, wanted, grad) for name, f in timed.items()}
        tensors = 3 + 4 + (dropout_p > 0)
    group = f"add_dropout_layer_norm, {TOKENS} x {COLUMNS}, dropout {dropout_p}, {str(dtype)[6:]}, {direction}"
    measure(benchmark, group, row, rows, bytes_moved=tensors * x.numel() * x.element_size(), dtype=dtype)
