"""Triton's interpreter with the rounding of a GPU: float32 to bfloat16 goes to the nearest, ties to even.

Its own cast cuts bits off, and its mode of rounding to nearest has neither ties to even nor the carry into the exponent
(`_convert_float` of triton/runtime/interpreter.py, Triton 3.6 and 3.7).
"""

import inspect

import numpy as np


def bfloat16_bits(x):
    """A float32 array as bfloat16's bits, uint16, rounded to nearest even; NaN stays a quiet NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = bits + (0x7FFF + ((bits >> 16) & 1))
    upper = np.where(np.isnan(x), bits | 0x400000, nearest) >> 16
    return upper.astype(np.uint16).reshape(np.shape(x))


def float32_bits(bits):
    """The other way, which is exact: bfloat16 is the upper half of float32."""
    return bits.astype(np.uint32) << 16


def round_to_nearest_even():
    """Replaces the interpreter's cast between float32 and bfloat16. An error where its internals are others."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if list(inspect.signature(original).parameters) != ["input", "input_dtype", "output_dtype", "rounding_mode"]:
        raise RuntimeError(f"Triton's interpreter casts otherwise than expected: _convert_float{inspect.signature(original)}")

    def convert(input, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) == (tl.bfloat16, tl.float32):
            return float32_bits(input)
        nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if nearest and (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            return bfloat16_bits(input)
        return original(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert
    one_and_three_quarter_ulps = interpreter.TensorHandle(np.array([1 + 1.75 / 128], np.float32), tl.float32)
    cast = interpreter.interpreter_builder.create_fp_trunc(one_and_three_quarter_ulps, tl.bfloat16)
    if cast.data.tolist() != [0x3F82]:
        raise RuntimeError("Triton's interpreter no longer casts by _convert_float: its rounding is not the tests'")
