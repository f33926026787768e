import pytest
import torch

from fastbert.ops import Packing, pad, unpad


def test_round_trip_of_any_pattern():
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]])
    hidden = torch.randn(5, 5, 3, dtype=torch.float64)
    for m in (mask, mask.bool(), mask.double()):
        packed, packing = unpad(hidden, m)
        assert torch.equal(packed, hidden[mask.bool()])
        assert torch.equal(packing.cu_seqlens, torch.tensor([0, 3, 6, 9, 9, 10], dtype=torch.int32))
        assert (packing.max_seqlen, packing.batch, packing.seqlen, packing.tokens) == (3, 5, 5, 10)
        assert isinstance(packing.max_seqlen, int)
        assert torch.equal(pad(packed, packing), hidden * mask[..., None])


def test_from_lengths_is_from_mask_of_right_padding():
    lengths = torch.tensor([3, 0, 5, 1])
    a, b = Packing.from_lengths(lengths, 6), Packing.from_mask(torch.arange(6) < lengths[:, None])
    assert torch.equal(a.indices, b.indices) and torch.equal(a.cu_seqlens, b.cu_seqlens)
    assert a.max_seqlen == b.max_seqlen == 5


def test_gradients():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    hidden = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: unpad(h, mask)[0], (hidden,))
    _, packing = unpad(hidden, mask)
    packed = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: pad(p, packing), (packed,))


def test_empty():
    for batch, seqlen in ((0, 4), (3, 0), (2, 3)):
        hidden, mask = torch.randn(batch, seqlen, 5), torch.zeros(batch, seqlen, dtype=torch.long)
        packed, packing = unpad(hidden, mask)
        assert packed.shape == (0, 5) and packing.max_seqlen == 0
        assert torch.equal(pad(packed, packing), torch.zeros(batch, seqlen, 5))


def test_errors_name_the_argument():
    hidden, mask = torch.zeros(2, 3, 4), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 4\); hidden \(2, 3, 4\) needs \(2, 3\)"):
        unpad(hidden, torch.ones(2, 4))
    packed, packing = unpad(hidden, mask)
    with pytest.raises(ValueError, match=r"packed has shape \(5, 4\); its packing holds 6 tokens"):
        pad(packed[1:], packing)
    with pytest.raises(ValueError, match=r"a packing needs \[batch, seqlen\]"):
        Packing.from_mask(torch.ones(3))
    with pytest.raises(ValueError, match=r"a packing needs \[batch\]"):
        Packing.from_lengths(torch.ones(3, 1), 4)
