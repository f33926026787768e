import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, DTYPES, TOLERANCE, assert_agree, backends, measure, with_backward

from fastbert.ops.embedding_layer_norm import BACKENDS, NO_PADDING, embedding_layer_norm

BATCH, SEQLEN, COLUMNS = 32, 128, 768
VOCABULARY, TYPES, POSITIONS = 30522, 2, 512
IDS, TABLE = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.empty(1, 1, device=DEVICE)
KERNELS = backends(BACKENDS, *(IDS,) * 3, *(TABLE,) * 3, *(TABLE[0],) * 2, None, None, 0.0, 1e-12, NO_PADDING)


@pytest.mark.parametrize("row", [*KERNELS, "eager", "compile"])
@pytest.mark.parametrize("direction", ["forward", "forward + backward"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_layer_norm(benchmark, dtype, dropout_p, direction, row):
    # As frequent as words are, roughly: rank r with a probability of 1 / r.
    words = (VOCABULARY ** torch.rand(BATCH, SEQLEN, device=DEVICE)).long().clamp(max=VOCABULARY - 1)
    ids = words, words % TYPES, torch.arange(SEQLEN, device=DEVICE).expand(BATCH, SEQLEN)
    sizes = (VOCABULARY, COLUMNS), (TYPES, COLUMNS), (POSITIONS, COLUMNS), (COLUMNS,), (COLUMNS,)
    parameters = [torch.randn(size, device=DEVICE, dtype=dtype, requires_grad=True) for size in sizes]
    grad = torch.randn(BATCH, SEQLEN, COLUMNS, device=DEVICE, dtype=dtype)

    def ours(name, p):
        return embedding_layer_norm(*ids, *parameters, dropout_p=p, backend=name)

    def plain(p, parameters=parameters):
        y = sum(F.embedding(index, table) for index, table in zip(ids, parameters, strict=False))
        return F.dropout(F.layer_norm(y, (COLUMNS,), *parameters[3:], 1e-12), p)

    forwards = {name: (lambda p, name=name: ours(name, p)) for name in KERNELS}
    forwards |= {"eager": plain, "compile": torch.compile(plain)}
    undropped = {name: with_backward(lambda f=forwards[name]: f(0.0), parameters, grad) for name in {row, "eager"}}
    if row != "eager":
        # Plain PyTorch in 16 bits rounds the gradient of a frequent word at each addition: float32's is the measure.
        exact = [p.detach().float().requires_grad_() for p in parameters]
        undropped["eager"] = with_backward(lambda: plain(0.0, exact), exact, grad.float())
    assert_agree({name: f() for name, f in undropped.items()}, TOLERANCE[dtype])
    timed = {name: (lambda f=f: f(dropout_p)) for name, f in forwards.items()}
    # Rows of word that occur, the two small tables, and what is written.
    rows_read = words.unique().numel() + TYPES + SEQLEN
    if direction == "forward":
        rows, moved = {name: torch.no_grad()(f) for name, f in timed.items()}, rows_read + words.numel()
    else:
        # backward: the rows read again, dy, and the dense gradients of all tables
        rows = {name: with_backward(f, parameters, grad) for name, f in timed.items()}
        moved = 2 * (rows_read + words.numel()) + VOCABULARY + TYPES + POSITIONS
    group = f"embedding_layer_norm, {BATCH} x {SEQLEN} x {COLUMNS}, dropout {dropout_p}, {str(dtype)[6:]}, {direction}"
    measure(benchmark, group, row, rows, bytes_moved=moved * COLUMNS * dtype.itemsize, dtype=dtype)
