"""bfloat16 in Triton's interpreter (3.6 to 3.9), put right for the tests: the one place that knows of fault 28.

The interpreter stores bfloat16 as 16-bit integers, and
- converts float32 to it by cutting the low bits off where every GPU rounds to nearest even, and, asked for that
  rounding, turns 1.999 into 1.0;
- converts subnormal numbers wrongly, both ways;
- multiplies the integers in ``tl.dot``;
- adds, multiplies and compares the integers in arithmetic.

``repair()`` replaces the conversions by torch's and widens the operands of ``tl.dot``: what is then tested is what a
GPU computes. Arithmetic in bfloat16 stays wrong; no kernel here does any, all widen to float32 first. It also makes
the interpreter three times as fast, by leaving out what it does in vain (:func:`_without_waste`).
"""

import functools

import numpy as np
import torch

from fastbert.ops.triton import INTERPRETED


def thinned(backend, values):
    """Every seventh of ``values``, and the last, where each program of ``backend`` runs in Python; else all."""
    return [*values[:-1:7], values[-1]] if INTERPRETED and backend == "triton" else values


def fewer(backend, count):
    """``count`` rows, but no more than 1,000 where each program of ``backend`` runs in Python.

    That launches of more than 65,535 programs are legal is then test_kernels_static.py's to show.
    """
    return min(count, 1000) if INTERPRETED and backend == "triton" else count


def repair():
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(data, source, target, rounding_mode):
        if source == tl.float32 and target == tl.bfloat16:
            floats = torch.from_numpy(np.array(data, dtype=np.float32))
            return floats.bfloat16().view(torch.int16).numpy().view(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return np.asarray(data).view(np.uint16).astype(np.uint32) << 16
        return convert(data, source, target, rounding_mode)

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    _without_waste(interpreter, tl)


def _without_waste(interpreter, tl):
    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        """``triton.language``, once for the functions of a module: not in every call, and nothing to restore."""
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
            tl.tensor.__index__ = lambda self: self.handle.data.item()  # 3.6's needs an older numpy
        return interpreter._LangPatchScope()

    scalar = functools.cache(interpreter._get_np_dtype)

    def np_dtype(dtype):
        """From a table that is made once."""
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else scalar(dtype.scalar)

    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype
    # Integer operations once more in 64 bits, for an assertion that nothing evaluates.
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
