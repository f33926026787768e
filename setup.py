"""Builds the native parts with ninja; everything else about the package is in pyproject.toml.

The CPU library is plain C++ against torch's stable ABI, so that one file serves every torch from 2.10 on. It is
not a Python module: torch loads it. `fastbert._build` is a small pybind11 module with the facts of the build.
Without a C++ compiler the package installs without them and says so (`python -m fastbert.info`). Where nvcc is found,
beside whatever torch, the CUDA library is built as well; torch loads it only if it has CUDA itself.

  CXX                  the compiler (default: c++, g++ or clang++, whichever is found first)
  MAX_JOBS             compile jobs at once (default: as many as cores and memory allow)
  FASTBERT_SANITIZE=1  build with AddressSanitizer and UndefinedBehaviorSanitizer
  CUDA_HOME            the CUDA toolkit (default: /usr/local/cuda, or where nvcc on PATH is)
  FASTBERT_CUDA_ARCHS  what to build CUDA kernels for: "80 90" (the default), "90+PTX", ..., "release" for all that a
                       wheel holds, "none" for no CUDA library
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CPU_OPS = sorted(path.stem for path in (ROOT / "csrc/cpu").glob("*.cpp"))
CUDA_OPS = sorted(path.stem for path in (ROOT / "csrc/cuda").glob("*.cu"))
CUDA_ARCHS = {"none": "", "default": "80 90", "release": "75 80 86 89 90 100 120+PTX"}

_AVX2 = "-mavx2 -mfma -mf16c"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
INSTRUCTION_SETS = {"baseline": ""}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": f"{_AVX512} -mavx512bf16"}

# 2.10: the oldest torch whose stable ABI has parallel_for.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000 -DTORCH_STABLE_ONLY"
WARNINGS = "-Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-unused-parameter -Wno-unused-function"


def compile_jobs(cores: int, memory_bytes: int) -> int:
    """Jobs at once: a core and 1.5 GiB each, so that a build never exhausts the machine."""
    return max(1, min(cores, memory_bytes // (3 << 29)))


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def find_compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def find_cuda() -> Path | None:
    """The CUDA toolkit, a directory with bin/nvcc and include/."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and Path(nvcc).resolve().parents[1]]
    found = (Path(home) for home in homes if home)
    return next((home for home in found if (home / "bin/nvcc").exists() and (home / "include").is_dir()), None)


def cuda_architectures() -> list[str]:
    """As FASTBERT_CUDA_ARCHS names them: "80", or "80+PTX" where later devices are to be served too."""
    value = os.environ.get("FASTBERT_CUDA_ARCHS") or "default"
    names = CUDA_ARCHS.get(value, value).replace(",", " ").replace(";", " ").replace(".", "").split()
    if not all(name.removesuffix("+PTX").isdigit() for name in names):
        accepted = f"{', '.join(CUDA_ARCHS)} and architectures such as '80 90+PTX'"
        raise ValueError(f"FASTBERT_CUDA_ARCHS is {value!r}; accepted are {accepted}")
    return names


def gencode(architectures: list[str]) -> str:
    codes = [(a.removesuffix("+PTX"), "sm") for a in architectures]
    codes += [(a.removesuffix("+PTX"), "compute") for a in architectures if a.endswith("+PTX")]
    return " ".join(f"-gencode arch=compute_{a},code={kind}_{a}" for a, kind in codes)


def ninja_file(compiler: str, python_module: Path, cpu_library: Path, cuda_library: Path, cuda: Path | None) -> str:
    """The build as ninja rules: every kernel file once per instruction set, every adapter once."""
    import pybind11
    import torch

    torch_root = Path(torch.__file__).resolve().parent
    sanitize = ""
    if os.environ.get("FASTBERT_SANITIZE") == "1":
        sanitize = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    common = f"-std=c++17 -fPIC -fvisibility=hidden {WARNINGS} {sanitize}"
    lines = [
        f"cxx = {compiler}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx -shared $in $flags -o $out",
        f"nvcc = {cuda}/bin/nvcc -ccbin $cxx",
        "rule compile_cuda",
        "  command = $nvcc -MD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link_cuda",
        "  command = $nvcc -shared -cudart static $in $flags -o $out",
        # An empty library, so that the real one is listed as needed also where torch has none.
        "rule stub",
        "  command = echo | $cxx -shared -x c++ - -Wl,-soname,$out -o $out",
    ]

    def compile_object(source: str, name: str, flags: str) -> str:
        lines.extend([f"build {name}.o: compile {ROOT / source}", f"  flags = {common} {flags}"])
        return f"{name}.o"

    objects = []
    torch_flags = f"-O2 {STABLE_ABI} -isystem {torch_root / 'include'}"
    for op in CPU_OPS:
        for isa, flags in INSTRUCTION_SETS.items():
            optimize = "-O1" if sanitize else "-O3"
            kernel_flags = f"{optimize} -ffp-contract=fast -fno-math-errno -fno-trapping-math {flags}"
            objects.append(compile_object(f"csrc/cpu/{op}.cpp", f"{op}.{isa}", f"{kernel_flags} -DFASTBERT_ISA={isa}"))
        objects.append(compile_object(f"csrc/cpu/{op}.cpp", f"{op}.adapter", torch_flags))
    link_torch = f"-L{torch_root / 'lib'} -Wl,--no-as-needed -ltorch_cpu -lc10 {sanitize}"
    lines.extend([f"build {cpu_library}: link {' '.join(objects)}", f"  flags = {link_torch}"])

    if cuda:
        objects = []
        lines.append("build libtorch_cuda.so: stub")
        adapter_flags = f"{torch_flags} -DUSE_CUDA -isystem {cuda}/include -x c++"
        kernel_flags = f"-std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden {gencode(cuda_architectures())}"
        for op in CUDA_OPS:
            objects.append(compile_object(f"csrc/cuda/{op}.cu", f"{op}.cuda_adapter", adapter_flags))
            objects.append(f"{op}.cuda.o")
            lines.extend([f"build {objects[-1]}: compile_cuda {ROOT}/csrc/cuda/{op}.cu", f"  flags = {kernel_flags}"])
        lines.append(f"build {cuda_library}: link_cuda {' '.join(objects)} | libtorch_cuda.so")
        link = f"-L{torch_root / 'lib'} -ltorch_cpu -lc10"
        lines.append(f"  flags = -Xlinker --no-as-needed,libtorch_cuda.so,--exclude-libs,ALL {link}")

    facts = f'-DFASTBERT_COMPILER=\\"{Path(compiler).name}\\" -DFASTBERT_SANITIZED={int(bool(sanitize))}'
    includes = f"-isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}"
    module = compile_object("csrc/bindings/build.cpp", "build", f"-O2 {facts} {includes}")
    lines.extend([f"build {python_module}: link {module}", f"  flags = {sanitize}"])
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Runs ninja in place of distutils' compiler."""

    def run(self):
        target = ROOT if self.inplace else Path(self.build_lib).resolve()
        package = target / "fastbert"
        package.mkdir(parents=True, exist_ok=True)
        compiler, cuda, architectures = find_compiler(), find_cuda(), cuda_architectures()
        reasons = {"cpu": None, "cuda": None}
        if compiler is None:
            reasons = dict.fromkeys(reasons, "no C++ compiler was found when the package was built")
            print(f"fastbert: {reasons['cpu']}; installing without the C++ kernels", file=sys.stderr)
        else:
            if cuda is None:
                reasons["cuda"] = "no nvcc was found when the package was built"
            elif not architectures:
                reasons["cuda"] = "the package was built with FASTBERT_CUDA_ARCHS=none"
            self.build_native(compiler, package, None if reasons["cuda"] else cuda)
        built = [] if reasons["cuda"] else architectures
        (package / "_build.json").write_text(json.dumps(reasons | {"cuda_architectures": built}))

    def build_native(self, compiler: str, package: Path, cuda: Path | None):
        work = Path(self.build_temp).resolve() / "native"
        work.mkdir(parents=True, exist_ok=True)
        module = package / f"_build{sysconfig.get_config_var('EXT_SUFFIX')}"
        if cuda is None:
            (package / "_cuda.so").unlink(missing_ok=True)
        rules = ninja_file(compiler, module, package / "_cpu.so", package / "_cuda.so", cuda)
        build_file = work / "build.ninja"
        if not build_file.exists() or build_file.read_text() != rules:
            build_file.write_text(rules)
        jobs = os.environ.get("MAX_JOBS") or str(compile_jobs(os.cpu_count() or 1, memory_bytes()))
        subprocess.run([sys.executable, "-m", "ninja", "-C", str(work), "-j", jobs], check=True)

    def get_outputs(self):
        return []


setup(
    packages=[
        "fastbert",
        "fastbert.ops",
        "fastbert.adapters",
        "fastbert.data",
        "fastbert.training",
        "fastbert.kernels",
    ],
    # Never a top-level package `kernels`: it would shadow Hugging Face's.
    package_dir={"fastbert.kernels": "kernels"},
    package_data={"fastbert": ["*.so", "_build.json", "py.typed"]},
    ext_modules=[Extension("fastbert._build", sources=[])],
    cmdclass={"build_ext": NinjaBuild},
)
