# Everything a newcomer needs: `make pretrain` and `make test` make a virtual environment, install what is needed,
# build the kernels and run. Both can be run again at no cost.

PYTHON ?= python3
VENV ?= .venv
# On PyPI's own index this is the CUDA build; any torch from 2.10 on will do.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
NATIVE := $(wildcard csrc/*/*.cpp csrc/*/*.h) setup.py

.PHONY: all pretrain test bench lint format clean

all: $(VENV)/built

# torch first and by name, so that nothing else chooses its version; then the rest.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)" numpy
	$(BIN)/pip install -q "setuptools>=77" wheel pybind11 ninja
	$(BIN)/pip install -q pytest pytest-benchmark ruff clang-format transformers
	touch $@

# The package is installed in place; a changed kernel is rebuilt, and nothing but what changed.
$(VENV)/built: $(VENV)/installed $(NATIVE)
	$(BIN)/pip install -q --no-build-isolation -e .
	touch $@

# The main job: a small BERT pretrained on English text that comes with Python, offline.
pretrain: $(VENV)/built
	$(BIN)/fastbert pretrain --corpus builtin --preset notebook --steps 100 --out runs/pretrain

test: $(VENV)/built
	$(BIN)/pytest

bench: $(VENV)/built
	$(BIN)/fastbert bench

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

clean:
	rm -rf build $(VENV) fastbert/*.so fastbert/_build.json
