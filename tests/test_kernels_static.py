"""What the compiler makes of Triton's kernels, without a GPU, in a process where nothing interprets."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

OPS = ("add_dropout_layer_norm", "attention", "embedding_layer_norm", "gelu", "masked_lm_loss", "masked_softmax")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_without_spills_and_within_shared_memory(tmp_path, target):
    """A subset of the configurations; `python -m fastbert.kernels.static --all` does all of them, for all targets."""
    done = run("-m", "fastbert.kernels.static", "--targets", target, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "triton.json").read_text())
    assert {record["op"] for record in records} == {*OPS}
    for record in records:
        assert record["bytes_moved"] >= record["bytes_least"] > 0, record["case"]
        for launch in record["launches"]:
            code = launch["code"][target]
            assert code["spilled_bytes"] == 0 and code["fits"], (record["case"], code)
            assert 0 < code["occupancy"] <= 1
        if record["op"] in ("gelu", "add_dropout_layer_norm", "masked_softmax"):
            assert record["bytes_moved"] <= 1.2 * record["bytes_least"], record["case"]
            code = record["launches"][0]["code"][target]
            assert code["widest_load"] == code["widest_store"] == 16, (record["case"], code)
    text = (tmp_path / "triton.md").read_text()
    assert all(record["case"] in text for record in records)


VARIANTS = """
import json
import torch
from fastbert.kernels import (
    add_dropout_layer_norm, attention, embedding_layer_norm, gelu, masked_lm_loss, masked_softmax
)
from fastbert.kernels.offline import meta, offline

bf16, fp32, int32, int64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
seed, vector, bias = meta(1, dtype=int64), meta(768, dtype=fp32), meta(3072, dtype=bf16)
tables = [meta(size, 768, dtype=fp32) for size in (30522, 2, 512)]
weight, words_bias = meta(30522, 768, dtype=bf16), meta(30522, dtype=fp32)


def calls(length):
    x, wide = meta(4, length, 768, dtype=bf16), meta(4, length, 3072, dtype=bf16)
    yield gelu.forward, (wide, bias, "none")
    yield gelu.backward, (wide, wide, bias, "none")
    inputs = (x, x, vector, vector, vector, seed, None, 0.1, 1e-12)
    yield add_dropout_layer_norm.forward, inputs
    yield add_dropout_layer_norm.backward, (x, *inputs)
    scores, lengths = meta(4, 12, length, length, dtype=bf16), meta(4, dtype=int32)
    yield masked_softmax.forward, (scores, None, lengths, 0.125, 0.1, seed)
    yield masked_softmax.backward, (scores, scores, None, lengths, 0.125, 0.1, seed)
    q, lse = meta(4, length, 12, 64, dtype=bf16), meta(4, 12, length, dtype=fp32)
    inputs = (None, lengths, None, 0, 0.125, 0.1, seed)
    yield attention.forward, (q, q, q, *inputs)
    yield attention.backward, (q, q, q, q, q, lse, *inputs)
    # Packed, and twice as long: more than one tile.
    q, lse = meta(5 * length, 12, 64, dtype=bf16), meta(12, 5 * length, dtype=fp32)
    inputs = (None, None, meta(5, dtype=int32), 2 * length, 0.125, 0.1, seed)
    yield attention.forward, (q, q, q, *inputs)
    yield attention.backward, (q, q, q, q, q, lse, *inputs)
    ids = meta(4, length, dtype=int64)
    inputs = (ids, ids, ids, *tables, vector, vector, seed, None, 0.1, 1e-12, 0)
    yield embedding_layer_norm.forward, inputs
    yield embedding_layer_norm.backward, (meta(4, length, 768, dtype=fp32), *inputs)
    hidden, labels = meta(length, 768, dtype=bf16), meta(length, dtype=int64)
    yield masked_lm_loss.forward, (hidden, weight, words_bias, labels, -100, [True] * 3)
    yield masked_lm_loss.backward, (meta(dtype=fp32), hidden, weight, words_bias)


variants = {}
with offline("sm_90") as launches:
    for length in range(65, 115):
        for function, arguments in calls(length):
            function(*arguments)
            for launch in launches:
                variants.setdefault(launch.name, set()).add(id(launch.compiled))
            launches.clear()
print(json.dumps({name: len(found) for name, found in variants.items()}))
"""
# One of each kernel, but for these.
SEVERAL = {
    # a row of scores starts on 16 bytes, or does not
    "masked_softmax.forward": 2,
    "masked_softmax.backward": 2,
    # in one tile, in several
    "attention._attention_forward": 2,
    "attention._attention_backward_kv": 2,
    # one, two and three vectors, and one of a vocabulary that is no multiple of 16
    "column_sums.kernel": 4,
    # a gradient in bfloat16, in float32
    "masked_lm_loss.scale": 2,
}


def test_no_kernel_is_compiled_again_as_lengths_vary():
    """Fault 27."""
    done = run("-c", VARIANTS)
    assert done.returncode == 0, done.stderr
    variants = json.loads(done.stdout.splitlines()[-1])
    assert variants == dict.fromkeys(variants, 1) | SEVERAL
    assert {name.partition(".")[0] for name in variants} == {*OPS, "column_sums"}


GRIDS = """
import torch
from fastbert.kernels import (
    add_dropout_layer_norm, attention, embedding_layer_norm, gelu, masked_lm_loss, masked_softmax
)
from fastbert.kernels.offline import meta, offline

fp32, int64 = torch.float32, torch.int64
rows = 1 << 22
x, v, seed, ids = meta(rows, 8, dtype=fp32), meta(8, dtype=fp32), meta(1, dtype=int64), meta(rows, dtype=int64)
with offline("sm_80") as launches:
    gelu.forward(x, v, "none")
    gelu.backward(x, x, v, "none")
    add_dropout_layer_norm.forward(x, x, v, v, v, seed, None, 0.1, 1e-12)
    add_dropout_layer_norm.backward(x, x, x, v, v, v, seed, None, 0.1, 1e-12)
    scores = meta(1 << 17, 1, 1, 8, dtype=fp32)
    masked_softmax.forward(scores, None, None, 1.0, 0.0, None)
    masked_softmax.backward(scores, scores, None, None, 1.0, 0.0, None)
    for batch, heads in ((1 << 17, 1), (1, 1 << 17)):
        q, lse = meta(batch, 1, heads, 8, dtype=fp32), meta(batch, heads, 1, dtype=fp32)
        attention.forward(q, q, q, None, None, None, 0, 1.0, 0.0, None)
        attention.backward(q, q, q, q, q, lse, None, None, None, 0, 1.0, 0.0, None)
    inputs = (ids, ids, ids, x, x[:2], x[:512], v, v, seed, None, 0.1, 1e-12, 0)
    embedding_layer_norm.forward(*inputs)
    embedding_layer_norm.backward(x, *inputs)
    masked_lm_loss.forward(x, meta(64, 8, dtype=fp32), None, ids, -100, [True, True, False])
    masked_lm_loss.backward(meta(dtype=fp32), x, x, x)
for launch in launches:
    assert len(launch.grid) == 1 and 0 < launch.grid[0] < 2**31, (launch.name, launch.grid)
many = {launch.name.partition(".")[0] for launch in launches if launch.grid[0] > 65535}
assert len(many) == 6, many
"""


def test_grids_go_past_65535():
    """Fault 14: programs are counted in the one dimension of a grid that has no such limit."""
    done = run("-c", GRIDS)
    assert done.returncode == 0, done.stderr


def test_compiling_under_the_interpreter_is_refused():
    environment = ENVIRONMENT | {"TRITON_INTERPRET": "1"}
    code = "from fastbert.kernels.offline import offline\nwith offline('sm_90'): pass"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode and "RuntimeError: Triton interprets (TRITON_INTERPRET=1)" in done.stderr


def test_tuning_needs_a_gpu():
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    code = "from fastbert.kernels.tune import tune\ntune(['gelu'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode and "RuntimeError: tuning measures kernels on a GPU" in done.stderr
