"""Dropout bits in Triton: the arithmetic of ``fastbert/ops/dropout.py``, for use inside other kernels.

One 32-bit hash serves two neighbouring columns. ``keep_tile`` computes it once per pair and interleaves the halves,
which costs nothing where a thread holds both columns, as it does in the vectors of a load. ``keep`` takes any columns,
each computing "its" hash, and leaves it to the compiler to see that two neighbours compute the same; it mostly does.
The last step of the hash, x ^ (x >> 16), leaves the upper half as it is and is not computed for it; both halves are
compared in place, in the upper bits. That makes 11 integer operations for two elements: 5.5 each.

Where an element is written in 16 bits, select its factor (``x * tl.where(keep, scale, 0.0)``), not the result: the
compiler moves a select of the result behind the conversion, and unpacks pairs for it.
"""

import triton
import triton.language as tl

# Integer operations of `keep` for two neighbouring columns, the comparisons among them.
OPERATIONS_PER_PAIR = 11


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def seed_key(seed_ptr):
    """The part of a row's key that all rows share; ``seed_ptr``: one int64."""
    seed = tl.load(seed_ptr)
    return _mix(_mix(seed.to(tl.uint32) + 0x9E3779B9) + (seed >> 32).to(tl.uint32))


@triton.jit
def row_keys(seed_key, row_hi, row_lo):
    """(k0, k1) of each row, uint32; ``row_hi``, ``row_lo``: integers whose low 32 bits count."""
    k0 = _mix(_mix(seed_key + row_hi.to(tl.uint32)) + row_lo.to(tl.uint32))
    return k0, _mix(k0 ^ 0xA511E9B3)


@triton.jit
def _hash(k0, k1, pair):
    """The hash of columns 2 * pair and 2 * pair + 1, but for its last step."""
    x = k0 + pair.to(tl.uint32) * 0x9E3779B9
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= (x >> 15) ^ k1
    return x * 0x846CA68B


@triton.jit
def keep(k0, k1, column, threshold):
    """Which elements stay. ``k0``, ``k1``, ``column``: broadcast together; ``threshold``: int32, 1..65536."""
    x = _hash(k0, k1, column >> 1)
    x = tl.where((column & 1) == 1, x, x ^ (x << 16))
    # bits >= threshold, on bits << 16 and whatever is below them; 65536 wraps to "greater than the largest".
    return x > (threshold.to(tl.uint32) << 16) - 1


@triton.jit
def keep_tile(k0, k1, start, COLUMNS: tl.constexpr, threshold):
    """:func:`keep` of rows ``[ROWS, 1]`` in COLUMNS columns from ``start``, an even number, on: one hash per pair."""
    pair = (start >> 1) + tl.arange(0, COLUMNS // 2)[None, :]
    x = _hash(k0, k1, pair)
    return tl.join(x ^ (x << 16), x).reshape(k0.shape[0], COLUMNS) > (threshold.to(tl.uint32) << 16) - 1


@triton.jit
def bits(k0, k1, column):
    """The 16 random bits of each element, uint32: ``fastbert.ops.dropout_bits``."""
    x = _hash(k0, k1, column >> 1)
    return tl.where((column & 1) == 1, x, x ^ (x << 16)) >> 16


def threshold_and_scale(dropout_p: float) -> tuple[int, float]:
    """The threshold of :func:`keep` (0: nothing is dropped), and what kept values are multiplied by."""
    threshold = round(dropout_p * 65536)
    return threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0
