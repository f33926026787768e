"""Every instruction set the library was compiled for, on this CPU: the op suites again with a lesser one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastbert import _build

BELOW = [isa for isa in _build.instruction_sets() if isa != _build.instruction_set()]


def runnable():
    sets = _build.instruction_sets()
    return sets[: sets.index(_build.instruction_set())]


@pytest.mark.skipif("FASTBERT_CPU_ISA" in os.environ, reason="already running with a lesser instruction set")
@pytest.mark.parametrize("isa", runnable())
def test_lesser_instruction_set(isa):
    here = Path(__file__).parent
    files = [str(here / f"test_{op}.py") for op in ("gelu", "add_dropout_layer_norm", "masked_softmax", "attention")]
    selection = ["-k", "cpu and (reference or length or layouts or contract)"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-c",
        str(here.parent / "pyproject.toml"),
        *files,
        *selection,
    ]
    environment = os.environ | {"FASTBERT_CPU_ISA": isa, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
