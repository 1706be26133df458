"""dropout_add: numerics, bytes, errors."""

import math

import pytest
import torch

import ckpt_ops
from helpers_numerics import SEED, assert_close_for
from helpers_ops import DROPOUT_ADD, DTYPES, LAYOUTS, make, run
from helpers_philox import torch_mask

SHAPES = [(1,), (7,), (0, 5), (5, 0), (1, 1), (11, 1), (31, 33), (2, 3, 65), (70_001, 3), (3, 1009)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numerics(backend, shape, dtype):
    backend.skip_if_slow(math.prod(shape))
    # the bias gradient of one column is a single sum, whose error no mean over columns can tell: it has its own test
    frozen = ("bias",) if shape[-1] == 1 else ()
    assert_close_for(DROPOUT_ADD, shape, dtype, backend.device, p=0.3, frozen=frozen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("without", [(), ("bias",)])
def test_numerics_with_and_without_bias(backend, dtype, p, without):
    assert_close_for(DROPOUT_ADD, (17, 129), dtype, backend.device, p=p, without=without)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_bias_with_16_bit_input(backend, dtype):
    assert_close_for(DROPOUT_ADD, (17, 129), dtype, backend.device, p=0.3, param_dtype=torch.float32)


def test_the_bias_gradient_of_one_column(backend):
    results = run(DROPOUT_ADD, make(DROPOUT_ADD, (67, 1), device=backend.device), dict(p=0.1, seed=SEED))
    terms = results["dx"].double()
    assert abs(results["dbias"].item() - terms.sum().item()) <= 4 * torch.finfo(torch.float32).eps * terms.abs().sum().item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 67), (2, 3, 4, 33)])
def test_layouts(backend, shape, layout):
    assert_close_for(DROPOUT_ADD, shape, torch.float32, backend.device, p=0.3, layout=layout)


def test_input_and_residual_promote_as_torchs_plus(backend):
    x = torch.randn(4, 8, dtype=torch.bfloat16, device=backend.device, requires_grad=True)
    residual = torch.randn(4, 8, device=backend.device, requires_grad=True)
    y = ckpt_ops.dropout_add(x, residual, 0.5, seed=SEED)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, residual.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    mask = torch_mask(x.shape, 0.5, SEED, device=backend.device)
    assert torch.equal(y, residual + x.float() * mask * 2)


def test_0d(backend):
    x = torch.tensor(3.0, device=backend.device)
    assert ckpt_ops.dropout_add(x, x, 0.0).item() == 6.0


def test_dropped_inf_and_nan_leave_the_residual(backend):
    x = torch.full((3, 64), torch.inf, device=backend.device)
    residual = torch.randn(3, 64, device=backend.device)
    y = ckpt_ops.dropout_add(x, residual, 0.5, seed=SEED)
    dropped = ~torch_mask(x.shape, 0.5, SEED, device=backend.device)
    assert torch.equal(y[dropped], residual[dropped]) and y[~dropped].isinf().all()


def test_kept_bytes(fused):
    x, residual = (torch.randn(64, 256, device=fused.device, requires_grad=True) for _ in range(2))
    bias = torch.nn.Parameter(torch.randn(256, device=fused.device))
    kept = ckpt_ops.memory.kept(ckpt_ops.dropout_add, x, residual, 0.1, bias)
    assert (kept.bytes, kept.parameter_bytes) == (8, 0)
    assert ckpt_ops.memory.kept(ckpt_ops.dropout_add, x, residual, 0.0, bias).bytes == 0


def test_bad_shapes(backend):
    x = torch.randn(2, 3, device=backend.device)
    with pytest.raises(ValueError, match="input and residual must have one shape"):
        ckpt_ops.dropout_add(x, x[:1])
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\)"):
        ckpt_ops.dropout_add(x, x, bias=x)
