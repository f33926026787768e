import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, DTYPES, TOLERANCE, assert_agree, backends, measure, with_backward

from fastbert.ops.masked_lm_loss import BACKENDS, masked_lm_loss

# bert-base's head on the labelled rows of 32 sequences of 128 tokens; the notebook's on its prediction slots.
SIZES = [(614, 30522, 768), (3560, 4271, 128)]
HIDDEN, LABELS = torch.empty(1, 1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
KERNELS = backends(BACKENDS, HIDDEN, HIDDEN, HIDDEN[0], LABELS, -100)


@pytest.mark.parametrize("row", [*KERNELS, "eager", "compile"])
@pytest.mark.parametrize("direction", ["forward", "forward + backward"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_lm_loss(benchmark, dtype, size, direction, row):
    count, vocabulary, columns = size
    hidden = torch.randn(count, columns, device=DEVICE, dtype=dtype, requires_grad=True)
    # Logits of size 1, as at the start of training.
    weight = torch.randn(vocabulary, columns, device=DEVICE) * columns**-0.5
    weight = weight.to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, device=DEVICE, requires_grad=True)
    labels = torch.randint(vocabulary, (count,), device=DEVICE)
    wanted, grad = [hidden, weight, bias], torch.ones((), device=DEVICE)

    def plain():
        return F.cross_entropy(F.linear(hidden, weight).float() + bias, labels)

    forwards = {
        name: (lambda name=name: masked_lm_loss(hidden, weight, bias, labels, backend=name)) for name in KERNELS
    }
    forwards |= {"eager": plain, "compile": torch.compile(plain)}
    rows = {name: with_backward(f, wanted, grad) for name, f in forwards.items()}
    assert_agree({name: rows[name]() for name in {row, "eager"}}, TOLERANCE[dtype])
    products = 3
    if direction == "forward":
        rows, products = {name: torch.no_grad()(f) for name, f in forwards.items()}, 1
    group = f"masked_lm_loss, {count} x {columns}, {vocabulary} words, {str(dtype)[6:]}, {direction}"
    operations = products * 2 * count * vocabulary * columns
    measure(benchmark, group, row, rows, operations=operations, dtype=dtype)
