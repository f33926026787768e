"""Backend ``cuda-simt``: the CUDA kernels, emulated, beside the others in the shared suites (FASTBERT_SIMT=1)."""

import importlib

import torch

from fastbert.ops import OPS, cuda, registry
from fastbert.ops.registry import Backend

from . import build

NAME = "cuda-simt"


def _why_not(*args):
    return cuda.unsupported(*(a for a in args if isinstance(a, torch.Tensor)))


def join():
    """Build and load the emulated library; add the backend to each op that has a CUDA kernel."""
    torch.ops.load_library(str(build.library()))
    setattr(torch.ops, f"fastbert_{NAME}", torch.ops.fastbert_cuda_simt)  # as the tests look a backend's ops up
    registry.BACKENDS += (NAME,)
    for op in OPS:
        module = importlib.import_module(f"fastbert.ops.{op}")
        if any(backend.name == "cuda" for backend in module.BACKENDS):
            register = getattr(module, "native", module.OPERATOR.register)
            why_not = getattr(module, "cuda_unsupported", _why_not)
            module.BACKENDS += (Backend(NAME, register("cuda_simt"), why_not),)
