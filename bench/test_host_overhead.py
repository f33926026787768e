"""What a layer costs on the host: one of 64 columns on a single token, where there is nothing to compute.

On a GPU the host's time is that of the launches, which the device outruns; it is what limits small batches.
"""

import pytest
import torch
from common import DEVICE, assert_agree, backends, measure, with_backward

import fastbert
from fastbert.ops.attention import BACKENDS

HEAD_SIZE = 64
CONFIG = fastbert.BertConfig(hidden_size=HEAD_SIZE, num_attention_heads=1, intermediate_size=4 * HEAD_SIZE)
Q = torch.empty(1, 1, 1, HEAD_SIZE, device=DEVICE)
KERNELS = backends(BACKENDS, Q, Q, Q, None, None, None, 0, 1.0, 0.0, None)
MULTIPLY_ADDS = 12 * HEAD_SIZE**2  # of a layer's products, for one token


@pytest.mark.parametrize("row", [*KERNELS, "eager", "torch"])
@pytest.mark.parametrize("direction", ["forward", "forward + backward"])
def test_host_overhead(benchmark, direction, row):
    layer = fastbert.BertLayer(CONFIG).to(DEVICE).train()
    peer = torch.nn.TransformerEncoderLayer(HEAD_SIZE, 1, 4 * HEAD_SIZE, activation="gelu", batch_first=True)
    peer = peer.to(DEVICE).train()
    x, grad = torch.randn(2, 1, 1, HEAD_SIZE, device=DEVICE)
    x.requires_grad_()

    def ours(name):
        with fastbert.use_backend(name):
            return layer(x)

    forwards = {name: (lambda name=name: ours(name)) for name in (*KERNELS, "eager")} | {"torch": lambda: peer(x)}
    if row != "torch":
        layer.eval()
        assert_agree({name: (forwards[name](),) for name in {row, "eager"}}, 1e-4)
        layer.train()
    if direction == "forward":
        rows = {name: torch.no_grad()(f) for name, f in forwards.items()}
    else:
        parameters = {"torch": [x, *peer.parameters()]}
        rows = {
            name: with_backward(f, parameters.get(name, [x, *layer.parameters()]), grad) for name, f in forwards.items()
        }
    operations = 2 * MULTIPLY_ADDS * (1 if direction == "forward" else 3)
    measure(benchmark, f"host overhead, a layer on 1 x 1, float32, {direction}", row, rows, operations=operations)
