"""What is shipped: metadata, source distribution, symbols of the libraries. `make test-wheel` installs a wheel."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fastbert

ROOT = Path(fastbert.__file__).resolve().parents[1]
LIBRARIES = sorted((ROOT / "fastbert").glob("*.so"))

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a source checkout")


@pytest.fixture
def checkout(tmp_path):
    """The sources without anything built."""
    ignored = shutil.ignore_patterns("*.so", "_build.json", "*.egg-info", "__pycache__", "results")
    for name in ("csrc", "fastbert", "kernels", "tests", "bench"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "Makefile", ".clang-format"):
        shutil.copy(ROOT / name, tmp_path / "source")
    return tmp_path / "source"


def build(checkout, call, hidden=(), **environment):
    """``call`` of setuptools' build backend where ``hidden`` modules cannot be imported."""
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}: raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hidden())
from setuptools import build_meta
print(build_meta.{call})
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=checkout, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


NO_COMPILERS = {"PATH": "", "CXX": "there-is-no-such-compiler", "CUDA_HOME": "/nonexistent"}


def test_metadata_needs_neither_torch_nor_a_compiler(checkout, tmp_path):
    """Fault 1."""
    name = build(
        checkout, f"prepare_metadata_for_build_wheel({str(tmp_path)!r})", ("torch", "pybind11"), **NO_COMPILERS
    )
    metadata = (tmp_path / name / "METADATA").read_text()
    assert "Name: fastbert-kernels\n" in metadata and "Requires-Dist: torch>=2.10\n" in metadata


def test_a_wheel_without_a_compiler_is_python_and_says_so(checkout, tmp_path):
    """Faults 1 and 5."""
    name = build(checkout, f"build_wheel({str(tmp_path)!r})", ("torch", "pybind11"), **NO_COMPILERS)
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = wheel.namelist()
        assert b"no C++ compiler was found when the package was built" in wheel.read("fastbert/_build.json")
    assert not [n for n in names if n.endswith(".so")]
    assert {"fastbert/ops/gelu.py", "fastbert/kernels/gelu.py", "fastbert/training/graphs.py"} <= set(names)
    assert {n.partition("/")[0] for n in names} == {
        "fastbert",
        name.rpartition("-cp")[0].rpartition("-cp")[0] + ".dist-info",
    }


def test_the_source_distribution_holds_all_that_is_built(checkout, tmp_path):
    name = build(checkout, f"build_sdist({str(tmp_path)!r})", ("torch", "pybind11"), **NO_COMPILERS)
    with tarfile.open(tmp_path / name) as archive:
        shipped = {n.partition("/")[2] for n in archive.getnames()}
    for folder in ("csrc", "kernels", "fastbert", "tests"):
        sources = {str(p.relative_to(checkout)) for p in (checkout / folder).rglob("*") if p.is_file()}
        assert sources and sources <= shipped, sources - shipped


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module."""
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    spec = importlib.util.spec_from_file_location("fastbert_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_jobs_respect_memory(setup):
    """Fault 3."""
    gib = 1 << 30
    assert setup.compile_jobs(2, 24 * gib) == 2
    assert setup.compile_jobs(64, 16 * gib) == 10
    assert setup.compile_jobs(64, gib) == 1
    assert setup.compile_jobs(1, 1024 * gib) == 1


def test_architectures_by_name(setup, monkeypatch):
    for value, expected in {
        "": ["80", "90"],
        "none": [],
        "90": ["90"],
        "80;90+PTX": ["80", "90+PTX"],
        "8.0 9.0": ["80", "90"],
    }.items():
        monkeypatch.setenv("FASTBERT_CUDA_ARCHS", value)
        assert setup.cuda_architectures() == expected
    monkeypatch.setenv("FASTBERT_CUDA_ARCHS", "release")
    assert setup.gencode(setup.cuda_architectures()).endswith(
        "-gencode arch=compute_120,code=sm_120 -gencode arch=compute_120,code=compute_120"
    )
    monkeypatch.setenv("FASTBERT_CUDA_ARCHS", "hopper")
    with pytest.raises(ValueError, match="FASTBERT_CUDA_ARCHS is 'hopper'"):
        setup.cuda_architectures()


@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("nm"), reason="reads ELF files with nm")
@pytest.mark.skipif(not LIBRARIES, reason="the package was built without a compiler")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])
def test_symbols(library):
    """Fault 2, and what lets one file serve every torch: no symbol of its C++ interface."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    ).stdout
    symbols = [line.split()[-1] for line in listed.splitlines()]
    assert symbols
    of_torch = [s for s in symbols if re.match(r"_Z\w*?(2at|3c10|5torch)", s)]
    assert not of_torch, of_torch
    wanted = {}
    for family, version in re.findall(r"@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", listed):
        number = tuple(map(int, version.split(".")))
        wanted[family] = max(wanted.get(family, ()), number)
    # manylinux_2_34 is what this build may call itself
    limits = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
    assert all(number <= limits[family] for family, number in wanted.items()), wanted
