"""dropout_add_layer_norm and dropout_add_rms_norm: numerics, unused outputs, bytes, errors."""

from dataclasses import replace

import pytest
import torch

import ckpt_ops
from helpers_numerics import SEED, assert_close_for
from helpers_ops import DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, DTYPES, LAYOUTS, make

ops = pytest.mark.parametrize("op", [DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM], ids=str)
SHAPES = [(7,), (0, 5), (3, 0, 16), (2, 3, 65), (31, 33), (4099, 8)]


@ops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numerics(backend, op, shape, dtype):
    assert_close_for(op, shape, dtype, backend.device, p=0.3)


@ops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("without", [("bias",), ("weight",), ("input_bias",), ("weight", "bias", "input_bias")])
def test_numerics_without_parameters(backend, op, dtype, p, without):
    assert_close_for(op, (17, 129), dtype, backend.device, p=p, without=without)


@ops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_parameters_with_16_bit_input(backend, op, dtype):
    assert_close_for(op, (17, 129), dtype, backend.device, p=0.3, param_dtype=torch.float32)


@ops
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 67), (2, 3, 4, 33)])
def test_layouts(backend, op, shape, layout):
    assert_close_for(op, shape, torch.float32, backend.device, p=0.3, layout=layout)


@ops
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    "shape, inner", [((5, 1, 7), 2), ((2, 3, 4, 5), 2), ((2, 3, 4, 5), 4), ((3, 4), 2), ((0, 3, 4), 2), ((4, 0, 3), 2)]
)
def test_normalized_shape_of_several_dimensions(backend, op, shape, inner, layout, p):
    """weight and bias are of the last `inner` dimensions; input_bias and the mask's rows of the last one."""

    def shapes(shape):
        return {n: shape[-inner:] if n in ("weight", "bias") else size for n, size in op.shapes(shape).items()}

    assert_close_for(replace(op, shapes=shapes), shape, torch.float32, backend.device, p=p, layout=layout)


@ops
def test_p_1_is_the_residual(backend, op):
    t = make(op, (3, 8), device=backend.device)
    _, r = op.ours(t, p=1.0)
    assert torch.equal(r, t["residual"])


@ops
@pytest.mark.parametrize("used", ["y", "r"])
def test_one_output_alone_is_used(backend, op, used):
    """The other's gradient is None: the same as zeros, bit for bit."""
    t = make(op, (5, 33), device=backend.device)
    y, r = op.ours(t, p=0.3, seed=SEED)
    dy = torch.randn_like(y)
    out = y if used == "y" else r
    alone = torch.autograd.grad(out, t.values(), dy, allow_unused=True)
    y, r = op.ours(t, p=0.3, seed=SEED)
    zero = torch.zeros_like(dy)
    both = torch.autograd.grad((y, r), t.values(), (dy, zero) if used == "y" else (zero, dy))
    for name, mine, full in zip(t, alone, both):
        assert torch.equal(torch.zeros_like(full) if mine is None else mine, full), name


@ops
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_bytes(fused, op, dtype):
    """r, which the next block keeps anyway, the statistics, and 8 bytes."""
    t = make(op, (64, 256), dtype, fused.device)
    statistics = 2 if op is DROPOUT_ADD_LAYER_NORM else 1
    size = 8 if dtype == torch.float64 else 4
    t = {n: torch.nn.Parameter(x.detach()) if n in ("weight", "bias", "input_bias") else x for n, x in t.items()}
    kept = ckpt_ops.memory.kept(lambda: op.ours(t, p=0.1))
    assert (
        kept.bytes - 256 * t["weight"].element_size() * _seen(kept, t["weight"]) == t["x"].nbytes + 64 * statistics * size + 8
    )


def _seen(kept, parameter):
    """1 if a row is the parameter's and not marked so (a closure hides it from `kept`)."""
    return sum(not row.parameter and row.shape == tuple(parameter.shape) for row in kept.rows)


@ops
def test_bad_arguments(backend, op):
    call = getattr(ckpt_ops, op.name)
    x = torch.randn(2, 3, device=backend.device)
    with pytest.raises(ValueError, match="input and residual must have one shape"):
        call(x, x[:1], (3,))
    with pytest.raises(ValueError, match="normalized_shape"):
        call(x, x, (2,))
    with pytest.raises(ValueError, match=r"weight must have shape \(3,\)"):
        call(x, x, (3,), x)
    with pytest.raises(ValueError, match=r"input_bias must have shape \(3,\)"):
        call(x, x, (3,), input_bias=x)
