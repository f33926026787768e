import pytest
import torch

from fastbert.ops import dropout_bits
from fastbert.ops.dropout import multiplier, seed_tensor, threshold


def test_golden_bits(golden):
    tensors, _ = golden("dropout_bits")
    for (seed, row_hi, row_lo), bits in zip(tensors["seed_rowhi_rowlo"].tolist(), tensors["bits"], strict=True):
        assert torch.equal(dropout_bits(seed, row_hi, row_lo, tensors["col"]).long(), bits)


def test_forms_of_the_arguments_agree():
    rows = torch.arange(7)
    table = dropout_bits(5, 3, rows, 11)
    assert table.shape == (7, 11) and table.dtype == torch.int32
    assert torch.equal(table, dropout_bits(torch.tensor([5]), torch.tensor(3), rows, torch.arange(11)))
    assert torch.equal(table[4, 6:9], dropout_bits(5, 3, 4, torch.arange(6, 9)))
    assert torch.equal(dropout_bits(-1, 0, 0, 4), dropout_bits((1 << 64) - 1, 0, 0, 4))


def test_bits_are_uniform_and_independent():
    bits = dropout_bits(1, 0, torch.arange(1000), 1000).double() / 65536
    assert abs(bits.mean() - 0.5) < 0.002 and abs(bits.var() - 1 / 12) < 0.001
    keep = (bits >= 0.1).double() - 0.9
    for a, b in ((keep[:, 1:], keep[:, :-1]), (keep[1:], keep[:-1]), (keep[:, ::2], keep[:, 1::2])):
        assert abs((a * b).mean() / keep.var()) < 0.005
    other = (dropout_bits(2, 0, torch.arange(1000), 1000).double() / 65536 >= 0.1).double() - 0.9
    assert abs((keep * other).mean() / keep.var()) < 0.005


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 1.0])
def test_multiplier_keeps_the_mean(dropout_p):
    m = multiplier(dropout_bits(9, 0, torch.arange(500), 500), dropout_p, torch.float64)
    assert abs((m == 0).double().mean() - dropout_p) < 0.005
    assert abs(m.mean() - float(dropout_p < 1)) < 0.01
    assert threshold(dropout_p) == round(dropout_p * 65536)


def test_seed_tensor_draws_from_the_generator():
    torch.manual_seed(1)
    first = [seed_tensor(None, torch.device("cpu")).item() for _ in range(3)]
    torch.manual_seed(1)
    assert [seed_tensor(None, torch.device("cpu")).item() for _ in range(3)] == first
    assert len(set(first)) == 3
