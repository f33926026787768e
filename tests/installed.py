"""Calls every op of an installed fastbert, forward and backward, and a whole training step: `make test-wheel` runs it
with a wheel's own Python, outside the checkout. Prints what it saw; raises if anything is missing or wrong."""

import sys
from pathlib import Path

import torch

import fastbert
from fastbert import BertConfig, BertForPreTraining, info, ops
from fastbert.ops import OPS, cuda

package = Path(fastbert.__file__).parent
assert "site-packages" in package.parts, f"{package} is not an installation"
print(f"fastbert {fastbert.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")

torch.manual_seed(0)
T, H = 6, 32
x, y = (torch.randn(T, H, requires_grad=True) for _ in range(2))
weight, bias = torch.ones(H, requires_grad=True), torch.zeros(H, requires_grad=True)
word, kinds, places = (torch.randn(n, H, requires_grad=True) for n in (20, 2, T))
ids = torch.tensor([1, 5, 5, 19, 0, 7])
qkv = torch.randn(3, 1, T, 2, 16, requires_grad=True)
dropout = {"dropout_p": 0.1, "seed": 3}
CALLS = {
    "attention": lambda backend: ops.attention(*qkv, lengths=torch.tensor([4]), **dropout, backend=backend),
    "masked_softmax": lambda backend: ops.masked_softmax(x.view(1, 1, T, H), **dropout, backend=backend),
    "add_dropout_layer_norm": lambda backend: ops.add_dropout_layer_norm(
        x, y, weight, bias, **dropout, backend=backend
    ),
    "gelu": lambda backend: ops.gelu(x, bias, backend=backend),
    "embedding_layer_norm": lambda backend: ops.embedding_layer_norm(
        ids, ids % 2, torch.arange(T), word, kinds, places, weight, bias, **dropout, backend=backend
    ),
    "masked_lm_loss": lambda backend: ops.masked_lm_loss(x, word, None, ids, backend=backend),
}
assert set(CALLS) == set(OPS), set(CALLS) ^ set(OPS)
leaves = [x, y, weight, bias, word, kinds, places, qkv]
for op, call in CALLS.items():
    found = {}
    for backend in ("eager", "cpu"):
        out = call(backend)
        grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
        found[backend] = [out.detach(), *(g for g in grads if g is not None)]
    for a, b in zip(found["eager"], found["cpu"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    print(f"{op}: cpu agrees with eager in {len(found['cpu'])} tensors")

try:
    ops.gelu(x, backend="cuda")
except NotImplementedError as error:
    print(f"cuda refuses: {error}")
else:
    raise AssertionError("cuda served tensors of the CPU")

sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForPreTraining(BertConfig(**sizes)).train()
loss = model(torch.randint(0, 50, (3, 9)), labels=torch.randint(0, 50, (3, 9)), next_sentence_label=ids[:3] % 2).loss
loss.backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
print(f"a training step: loss {loss.item():.3f}\n\n{info.report()}")
print(f"\ncuda library: {cuda.unavailable() or 'loaded'}")
