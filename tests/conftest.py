"""Fixtures of every test: uninitialised memory is NaN, the generator is seeded, one backend at a time."""

import importlib
import os
from pathlib import Path

import interpreter
import pytest
import torch
from compare import WITH_FLOAT64

from fastbert.ops.triton import INTERPRETED

ON_GPU = ("cuda",) if INTERPRETED else ("triton", "cuda")

if INTERPRETED:
    interpreter.repair()
if os.environ.get("FASTBERT_SIMT") == "1":
    from simt import backend as simt_backend

    simt_backend.join()


def usable_backends(op):
    """The backends of ``op`` that can run on this machine, the reference among them."""
    table = importlib.import_module(f"fastbert.ops.{op}").BACKENDS
    return [backend.name for backend in table if backend.unavailable() is None]


def pytest_generate_tests(metafunc):
    """A test that takes ``backend`` runs on each usable one of the op its file is named after; others on all."""
    if "backend" in metafunc.fixturenames:
        op = metafunc.module.__name__.rpartition(".")[2].removeprefix("test_")
        try:
            names = usable_backends(op)
        except ModuleNotFoundError:
            names = usable_backends("attention")
        metafunc.parametrize("backend", names)


def pytest_configure(config):
    config.addinivalue_line("markers", "float64: the test is of float64 alone, which not every backend has")


def pytest_collection_modifyitems(config, items):
    """float64 is asked only of the backends that have it."""

    def applies(item):
        given = item.callspec.params if hasattr(item, "callspec") else {}
        wide = torch.float64 in given.values() or item.get_closest_marker("float64")
        return not wide or given.get("backend", "eager") in WITH_FLOAT64

    kept = [item for item in items if applies(item)]
    config.hook.pytest_deselected(items=[item for item in items if not applies(item)])
    items[:] = kept


@pytest.fixture(autouse=True)
def device_of_the_backend(request):
    """Tensors are made where the test's backend runs."""
    name = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    torch.set_default_device("cuda" if name in ON_GPU else None)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty, also from C++, comes filled with NaN: an element that a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seeded(device_of_the_backend):
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden():
    """golden(name): the tensors of tests/golden/<name>.safetensors and its metadata."""
    from safetensors import safe_open

    def load(name):
        path = Path(__file__).parent / "golden" / f"{name}.safetensors"
        with safe_open(path, "pt", device=str(torch.get_default_device())) as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118

    return load


@pytest.fixture(scope="session")
def data():
    """The folder of real text (``FASTBERT_TEST_DATA``, or shared/data beside the checkout); skips without it."""
    folder = Path(os.environ.get("FASTBERT_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}")
    return folder
