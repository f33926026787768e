import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, TOLERANCE, assert_agree, measure

from fastbert.ops import linear as module
from fastbert.ops.linear import linear

# Tokens, in and out: bert-base's four products on 1,024 tokens, the notebook's on 23,552, and both models' logits.
SIZES = [
    (1024, 768, 2304),
    (1024, 768, 768),
    (1024, 768, 3072),
    (1024, 3072, 768),
    (23552, 128, 384),
    (23552, 128, 128),
    (23552, 128, 256),
    (23552, 256, 128),
    (3560, 128, 4271),
    (160, 768, 30522),
]
KERNELS = ["cpu"] if module.FAST and DEVICE.type == "cpu" else []


@pytest.mark.parametrize("row", [*KERNELS, "eager", "mkldnn"])
@pytest.mark.parametrize("product", ["y", "dx", "dweight"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
def test_linear(benchmark, size, product, row):
    tokens, columns, outputs = size
    x, weight = torch.randn(tokens, columns, device=DEVICE), torch.randn(outputs, columns, device=DEVICE)
    grad = torch.randn(tokens, outputs, device=DEVICE)
    a, b = {"y": (x, weight.t()), "dx": (grad, weight), "dweight": (grad.t(), x)}[product]
    rows = {"cpu": lambda: (linear(a, b.t()),), "eager": lambda: (F.linear(a, b.t()),)}
    # oneDNN, through the private operator that reaches it in float32: the other implementation that torch carries.
    pointwise = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if row == "mkldnn":
        if pointwise is None or DEVICE.type != "cpu":
            pytest.skip("this torch has no float32 products through oneDNN")
        rows["mkldnn"] = lambda: (pointwise(a, b.t(), None, "none", [], ""),)
    assert_agree({name: rows[name]() for name in {row, "eager"}}, TOLERANCE[torch.float32])
    group = f"linear {product}, {tokens} x {columns} x {outputs}, float32"
    measure(benchmark, group, row, rows, operations=2 * tokens * columns * outputs)
