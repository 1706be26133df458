"""rms_norm: numerics, offset, default eps, what is kept, errors."""

import pytest
import torch
import torch.nn.functional as F

import ckpt_ops
from helpers_numerics import assert_close_for
from helpers_ops import DTYPES, LAYOUTS, make, rms_norm_op

OP = {(save, offset): rms_norm_op(save, offset) for save in ("input", "output") for offset in (0.0, 1.0)}
saves = pytest.mark.parametrize("save", ["input", "output"])
offsets = pytest.mark.parametrize("offset", [0.0, 1.0])
SHAPES = [(7,), (0, 5), (3, 0, 16), (2, 3, 65), (31, 33), (4099, 8)]


@saves
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numerics(backend, shape, dtype, save):
    assert_close_for(OP[save, 0.0], shape, dtype, backend.device)


@saves
@offsets
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 5, 15, 16])
def test_short_rows(backend, columns, dtype, save, offset):
    """There dx is a small difference of large terms, and y in 16 bits does not tell it."""
    assert_close_for(OP[save, offset], (5, columns), dtype, backend.device)


@saves
@offsets
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("without", [(), ("weight",)])
def test_numerics_of_offsets(backend, dtype, without, save, offset):
    assert_close_for(OP[save, offset], (17, 129), dtype, backend.device, without=without)


@saves
@offsets
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weight_with_16_bit_input(backend, dtype, save, offset):
    assert_close_for(OP[save, offset], (17, 129), dtype, backend.device, param_dtype=torch.float32)


@saves
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 67), (2, 3, 4, 33)])
def test_layouts(backend, shape, layout, save):
    assert_close_for(OP[save, 1.0], shape, torch.float32, backend.device, layout=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_eps_is_torchs(backend, dtype):
    """On inputs so small that eps decides."""
    x = torch.full((2, 8), 1e-5 if dtype == torch.float32 else 1e-9, dtype=dtype, device=backend.device)
    torch.testing.assert_close(ckpt_ops.rms_norm(x, (8,)), F.rms_norm(x, (8,)))


def test_normalized_shape_of_several_dimensions(backend):
    x = torch.randn(5, 3, 4, device=backend.device, requires_grad=True)
    w = torch.randn(3, 4, device=backend.device, requires_grad=True)
    ours = torch.autograd.grad(ckpt_ops.rms_norm(x, (3, 4), w, 1e-6).square().sum(), (x, w))
    theirs = torch.autograd.grad(F.rms_norm(x, (3, 4), w, 1e-6).square().sum(), (x, w))
    for mine, his in zip(ours, theirs):
        torch.testing.assert_close(mine, his, rtol=1e-5, atol=1e-5)


@saves
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_bytes(fused, dtype, save):
    """The input, or the output, and one statistic a row."""
    t = make(OP["input", 0.0], (64, 256), dtype, fused.device)
    statistic = 8 if dtype == torch.float64 else 4
    weight = torch.nn.Parameter(t["weight"].detach())
    assert ckpt_ops.memory.kept(ckpt_ops.rms_norm, t["x"], (256,), weight, save=save).bytes == t["x"].nbytes + 64 * statistic


@pytest.mark.parametrize("value, offset", [(0.0, 0.0), (-1.0, 1.0)])
def test_save_output_falls_back_where_y_does_not_tell_x(backend, value, offset):
    t = make(OP["output", offset], (17, 40), torch.float32, backend.device)
    with torch.no_grad():
        t["weight"][3] = value
    ours = torch.autograd.grad(OP["output", offset].ours(t)[0].square().sum(), t.values())
    theirs = torch.autograd.grad(OP["input", offset].ours(t)[0].square().sum(), t.values())
    for mine, his in zip(ours, theirs):
        assert torch.equal(mine, his)


def test_bad_arguments(backend):
    x = torch.randn(2, 3, device=backend.device)
    with pytest.raises(ValueError, match="normalized_shape"):
        ckpt_ops.rms_norm(x, (2,))
    with pytest.raises(ValueError, match=r"weight must have shape \(3,\)"):
        ckpt_ops.rms_norm(x, (3,), x)
    with pytest.raises(ValueError, match="save must be 'input' or 'output'"):
        ckpt_ops.rms_norm(x, (3,), save="x")
