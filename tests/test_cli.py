"""What a user can mend is one line on stderr; runs: test_pretrain.py."""

import pytest
import torch

from fastbert import cli
from fastbert.ops import triton


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it measures")
@pytest.mark.parametrize("interpreted", [True, False])
def test_tuning_without_a_gpu_says_what_is_missing(capsys, monkeypatch, interpreted):
    monkeypatch.setattr(triton, "INTERPRETED", interpreted)
    assert cli.main(["bench", "--tune"]) == 1
    reason = "triton is not installed" if triton._missing else "Triton interprets" if interpreted else "no GPU"
    assert capsys.readouterr().err.startswith(f"fastbert: error: --tune measures Triton's kernels on a GPU: {reason}")
