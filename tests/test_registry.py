import os
import subprocess
import sys

import pytest
import torch

import fastbert
from fastbert import info
from fastbert.ops import OPS, gelu
from fastbert.ops.registry import Backend, select

X = torch.ones(2, 3)


def test_order_and_reasons():
    calls = []
    table = (
        Backend("cuda", lambda x: "cuda", lambda x: "no GPU"),
        Backend("cpu", lambda x: "cpu", lambda x: None if x > 1 else "x is too small"),
        Backend("eager", lambda x: calls.append(x) or "eager", lambda x: None),
    )
    assert select("op", table, None, (2,)).name == "cpu"
    assert select("op", table, None, (1,)).name == "eager"
    assert select("op", table, "eager", (2,)).name == "eager"
    with pytest.raises(NotImplementedError, match="no backend serves this call of op: cpu: x is too small"):
        select("op", table, "cpu", (1,))
    with pytest.raises(NotImplementedError, match="triton: op has no such backend; it has cuda, cpu, eager"):
        select("op", table, "triton", (1,))
    with pytest.raises(NotImplementedError, match="cuda: no GPU; cpu: x is too small"):
        select("op", table[:2], None, (1,))


def test_use_backend_nests_and_the_argument_wins():
    with fastbert.use_backend("cuda"):
        with pytest.raises(NotImplementedError, match="cuda"):
            gelu(X)
        gelu(X, backend="eager")
        with fastbert.use_backend("eager"):
            gelu(X)
        with pytest.raises(NotImplementedError):
            gelu(X)
        with fastbert.use_backend(None):
            gelu(X)
    gelu(X)
    with (
        pytest.raises(ValueError, match="name is 'gpu'; accepted are 'eager', 'cpu', 'triton', 'cuda'"),
        fastbert.use_backend("gpu"),
    ):
        pass


def test_environment(monkeypatch):
    monkeypatch.setenv("FASTBERT_BACKEND", "cuda")
    with pytest.raises(NotImplementedError, match="cuda"):
        gelu(X)
    with fastbert.use_backend("eager"):
        gelu(X)
    monkeypatch.setenv("FASTBERT_BACKEND", "fast")
    with pytest.raises(ValueError, match="FASTBERT_BACKEND is 'fast'; accepted are"):
        gelu(X)


def test_the_kernels_are_here():
    """A build that says fine and lacks its kernels is caught here (fault 5)."""
    states = {(op, backend): state for op, backend, state in info.backends()}
    for op in OPS:
        assert states[op, "cpu"] == "ready", states[op, "cpu"]
        assert states[op, "eager"] == "ready"


def test_info_names_every_op_and_the_instruction_set():
    environment = os.environ | {"FASTBERT_CPU_ISA": "baseline"}
    command = [sys.executable, "-m", "fastbert.info"]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert all(op in text for op in OPS) and "baseline in use" in text and torch.__version__ in text


def test_an_installation_without_kernels_works_on_eager_and_says_so(tmp_path):
    """No compiler at build time: eager serves, asking for cpu raises with the reason, info prints it."""
    code = f"""
import importlib.util, pathlib, shutil, sys
source = pathlib.Path({str(fastbert.__path__[0])!r})
shutil.copytree(source, {str(tmp_path)!r} + "/fastbert", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
(pathlib.Path({str(tmp_path)!r}) / "fastbert/_build.json").write_text('{{"cpu": "no C++ compiler was found"}}')
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.path.insert(0, {str(tmp_path)!r})
import torch, fastbert
from fastbert import info
assert fastbert.__path__[0].startswith({str(tmp_path)!r})
print(fastbert.ops.gelu(torch.ones(2)).sum().item())
try:
    fastbert.ops.gelu(torch.ones(2), backend="cpu")
except NotImplementedError as error:
    print(error)
print(info.report())
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert out.count("no C++ compiler was found") >= 1 + len(OPS)
    assert "native build" in out
