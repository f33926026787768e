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

from . import __version__
from .ops import OPS


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


def report() -> str:
    """All of it as text."""
    facts = versions() | native_build()
    facts["threads"] = str(torch.get_num_threads())
    facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"
    lines = [f"{name:18s}{value}" for name, value in facts.items()]
    lines += ["", f"{'op':24s}{'backend':10s}state (backends in the order of choice)"]
    lines += [f"{op:24s}{backend:10s}{state}" for op, backend, state in backends()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
