"""Under autocast a Linear saves its own cast of a registered output: the cast is regenerated with it."""

import pytest
import torch
from torch import nn

import ckpt_ops
from ckpt_ops import memory

ROWS, WIDTH = 6, 16


def _model():
    torch.manual_seed(0)
    return nn.Sequential(ckpt_ops.nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _step(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    return grads


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (2, ROWS // 2, WIDTH)])
def test_a_cast_of_a_registered_output_is_regenerated(shape):
    model, x = _model(), torch.randn(shape, requires_grad=True)
    plain = _step(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        before = memory.kept(model, x).bytes
    handle = ckpt_ops.regenerate(model, "store", modules=["0"])
    with torch.autocast("cpu", torch.bfloat16):
        after = memory.kept(model, x).bytes
    assert before - after == 2 * ROWS * WIDTH  # the first Linear's bfloat16 copy of the norm's output
    for ours, expected in zip(_step(model, x), plain, strict=True):
        assert torch.equal(ours, expected)
    handle.remove()


def test_a_cast_of_a_changed_output_is_kept():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    linear = nn.Linear(WIDTH, WIDTH)
    with ckpt_ops.regenerating() as engine, torch.autocast("cpu", torch.bfloat16):
        y = ckpt_ops.gelu_dropout(x, 0.0)
        y.mul_(2)
        linear(y).float().sum().backward()
    assert not engine.replaced
    expected = (torch.nn.functional.gelu(x.detach()) * 2).bfloat16().sum(0)
    torch.testing.assert_close(linear.weight.grad[0].bfloat16(), expected, rtol=2**-6, atol=2**-6)
