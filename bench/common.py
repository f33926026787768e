"""What every benchmark shares: rows, interleaved timing, and what is reported of them.

A benchmark file gives a group (op, shape, dtype), the rows of it (name -> function of no argument that returns the
op's results) and the bytes or operations that the op cannot do without. Each row is first checked against the exact
result, then timed by pytest-benchmark, and once more in turns with the baseline: on a shared machine only such a ratio
means anything.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping

import torch

from fastbert.ops.registry import Backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16)
BASELINE = "eager"  # plain PyTorch, as one writes it
TURNS = 11


def backends(table: tuple[Backend, ...], *args) -> list[str]:
    """The kernel backends that serve these arguments on this machine."""
    return [backend.name for backend in table if backend.name != "eager" and backend.why_not(*args) is None]


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(function: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def in_turns(functions: Mapping[str, Callable[[], object]], turns: int = TURNS) -> dict[str, list[float]]:
    """Seconds of each function, called one after the other, ``turns`` times round."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return times


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second that a large copy moves here, read and written: the limit of a memory-bound op."""
    source = torch.randn(1 << 24, device=DEVICE)
    target = torch.empty_like(source)
    times = in_turns({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * source.numel() * 4 / statistics.median(times)


@functools.cache
def product_rate(dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product here: the limit of attention and of the model."""
    n = 2048 if DEVICE.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=dtype)
    times = in_turns({"mm": lambda: a @ b}, turns=5)["mm"]
    return 2 * n**3 / statistics.median(times)


@functools.cache
def commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measure(
    benchmark,
    group: str,
    row: str,
    rows: Mapping[str, Callable[[], object]],
    *,
    bytes_moved: int | None = None,
    operations: int | None = None,
    dtype: torch.dtype = torch.float32,
    baseline: str = BASELINE,
) -> None:
    """Time ``rows[row]`` and report its rate, its share of the machine's limit and its speed over the baseline's."""
    benchmark.group = group
    function = rows[row]
    function()

    def timed():
        function()
        synchronize()

    benchmark.pedantic(timed, rounds=TURNS, warmup_rounds=1)
    times = in_turns({name: rows[name] for name in dict.fromkeys((row, baseline))})
    medians = {name: statistics.median(values) for name, values in times.items()}
    quartiles = statistics.quantiles(times[row], n=4)
    info = benchmark.extra_info
    info["median_ms"] = round(medians[row] * 1e3, 3)
    info["spread_ms"] = round((quartiles[2] - quartiles[0]) * 1e3, 3)
    info[f"times_{baseline}"] = round(medians[baseline] / medians[row], 2)
    if bytes_moved is not None:
        rate = bytes_moved / medians[row]
        info["GB/s"] = round(rate / 1e9, 1)
        info["share_of_copy"] = round(rate / copy_bandwidth(), 2)
    if operations is not None:
        rate = operations / medians[row]
        info["GFLOP/s"] = round(rate / 1e9, 1)
        info["share_of_product"] = round(rate / product_rate(dtype), 2)
    info["commit"] = commit()
    info["device"] = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def with_backward(forward: Callable[[], torch.Tensor], wanted: list[torch.Tensor], grad: torch.Tensor):
    """A row that runs forward and backward and returns the output and the gradients."""

    def both():
        output = forward()
        return output, *torch.autograd.grad(output, wanted, grad)

    return both


def assert_agree(results: Mapping[str, tuple[torch.Tensor, ...]], tolerance: float) -> None:
    """Every row's tensors are the baseline's within ``tolerance`` of the largest value (nothing is dropped here)."""
    expected = results[BASELINE]
    for name, found in results.items():
        for a, b in zip(found, expected, strict=True):
            error = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-9)
            assert error <= tolerance, f"{name} differs from {BASELINE} by {error:.2e}"


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
