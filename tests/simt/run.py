"""The shared suites on the emulated CUDA kernels, sanitizers on, once for each scheduling seed, side by side.

python tests/simt/run.py [NAME...]      # of tests/test_NAME.py; default: every op in CUDA, and models
"""

import subprocess
import sys
import time

import build

SEEDS = (1, 2)
MORE = ("cuda_library", "adapters", "bert")


def suite(seed: int, names: list[str]) -> subprocess.Popen:
    tests = build.ROOT / "tests"
    files = [str(tests / f"test_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-c", str(build.ROOT / "pyproject.toml"), *files]
    command += ["-k", "cuda-simt", "--durations=5"]
    environment = build.environment(seed) | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, cwd=tests, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def main() -> int:
    if reason := build.unavailable():
        sys.exit(f"the CUDA kernels cannot be emulated here: {reason}")
    started = time.monotonic()
    sources = sorted((build.ROOT / "csrc/cuda").glob("*.cu"))
    build.build(sources, sanitize=True)  # once, for both
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    names = sys.argv[1:] or [*(source.stem for source in sources), *MORE]
    runs = {seed: suite(seed, names) for seed in SEEDS}
    failed = False
    for seed, run in runs.items():
        output, _ = run.communicate()
        failed |= run.returncode != 0 or " passed" not in output
        print(f"\nseed {seed}, after {time.monotonic() - started:.0f} s:\n{output[-6000:]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
