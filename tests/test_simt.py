"""The emulation of CUDA kernels (simt/simt.h) finds what a GPU would punish: each fault planted, and seen caught."""

import os
import subprocess
from pathlib import Path

import pytest
from simt import build

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
SEEDS = (1, 2)

RIGHT = (
    "barrier",
    "warp barrier",
    "static shared",
    "dynamic shared",
    "global",
    "vector load",
    "initialised",
    "convergent",
    "shuffle",
    "copy",
    "product",
    "largest launch",
)
# What is printed where the fault is caught.
FAULTS = {
    "barrier missing": "wrong",
    "barrier missing before reuse": "wrong",
    "warp barrier missing": "wrong",
    "static shared out of bounds": "heap-buffer-overflow",
    "dynamic shared out of bounds": "heap-buffer-overflow",
    "global out of bounds": "heap-buffer-overflow",
    "vector load misaligned": "misaligned address",
    "uninitialised": "wrong",
    "barrier after an exit": "100 (thread 0, ...) wait at __syncthreads",
    "two barriers at once": "64 (thread 64, ...) wait at __syncthreads",
    "shuffle with an exited lane": "4 (thread 5, ...) have exited; 124 (thread 0, ...) wait at __shfl_sync",
    "shuffle from outside the mask": "shuffles from lane 20, which takes no part",
    "copy without wait": "wrong",
    "copy without barrier": "wrong",
    "copy misaligned": "cp_async of 16 bytes between addresses that are not aligned to them",
    "product without transposing": "wrong",
    "product with registers swapped": "wrong",
    "ldmatrix misaligned": "row is not 16 aligned bytes of shared memory",
    "grid y": "grid (1, 65536, 1); a device takes",
    "grid z": "grid (1, 1, 65536); a device takes",
    "no block": "an empty grid or block",
    "threads": "block (1056, 1, 1); a device takes 1024 threads",
    "shared memory": "166913 bytes of shared memory; sm_80 has 166912 for a block",
}


@pytest.fixture(scope="module")
def run():
    """run(case, seed): what simt/faults.cu prints for a case, in all."""
    program = build.build([HERE / "simt" / "faults.cu"], sanitize=True, executable=True)

    def run(case, seed):
        environment = os.environ | {"FASTBERT_SIMT_SEED": str(seed), "ASAN_OPTIONS": "detect_leaks=0"}
        environment.pop("FASTBERT_SIMT_ARCH", None)
        done = subprocess.run([program, case], env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", RIGHT)
def test_right_kernels_come_out_right(run, case, seed):
    assert run(case, seed) == "right\n"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", FAULTS)
def test_fault_is_caught(run, case, seed):
    assert FAULTS[case] in run(case, seed)
