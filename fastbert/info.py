"""What this installation can do: ``python -m fastbert.info`` or ``fastbert info``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path

import torch

from . import __version__, ops
from .ops import OPS, cuda
from .ops.registry import GPU_ORDER


def versions() -> dict[str, str]:
    """Versions of what matters, "not installed" where something is not."""
    found = {"fastbert": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> str:
    """A name for the machine's processor or GPU, fit for a file name."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def native_build() -> dict[str, str]:
    """Facts of the native build, or why there is none."""
    if importlib.util.find_spec("fastbert._build") is None:
        return {"native build": "none; see the reason beside each backend"}
    build = importlib.import_module("fastbert._build")
    return {
        "compiler": build.compiler + (" with sanitizers" if build.sanitized else ""),
        "instruction sets": f"{build.instruction_set()} in use; built: {', '.join(build.instruction_sets())}",
    }


def backends() -> list[tuple[str, str, str]]:
    """(op, backend, state) of every backend of every op in the order of choice; state is "ready" or a reason."""
    return [
        (op, backend.name, backend.unavailable() or "ready")
        for op in OPS
        for backend in importlib.import_module(f"fastbert.ops.{op}").BACKENDS
    ]


def cuda_launches(backend: str = "cuda", device: str = "cuda", **library) -> list[cuda.Launch]:
    """The CUDA kernels behind a sequence of 128 tokens in bert-base, bfloat16 with dropout, forward and backward."""

    def random(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    extra = {"dropout_p": 0.1, "seed": 0, "backend": backend}
    x, vectors = random(128, 768), (random(768), random(768))
    ids, tables = torch.zeros(128, device=device, dtype=torch.int64), (random(2, 768), random(2, 768), random(2, 768))
    with cuda.observed_launches(**library) as launches:
        ops.attention(*(random(1, 128, 12, 64) for _ in range(3)), **extra).sum().backward()
        ops.masked_softmax(random(1, 12, 128, 128), **extra).sum().backward()
        ops.add_dropout_layer_norm(x, x, *vectors, **extra).sum().backward()
        ops.gelu(random(128, 3072), random(3072), backend=backend).sum().backward()
        ops.embedding_layer_norm(ids, ids, ids, *tables, *vectors, **extra).sum().backward()
    return launches


def cuda_table(launches: list[cuda.Launch], threads: int) -> list[str]:
    """As text, one line a kernel; ``threads``: those a multiprocessor can hold."""
    lines = [f"{'CUDA kernel':36s}threads  registers  spilled  shared bytes  occupancy"]
    for launch in dict.fromkeys(launches):
        shared = launch.static_shared_bytes + launch.dynamic_shared_bytes
        lines.append(
            f"{launch.kernel:36s}{launch.threads:7d}{launch.registers:11d}{launch.spilled_bytes:9d}{shared:14d}"
            f"{launch.resident_blocks * launch.threads / threads:11.0%}"
        )
    return lines


def report() -> str:
    """All of it as text."""
    facts = versions() | native_build()
    facts["threads"] = str(torch.get_num_threads())
    facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"
    facts["CUDA kernels for"] = cuda.architectures()
    lines = [f"{name:18s}{value}" for name, value in facts.items()]
    lines += ["", f"{'op':24s}{'backend':10s}state (backends in the order of choice)"]
    lines += [f"{op:24s}{backend:10s}{state}" for op, backend, state in backends()]
    lines += ["", "first on a GPU: " + "; ".join(f"{op} {order[0]} ({why})" for op, (order, why) in GPU_ORDER.items())]
    if cuda.unavailable() is None:
        lines += ["", *cuda_table(cuda_launches(), torch.cuda.get_device_properties().max_threads_per_multi_processor)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
