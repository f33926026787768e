"""What nvcc makes of every CUDA kernel, without a GPU: ``python bench/static_cuda.py [ARCH...]``.

Compiles each file of csrc/cuda for each release architecture (setup.py's list) and writes bench/results/static/cuda.md
and cuda.json: registers, spills, shared memory, occupancy, instruction mix. What attention asks for when it is launched
is asked of the emulated kernels (tests/simt). Exits with status 1 if a kernel spills, if one for vectors has no 128-bit
load, or one of attention no tensor-core instruction. Needs nvcc and cuobjdump (of the CUDA toolkit, or the one that
triton brings).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "results" / "static"
RELEASE = ("75", "80", "86", "89", "90", "100", "120")
DETAIL = "90"  # every kernel of it is in the Markdown; all are in the JSON


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one multiprocessor, from the CUDA C++ programming guide: warps, blocks, KiB of shared memory."""

    warps: int
    blocks: int
    shared_kib: int

    def occupancy(self, threads: int, registers: int, shared: int) -> float:
        """Share of the warps that can be resident: 65,536 registers, given out by 256 a warp, on four schedulers."""
        warps = -(-threads // 32)
        by_registers = 4 * (16384 // (-(-registers * 32 // 256) * 256)) // warps
        by_shared = (self.shared_kib << 10) // (shared + 1024)  # 1 KiB a block is the system's
        return min(self.blocks, self.warps // warps, by_registers, by_shared) * warps / self.warps


LIMITS = {
    "75": Limits(32, 16, 64),
    "80": Limits(64, 32, 164),
    "86": Limits(48, 16, 100),
    "89": Limits(48, 24, 100),
    "90": Limits(64, 32, 228),
    "100": Limits(64, 32, 228),
    "120": Limits(48, 24, 100),
}
# What is counted, by the start of the SASS instruction.
MIX = {
    "loads_128": r"LDG\.\S*128",
    "loads": r"LDG",
    "stores_128": r"STG\.\S*128",
    "stores": r"STG",
    "tensor_core": r"HMMA|[UQ]?TCGEN",
    "async_copies": r"LDGSTS",
    "ldmatrix": r"LDSM",
    "shuffles": r"SHFL",
    "local": r"LDL|STL",
}


VARIANTS = ("plain", "dropout", "general")  # of attention.cu
# Kernels that read no rows in vectors: for any element, of one column a thread, or of other things.
SCALAR = re.compile(r"<Any|<1>|column_sums|bounds")


@dataclasses.dataclass
class Kernel:
    """Facts of one compiled kernel."""

    op: str
    name: str
    arch: str
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    occupancy: float
    instructions: int
    mix: dict[str, int]

    @property
    def fault(self) -> str | None:
        if self.spill_bytes or self.mix["local"]:
            return f"spills {self.spill_bytes} bytes"
        if not (SCALAR.search(self.name) or self.mix["loads_128"] or self.mix["async_copies"]):
            return "has no 128-bit load"
        if self.op == "attention" and self.arch == "75" and "bfloat16" in self.name:
            return None  # it traps; attention.py refuses the call
        if self.op == "attention" and "<float" not in self.name and not self.mix["tensor_core"]:
            return "has no tensor-core instruction"
        return None


def tool(name: str) -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which(name, path=f"{home}/bin") or shutil.which(name)
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None:
        found = shutil.which(name, path=str(Path(spec.origin).parent / "backends" / "nvidia" / "bin"))
    if found is None:
        raise SystemExit(f"{name} was found neither in {home}/bin, on PATH nor in triton")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout + done.stderr


def short(names: list[str]) -> dict[str, str]:
    """Readable names: no namespaces, no arguments."""
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    cut = [re.sub(r"\(anonymous namespace\)::|fastbert::cuda::|^void ", "", name) for name in plain]
    cut = [re.sub(r"\(Variant\)(\d)", lambda match: VARIANTS[int(match[1])], name) for name in cut]
    return {mangled: re.sub(r"\(.*$", "", name) for mangled, name in zip(names, cut, strict=True)}


def compile_op(source: Path, arch: str) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "op.cubin"
        flags = f"-std=c++17 -O3 -arch=sm_{arch} -Xptxas -v --keep --keep-dir {folder} -cubin -o {cubin}"
        log = run(tool("nvcc"), *flags.split(), str(source))
        ptx = next(Path(folder).glob("*.ptx")).read_text()
        sass = run(tool("cuobjdump"), "-sass", str(cubin))
    threads = {n: int(t) for n, t in re.findall(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)", ptx)}
    entries = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
        r"([^\n]*)",
        log,
        re.S,
    )
    bodies = dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\s*Function :|\Z)", sass, re.S))
    names = short([entry[0] for entry in entries])
    kernels = []
    for mangled, stores, loads, registers, rest in entries:
        shared = re.search(r"(\d+) bytes smem", rest)
        shared_bytes = int(shared[1]) if shared else 0
        pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)"
        opcodes = Counter(re.findall(pattern, bodies[mangled]))
        mix = {
            kind: sum(count for opcode, count in opcodes.items() if re.match(pattern, opcode))
            for kind, pattern in MIX.items()
        }
        mix["loads"] -= mix["async_copies"]
        facts = (threads[mangled], int(registers), shared_bytes)
        kernels.append(
            Kernel(
                source.stem,
                names[mangled],
                arch,
                facts[0],
                facts[1],
                int(stores) + int(loads),
                shared_bytes,
                LIMITS[arch].occupancy(*facts),
                sum(opcodes.values()),
                mix,
            )
        )
    return kernels


def attention_as_launched(kernels: list[Kernel]) -> list[str]:
    """Rows of a table: what the emulated kernels ask of each architecture, with the registers found there."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from simt import backend, build

    from fastbert.ops import attention, cuda

    backend.join()
    names = {"attention": "forward_kernel", "attention_backward": "backward_kernel"}
    registers = {(k.name, k.arch): k.registers for k in kernels if k.op == "attention"}
    lines = []
    for arch in dict.fromkeys(k.arch for k in kernels):
        os.environ["FASTBERT_SIMT_ARCH"] = arch
        for keys in (128, 512):
            x = torch.zeros(1, keys, 1, 64, dtype=torch.float16, requires_grad=True)
            with cuda.observed_launches(build.library()) as launches:
                attention(x, x, x, dropout_p=0.1, seed=0, backend=backend.NAME).sum().backward()
            for launch in launches:
                name = f"{names[launch.kernel]}<__half, 64, dropout>"
                facts = launch.threads, registers[name, arch], launch.dynamic_shared_bytes
                occupancy = LIMITS[arch].occupancy(*facts)
                lines.append(f"| `{name}` | sm_{arch} | {keys} | {' | '.join(map(str, facts))} | {occupancy:.0%} |")
    return lines


def spread(values) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def markdown(kernels: list[Kernel], compiler: str) -> str:
    lines = ["# CUDA kernels, as compiled", "", f"{compiler}. Written by `python bench/static_cuda.py`.", ""]
    lines += [
        "| op | architecture | kernels | registers | spilled bytes | shared bytes | occupancy | 128-bit loads | "
        "tensor-core instructions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.op, kernel.arch), []).append(kernel)
    for (op, arch), group in groups.items():
        shares = spread([round(100 * k.occupancy) for k in group])
        loads, loads_128, products = (sum(k.mix[kind] for k in group) for kind in ("loads", "loads_128", "tensor_core"))
        lines.append(
            f"| {op} | sm_{arch} | {len(group)} | {spread([k.registers for k in group])} | "
            f"{sum(k.spill_bytes for k in group)} | {spread([k.shared_bytes for k in group])} | {shares} % | "
            f"{loads_128} of {loads} | {products} |"
        )
    lines += ["", f"## Each kernel on sm_{DETAIL}", ""]
    lines += [
        "`Any`: the general kernel, for unaligned pointers, odd sizes and rare mixes of types. The last two numbers "
        "are the threads that hold a row and the 16-byte chunks each of them holds (0: a loop).",
        "",
        "| op | kernel | threads | registers | shared bytes | occupancy | 128-bit loads | 128-bit stores | "
        "asynchronous copies | tensor-core instructions | instructions |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for k in kernels:
        if k.arch == DETAIL:
            lines.append(
                f"| {k.op} | `{k.name}` | {k.threads} | {k.registers} | {k.shared_bytes} | {k.occupancy:.0%} | "
                f"{k.mix['loads_128']} of {k.mix['loads']} | {k.mix['stores_128']} of {k.mix['stores']} | "
                f"{k.mix['async_copies']} | {k.mix['tensor_core']} | {k.instructions} |"
            )
    lines += ["", "## Attention as launched", ""]
    lines += [
        "float16, heads of 64 elements, dropout. Threads and shared memory of a block follow from the shape and the "
        "device, and so does the occupancy; above, attention's is that of its largest block without any.",
        "",
        "| kernel | architecture | keys | threads | registers | shared bytes | occupancy |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += attention_as_launched(kernels)
    return "\n".join(lines) + "\n"


def main() -> int:
    archs = sys.argv[1:] or list(RELEASE)
    jobs = [(source, arch) for source in sorted((ROOT / "csrc/cuda").glob("*.cu")) for arch in archs]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [kernel for found in pool.map(lambda job: compile_op(*job), jobs) for kernel in found]
    faults = [f"{k.op} {k.name} on sm_{k.arch} {k.fault}" for k in kernels if k.fault]
    print("\n".join(faults) or f"{len(kernels)} kernels: none spills, every vector kernel loads 128 bits at a time")
    if not sys.argv[1:]:
        compiler = re.search(r"release [\d.]+, V[\d.]+", run(tool("nvcc"), "--version"))[0]
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "cuda.md").write_text(markdown(kernels, f"nvcc {compiler}"))
        columns = [field.name for field in dataclasses.fields(Kernel)][:-1] + list(MIX)
        rows = ",\n".join(json.dumps([*dataclasses.astuple(k)[:-1], *k.mix.values()]) for k in kernels)
        facts = f'"compiler": {json.dumps(compiler)},\n"columns": {json.dumps(columns)},\n"kernels": [\n{rows}\n]'
        (OUT / "cuda.json").write_text(f"{{{facts}}}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
