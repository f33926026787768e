import importlib.util

import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, DTYPES, TOLERANCE, assert_agree, backends, measure, with_backward

from fastbert.ops import Packing
from fastbert.ops.attention import BACKENDS, attention

HEADS, HEAD_SIZE, SHAPES = 12, 64, [(32, 128), (8, 512)]  # 4,096 tokens, a third of them padding
Q = torch.empty(1, 1, 1, 16, device=DEVICE)
KERNELS = backends(BACKENDS, Q, Q, Q, None, None, None, 0, 1.0, 0.0, None)
ROWS = [*KERNELS, *(f"{name}, packed" for name in KERNELS), "eager", "sdpa", "compile"]
FLASH = DEVICE.type == "cuda" and importlib.util.find_spec("flash_attn") is not None


@pytest.mark.parametrize("row", [*ROWS, "flash-attn, packed"] if FLASH else ROWS)
@pytest.mark.parametrize("direction", ["forward", "forward + backward"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(benchmark, dtype, shape, dropout_p, direction, row):
    if row == "flash-attn, packed" and dtype == torch.float32:
        pytest.skip("flash-attn has no float32")
    batch, seqlen = shape
    lengths = torch.linspace(seqlen // 3, seqlen, batch, device=DEVICE).long()
    packing = Packing.from_lengths(lengths, seqlen)
    on = torch.arange(seqlen, device=DEVICE) < lengths[:, None]
    padded = [
        torch.randn(batch, seqlen, HEADS, HEAD_SIZE, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)
    ]
    packed = [t.detach()[on].requires_grad_() for t in padded]
    grad = torch.randn_like(padded[0]) * on[..., None, None]
    mask = on[:, None, None]
    added = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -1e4)

    def plain(p):
        query, key, value = (t.transpose(1, 2) for t in padded)
        scores = query @ key.transpose(2, 3) * HEAD_SIZE**-0.5 + added
        return (F.dropout(scores.softmax(-1), p) @ value).transpose(1, 2)

    def sdpa(p):
        query, key, value = (t.transpose(1, 2) for t in padded)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p).transpose(1, 2)

    def flash(p):
        from flash_attn import flash_attn_varlen_func

        bounds = packing.cu_seqlens, packing.cu_seqlens, packing.max_seqlen, packing.max_seqlen
        return flash_attn_varlen_func(*packed, *bounds, dropout_p=p)

    forwards = {"eager": plain, "sdpa": sdpa, "compile": torch.compile(plain), "flash-attn, packed": flash}
    layout = {"cu_seqlens": packing.cu_seqlens, "max_seqlen": packing.max_seqlen}
    for name in KERNELS:
        forwards[name] = lambda p, name=name: attention(*padded, lengths=lengths, dropout_p=p, backend=name)
        forwards[f"{name}, packed"] = lambda p, name=name: attention(*packed, **layout, dropout_p=p, backend=name)

    def with_gradients(name, p):
        inputs, cotangent = (packed, grad[on]) if name.endswith("packed") else (padded, grad)
        return with_backward(lambda: forwards[name](p), inputs, cotangent)

    def on_real_tokens(name, tensors):
        # A padded query's row means nothing, and its gradient is 0: compare what belongs to tokens.
        return tuple(t if name.endswith("packed") else t[on] for t in tensors)

    assert_agree({name: on_real_tokens(name, with_gradients(name, 0.0)()) for name in {row, "eager"}}, TOLERANCE[dtype])
    chosen = dict.fromkeys((row, "eager"))
    if direction == "forward":
        rows, products = {name: torch.no_grad()(lambda f=forwards[name]: f(dropout_p)) for name in chosen}, 2
    else:
        rows, products = {name: with_gradients(name, dropout_p) for name in chosen}, 7
    # Products of every query with the keys that are on; padded queries count for nothing.
    operations = products * 2 * HEADS * HEAD_SIZE * int((lengths**2).sum())
    group = f"attention, {batch} x {seqlen}, {HEADS} x {HEAD_SIZE}, dropout {dropout_p}, {str(dtype)[6:]}, {direction}"
    measure(benchmark, group, row, rows, operations=operations, dtype=dtype)
