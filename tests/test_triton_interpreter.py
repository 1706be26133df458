"""What the tests of the Triton backend rest on where there is no GPU: casts to bfloat16 as a GPU's, to nearest even."""

import numpy as np
import pytest
import torch

import ckpt_ops
from helpers_backends import DEVICES, READY
from helpers_numerics import SEED
from helpers_ops import DROPOUT, DROPOUT_ADD, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, make, run
from helpers_triton_interpreter import bfloat16_bits, float32_bits, multiply_add, round_to_nearest_even

interpreted = pytest.mark.skipif(
    "triton" not in READY or DEVICES["triton"] != "cpu", reason="the Triton backend is not under test in its interpreter"
)
ULP = 2.0**-7  # of bfloat16 at 1
CASES = {
    "tie to even, down": (1 + ULP / 2, 1),
    "tie to even, up": (1 + 1.5 * ULP, 1 + 2 * ULP),
    "below a tie": (1 + ULP / 2 - 2**-23, 1),
    "above a tie": (1 + ULP / 2 + 2**-23, 1 + ULP),
    "carry into the exponent": (2 - ULP / 4, 2),
    "past the largest": (3.4e38, torch.inf),
    "the largest": (3.3895313892515355e38, 3.3895313892515355e38),
    "subnormal": (2.0**-133 * 1.5, 2.0**-132),
    "to zero": (2.0**-135, 0),
    "infinity": (torch.inf, torch.inf),
}


@pytest.mark.parametrize("name", CASES)
def test_bits(name):
    value, expected = (np.array([[v], [-v]], np.float32) for v in CASES[name])
    bits = bfloat16_bits(value)
    assert bits.shape == (2, 1) and np.array_equal(float32_bits(bits).view(np.float32), expected)
    assert torch.equal(torch.from_numpy(value).bfloat16().float(), torch.from_numpy(expected))


def test_nan_stays_nan():
    """Of any payload: cut off, the smallest would be an infinity; rounded, the largest would be zero."""
    payloads = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(float32_bits(bfloat16_bits(payloads)).view(np.float32)).all()


def test_random_bits_are_rounded_as_torch_does():
    floats = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32).view(torch.float32)
    floats = floats[~floats.isnan()]
    ours = torch.from_numpy(bfloat16_bits(floats.numpy()).view(np.int16))
    assert torch.equal(ours, floats.bfloat16().view(torch.int16))


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning")
def test_kernels_use_it():
    """A sum of two, in float32, stored in bfloat16: ties, carry, overflow, infinity, NaN."""
    largest = torch.finfo(torch.bfloat16).max
    x = [ULP / 2, ULP / 2, 0.75 * ULP, largest, torch.inf, torch.inf]
    residual = [1, 1 + ULP, 2 - ULP, largest, 1, -torch.inf]
    with ckpt_ops.use_backend("triton"):
        y = ckpt_ops.dropout_add(torch.tensor(x).bfloat16(), torch.tensor(residual).bfloat16(), 0.0)
    assert y[:5].tolist() == [1, 1 + 2 * ULP, 2, torch.inf, torch.inf] and y[5].isnan()


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [DROPOUT, DROPOUT_ADD, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM], ids=str)
def test_16_bit_results_are_those_of_the_cpu(op, dtype):
    """Where an output takes one rounding of what float32 holds the same everywhere: y = m * x, r = residual + m * x."""
    t = make(op, (15, 100), dtype)
    results = {}
    for name in ("triton", "cpu"):
        with ckpt_ops.use_backend(name):
            results[name] = run(op, t, dict(p=0.3, seed=SEED))
    for name in (op.outputs[-1], *(["dx"] if len(op.outputs) == 1 else ())):
        assert torch.equal(results["triton"][name], results["cpu"][name]), name


@interpreted
def test_another_interpreter_is_noticed(monkeypatch):
    from triton.runtime import interpreter

    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", lambda data, target: data)
        with pytest.raises(RuntimeError, match="casts otherwise"):
            round_to_nearest_even()
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", interpreter._convert_float)  # to be restored
        cut = lambda self, src, type: interpreter.TensorHandle((src.data.view("uint32") >> 16).astype("uint16"), type)  # noqa: E731
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", cut)
        with pytest.raises(RuntimeError, match="no longer casts by _convert_float"):
            round_to_nearest_even()


def test_a_multiply_add_rounds_once():
    a = np.array([1 + 2.0**-12], np.float32)
    assert multiply_add(a, a, -a * a).item() == 2.0**-24
    assert multiply_add(-a, a, a * a).item() == -(2.0**-24)
