"""Builds CUDA files for the CPU, over simt.h: the shipped ones as one library that torch loads, or a test's own.

Objects are kept in build/simt under the hash of what they were made from, so a second run compiles nothing.
"""

import concurrent.futures
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CACHE = ROOT / "build" / "simt"
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))

FLAGS = f"-std=c++17 -O1 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -DFASTBERT_SIMT -DUSE_CUDA -I{ROOT / 'csrc'}"
WARNINGS = "-Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter -Wno-unused-function"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"


def unavailable() -> str | None:
    """Why the emulation cannot be built here, or None."""
    if not (CUDA / "include" / "cuda_runtime.h").exists():
        return f"no CUDA headers in {CUDA / 'include'} (CUDA_HOME)"
    return None


def sanitizers() -> list[str]:
    """The libraries that a process must preload to load a library built with the sanitizers."""
    names = ("libasan.so", "libstdc++.so.6")
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    return [str(Path(path).resolve()) for path in found]


def environment(seed: int = 1) -> dict[str, str]:
    """Of a Python process that runs the emulated kernels under the sanitizers."""
    options = "detect_leaks=0:detect_stack_use_after_return=0:alloc_dealloc_mismatch=0"
    return os.environ | {
        "FASTBERT_SIMT": "1",
        "FASTBERT_SIMT_SEED": str(seed),
        "LD_PRELOAD": " ".join(sanitizers()),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def sanitized() -> bool:
    """Whether this process has AddressSanitizer loaded."""
    return "libasan" in os.environ.get("LD_PRELOAD", "")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(source: Path, flags: str) -> Path:
    command = f"g++ -x c++ {flags} -include {HERE / 'simt.h'} -isystem {CUDA / 'include'} {source}".split()
    text = subprocess.run([*command, "-E"], check=True, capture_output=True).stdout
    compiled = CACHE / f"{source.stem}-{_digest(text, flags.encode())}.o"
    if not compiled.exists():
        # Another process may be making the same: each under its own name.
        partial = compiled.with_suffix(f".{os.getpid()}.o")
        subprocess.run([*command, "-c", "-o", partial], check=True)
        partial.rename(compiled)
    return compiled


def build(sources: list[Path], sanitize: bool, executable: bool = False) -> Path:
    """The shared library (or program) of ``sources`` and the scheduler; returns its path."""
    flags = f"{FLAGS} {WARNINGS} {SANITIZE if sanitize else ''}"
    link = SANITIZE if sanitize else ""
    if not executable:
        import torch

        root = Path(torch.__file__).resolve().parent
        flags += f" -DTORCH_TARGET_VERSION=0x020a000000000000 -DTORCH_STABLE_ONLY -isystem {root / 'include'}"
        link += f" -shared -L{root / 'lib'} -Wl,--no-as-needed -ltorch_cpu -lc10"
    CACHE.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, flags), [*sources, HERE / "simt.cpp"]))
    digest = _digest(*(compiled.name.encode() for compiled in objects), link.encode())
    target = CACHE / f"{sources[0].stem}-{digest}{'' if executable else '.so'}"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *map(str, objects), *link.split(), "-o", str(partial)], check=True)
        partial.rename(target)
    return target


def library() -> Path:
    """The shipped kernels, emulated; with the sanitizers where this process has them loaded."""
    return build(sorted((ROOT / "csrc/cuda").glob("*.cu")), sanitized())


if __name__ == "__main__":
    print(build([Path(name) for name in sys.argv[1:]], sanitize=True, executable=True))
