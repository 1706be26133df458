"""act_dropout and gelu_dropout: numerics, extreme inputs, bytes, errors."""

import math

import pytest
import torch
import torch.nn.functional as F

import ckpt_ops
from helpers_numerics import SEED, assert_close_for
from helpers_ops import ACT_DROPOUTS, DTYPES, LAYOUTS

GELU = ACT_DROPOUTS[0]
SHAPES = [(1,), (7,), (0, 5), (5, 0), (1, 1), (11, 1), (31, 33), (2, 3, 65), (70_001, 3), (3, 1009)]
acts = pytest.mark.parametrize("op", ACT_DROPOUTS, ids=str)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numerics(backend, shape, dtype):
    backend.skip_if_slow(math.prod(shape))
    # the bias gradient of one column is a single sum, whose error no mean over columns can tell: it has its own test
    frozen = ("bias",) if shape[-1] == 1 else ()
    assert_close_for(GELU, shape, dtype, backend.device, p=0.3, frozen=frozen)


@acts
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("without", [(), ("bias",)])
def test_numerics_of_every_activation(backend, op, dtype, p, without):
    assert_close_for(op, (17, 129), dtype, backend.device, p=p, without=without)


@acts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_bias_with_16_bit_input(backend, op, dtype):
    assert_close_for(op, (17, 129), dtype, backend.device, p=0.3, param_dtype=torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 67), (2, 3, 4, 33)])
def test_layouts(backend, shape, layout):
    assert_close_for(GELU, shape, torch.float32, backend.device, p=0.3, layout=layout)


@acts
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_inputs_are_torchs(backend, op, dtype):
    """Tails, infinities, NaN: the value and the gradient."""
    act = op.name.removeprefix("act_dropout-")
    values = [-torch.inf, -1e4, -40.0, -13.0, -6.0, -1e-3, -0.0, 0.0, 1e-3, 6.0, 13.0, 40.0, 100.0, torch.inf, torch.nan]
    x = torch.tensor(values, dtype=dtype, device=backend.device, requires_grad=True)
    plain = x.detach().double().requires_grad_()
    y, true = ckpt_ops.act_dropout(x, act, 0.0), op.plain({"x": plain}, 1.0)[0]
    y.sum().backward()
    true.sum().backward()
    eps = 4 * torch.finfo(dtype).eps
    # gelu and silu subtract: below -3 their relative error grows, their absolute one does not
    torch.testing.assert_close(y, true.to(dtype), rtol=eps, atol=eps, equal_nan=True)
    finite = x.detach().isfinite()  # at infinity torch's own formulas give inf * 0
    torch.testing.assert_close(x.grad[finite], plain.grad.to(dtype)[finite], rtol=eps, atol=eps)


def test_gelu_dropout_is_gelu_by_its_own_argument(backend):
    x, bias = torch.randn(5, 7, device=backend.device), torch.randn(7, device=backend.device)
    for approximate, act in (("none", "gelu"), ("tanh", "gelu_tanh")):
        ours = ckpt_ops.gelu_dropout(x, 0.5, approximate, bias, seed=4)
        assert torch.equal(ours, ckpt_ops.act_dropout(x, act, 0.5, bias, seed=4))
        torch.testing.assert_close(
            ckpt_ops.gelu_dropout(x, 0.5, approximate, training=False), F.gelu(x, approximate=approximate), rtol=1e-5, atol=1e-6
        )


@acts
def test_kept_bytes(fused, op):
    """The input and 8 bytes: neither the activation nor the mask; the bias is a parameter."""
    x = torch.randn(64, 256, device=fused.device, requires_grad=True)
    bias = torch.nn.Parameter(torch.randn(256, device=fused.device))
    act = op.name.removeprefix("act_dropout-")
    kept = ckpt_ops.memory.kept(ckpt_ops.act_dropout, x, act, 0.1, bias)
    assert (kept.bytes, kept.parameter_bytes) == (64 * 256 * 4 + 8, 256 * 4)
    assert ckpt_ops.memory.kept(ckpt_ops.act_dropout, x, act, 0.0).bytes == 64 * 256 * 4
    half = x.detach().bfloat16().requires_grad_()
    assert ckpt_ops.memory.kept(ckpt_ops.act_dropout, half, act, 0.1).bytes == 64 * 256 * 2 + 8


def test_bad_arguments(backend):
    x = torch.randn(2, 3, device=backend.device)
    with pytest.raises(ValueError, match="unknown activation 'mish'.*gelu_tanh"):
        ckpt_ops.act_dropout(x, "mish")
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh'"):
        ckpt_ops.gelu_dropout(x, approximate="erf")
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\)"):
        ckpt_ops.act_dropout(x, "gelu", bias=torch.randn(2, device=backend.device))


def test_relu_of_a_dropped_nan_is_zero(backend):
    x = torch.full((4, 64), torch.nan, device=backend.device, requires_grad=True)
    y = ckpt_ops.act_dropout(x, "relu", 0.5, seed=SEED)
    y.sum().backward()
    kept = ckpt_ops.dropout_mask(x.shape, 0.5, SEED, device=backend.device)
    assert torch.equal(y.isnan(), kept) and (y[~kept] == 0).all() and (x.grad[~kept] == 0).all()
