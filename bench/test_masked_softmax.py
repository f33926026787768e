import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, DTYPES, TOLERANCE, assert_agree, backends, measure, with_backward

from fastbert.ops.masked_softmax import BACKENDS, masked_softmax

HEADS, SHAPES = 12, [(32, 128), (8, 512)]  # 4,096 tokens, a third of them padding
KERNELS = backends(BACKENDS, torch.empty(1, 1, 1, 1, device=DEVICE), None, None, 1.0, 0.0, None)


@pytest.mark.parametrize("row", [*KERNELS, "eager", "compile"])
@pytest.mark.parametrize("direction", ["forward", "forward + backward"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_softmax(benchmark, dtype, shape, dropout_p, direction, row):
    batch, seqlen = shape
    scores = torch.randn(batch, HEADS, seqlen, seqlen, device=DEVICE, dtype=dtype, requires_grad=True)
    lengths = torch.linspace(seqlen // 3, seqlen, batch, device=DEVICE).long()
    on = (torch.arange(seqlen, device=DEVICE) < lengths[:, None])[:, None, None]
    added = torch.zeros_like(on, dtype=dtype).masked_fill(~on, -1e4)
    grad = torch.randn_like(scores)

    def plain(p):
        return F.dropout(torch.softmax(scores * 0.125 + added, -1), p)

    def ours(name, p):
        return masked_softmax(scores, lengths=lengths, scale=0.125, dropout_p=p, backend=name)

    forwards = {name: (lambda p, name=name: ours(name, p)) for name in KERNELS}
    forwards |= {"eager": plain, "compile": torch.compile(plain)}
    undropped = {name: with_backward(lambda f=forwards[name]: f(0.0), [scores], grad) for name in {row, "eager"}}
    assert_agree({name: f() for name, f in undropped.items()}, TOLERANCE[dtype])
    timed = {name: (lambda f=f: f(dropout_p)) for name, f in forwards.items()}
    if direction == "forward":
        rows, tensors = {name: torch.no_grad()(f) for name, f in timed.items()}, 2
    else:
        rows, tensors = {name: with_backward(f, [scores], grad) for name, f in timed.items()}, 5
    group = f"masked_softmax, {batch} x {HEADS} x {seqlen}^2, dropout {dropout_p}, {str(dtype)[6:]}, {direction}"
    measure(benchmark, group, row, rows, bytes_moved=tensors * scores.numel() * scores.element_size(), dtype=dtype)
