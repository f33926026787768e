"""Fixtures of every test: uninitialised memory is NaN, the generator is seeded, one backend at a time."""

import importlib
import os
from pathlib import Path

import pytest
import torch


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


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty, also from C++, comes filled with NaN: an element that a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden():
    """golden(name): the tensors of tests/golden/<name>.safetensors and its metadata."""
    from safetensors import safe_open

    def load(name):
        with safe_open(Path(__file__).parent / "golden" / f"{name}.safetensors", "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118

    return load


@pytest.fixture(scope="session")
def data():
    """The folder of real text (``FASTBERT_TEST_DATA``, or shared/data beside the checkout); skips without it."""
    folder = Path(os.environ.get("FASTBERT_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}")
    return folder
