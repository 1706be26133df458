"""Triton's interpreter with the rounding of a GPU, and quicker (triton/runtime/interpreter.py, Triton 3.6 and 3.7).

float32 to bfloat16 goes to the nearest, ties to even: its own cast cuts bits off, and its mode of rounding to nearest has
neither ties to even nor the carry into the exponent. A multiply-add rounds once: its own rounds the product too.
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


def multiply_add(x, y, z):
    """x * y + z of float32, rounded once but for rare ties: in float64 the product is exact."""
    return (x.astype(np.float64) * y + z).astype(np.float32) if z.dtype == np.float32 else x * y + z


def prepare():
    """Before any kernel runs."""
    round_to_nearest_even()
    fuse_multiply_add()
    patch_language_once()
    look_types_up_once()


def fuse_multiply_add():
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        return interpreter.TensorHandle(multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    if not callable(getattr(interpreter.InterpreterBuilder, "create_fma", None)):
        raise RuntimeError("Triton's interpreter no longer builds multiply-adds by create_fma")
    interpreter.InterpreterBuilder.create_fma = create_fma


def patch_language_once():
    """The interpreter replaces Triton's language at every launch and every call inside a kernel: a third of its time."""
    from triton.runtime import interpreter

    original, done = interpreter._patch_lang, set()

    def patch(fn):
        if fn.__module__ not in done:
            original(fn)  # whose scope is not kept: nothing is put back
            done.add(fn.__module__)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def look_types_up_once():
    """The interpreter makes a table of numpy's types whenever it looks for one: a tenth of its time."""
    from triton.runtime import interpreter

    original, found = interpreter._get_np_dtype, {}

    def np_dtype(type):
        scalar = type.scalar
        if scalar.name not in found:
            found[scalar.name] = original(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = np_dtype


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
