"""layer_norm: numerics at any size, what is kept, errors."""

import pytest
import torch
import torch.nn.functional as F

import ckpt_ops
from helpers_numerics import assert_close_for
from helpers_ops import DTYPES, LAYOUTS, layer_norm_op, make

OP = {save: layer_norm_op(save) for save in ("input", "output")}
saves = pytest.mark.parametrize("save", ["input", "output"])
SHAPES = [(7,), (0, 5), (3, 0, 16), (2, 3, 65), (31, 33), (4099, 8)]


@saves
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numerics(backend, shape, dtype, save):
    assert_close_for(OP[save], shape, dtype, backend.device)


@saves
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 5, 15, 16])
def test_short_rows(backend, columns, dtype, save):
    """There dx is a small difference of large terms, and y in 16 bits does not tell it."""
    assert_close_for(OP[save], (5, columns), dtype, backend.device)


@saves
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("without", [("bias",), ("weight",), ("weight", "bias")])
def test_numerics_without_parameters(backend, dtype, without, save):
    assert_close_for(OP[save], (17, 129), dtype, backend.device, without=without)


@saves
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_parameters_with_16_bit_input(backend, dtype, save):
    assert_close_for(OP[save], (17, 129), dtype, backend.device, param_dtype=torch.float32)


@saves
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 67), (2, 3, 4, 33)])
def test_layouts(backend, shape, layout, save):
    assert_close_for(OP[save], shape, torch.float32, backend.device, layout=layout)


def test_normalized_shape_of_several_dimensions(backend):
    x = torch.randn(5, 3, 4, device=backend.device, requires_grad=True)
    w, b = (torch.randn(3, 4, device=backend.device, requires_grad=True) for _ in range(2))
    ours = torch.autograd.grad(ckpt_ops.layer_norm(x, (3, 4), w, b).square().sum(), (x, w, b))
    theirs = torch.autograd.grad(F.layer_norm(x, (3, 4), w, b).square().sum(), (x, w, b))
    for mine, his in zip(ours, theirs):
        torch.testing.assert_close(mine, his, rtol=1e-5, atol=1e-5)


def test_an_int_normalized_shape(backend):
    x = torch.randn(5, 4, device=backend.device)
    assert torch.equal(ckpt_ops.layer_norm(x, 4), ckpt_ops.layer_norm(x, (4,)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_bytes(fused, dtype):
    """The input and two statistics a row, or the output and one."""
    t = make(OP["input"], (64, 256), dtype, fused.device)
    statistic = 8 if dtype == torch.float64 else 4
    parameters = [torch.nn.Parameter(t[n].detach()) for n in ("weight", "bias")]
    arguments = (t["x"], (256,), *parameters)
    kept = ckpt_ops.memory.kept(ckpt_ops.layer_norm, *arguments)
    assert kept.bytes == t["x"].nbytes + 64 * 2 * statistic
    kept = ckpt_ops.memory.kept(ckpt_ops.layer_norm, *arguments, save="output")
    assert kept.bytes == t["x"].nbytes + 64 * statistic
    kept = ckpt_ops.memory.kept(ckpt_ops.layer_norm, t["x"].detach(), (256,), None, parameters[1])
    assert kept.bytes == 0, "a bias alone needs nothing"


def test_save_output_frees_the_input(fused):
    x = torch.randn(64, 256, device=fused.device, requires_grad=True)
    kept = ckpt_ops.memory.kept(lambda: ckpt_ops.layer_norm(x * 1, (256,), save="output"))
    assert kept.bytes == x.nbytes + 64 * 4  # y and rstd
    output = kept.output.untyped_storage().data_ptr()
    assert output in [t.untyped_storage().data_ptr() for t in kept.output.grad_fn.saved_tensors if t is not None]


@pytest.mark.parametrize("index, value", [("weight", 0.0), ("weight", 2.0**-9), ("bias", 1e3)])
def test_save_output_falls_back_where_y_does_not_tell_x(backend, index, value):
    """A weight near 0 or a bias far above it: gradients stay right because the input is kept."""
    t = make(OP["output"], (17, 40), torch.float32, backend.device)
    with torch.no_grad():
        t[index][3] = value
    ours = torch.autograd.grad(OP["output"].ours(t)[0].square().sum(), t.values())
    theirs = torch.autograd.grad(OP["input"].ours(t)[0].square().sum(), t.values())
    for mine, his in zip(ours, theirs):
        assert torch.equal(mine, his)


def test_bad_arguments(backend):
    x = torch.randn(2, 3, device=backend.device)
    for shape in [(2,), (), (4, 2, 3)]:
        with pytest.raises(ValueError, match="normalized_shape"):
            ckpt_ops.layer_norm(x, shape)
    for parameters in [(x, None), (None, x)]:
        with pytest.raises(ValueError, match=r"must have shape \(3,\)"):
            ckpt_ops.layer_norm(x, (3,), *parameters)
    with pytest.raises(ValueError, match="save must be 'input' or 'output'"):
        ckpt_ops.layer_norm(x, (3,), save="both")
    with pytest.raises(TypeError, match="int64"):
        ckpt_ops.layer_norm(x.long(), (3,))
