"""MLP: plain torch's results, biases once, nothing kept for what is frozen."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_ops
from helpers_layers import ENCODERS, E, assert_equals_torchs, layers, ours

each = pytest.mark.parametrize


@each("activation", ["gelu", "gelu_tanh", "relu", "silu", "relu2"])
def test_mlp(backend, activation):
    functions = {"gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "relu2": lambda x: F.relu(x) ** 2}
    function = functions.get(activation) or getattr(F, activation)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(E, 4 * E), nn.Linear(4 * E, E)

        def forward(self, x):
            return self.down(function(self.up(x)))

    assert_equals_torchs(ours.MLP(E, activation=activation), Plain(), lambda m, x: m(x), [torch.randn(2, 6, E)])


@each("size", [1, 128, 256, 257, 768])
@each("p", [0.0, 0.1])
@each("bias", [True, (True, False), (False, True), False], ids=["both", "first", "second", "none"])
def test_case_39_biases_are_added_once(backend, size, p, bias):
    up, down = bias if isinstance(bias, tuple) else (bias, bias)
    module = ours.MLP(4, size, dropout=p, bias=bias)
    assert (module.up.bias is not None, module.down.bias is not None) == (up, down)
    with torch.no_grad():
        module.up.weight.zero_()
        module.down.weight.fill_(1 / size)
        for b in (module.up.bias, module.down.bias):
            if b is not None:
                b.fill_(1.0)
    y = module.eval()(torch.randn(3, 4))
    expected = (0.841345 if up else 0.0) + (1.0 if down else 0.0)  # gelu(1), not gelu(2) = 1.954500
    torch.testing.assert_close(y, torch.full((3, 4), expected), rtol=0, atol=2e-6)
    module.train()(torch.randn(3, 4)).sum().backward()


def test_case_22_a_frozen_projection_keeps_no_input(fused):
    x = torch.randn(64, E, requires_grad=True)
    module = ours.MLP(E)
    trained = ckpt_ops.memory.kept(module, x).bytes
    module.up.weight.requires_grad_(False)
    assert trained - ckpt_ops.memory.kept(module, x).bytes == x.nbytes


def test_case_18_an_empty_batch(backend):
    for module, x in ((ours.MLP(E), torch.empty(0, E)), (layers(ENCODERS)[0], torch.empty(6, 0, E))):
        y = module(x.requires_grad_())
        y.sum().backward()
        assert y.shape == x.shape and all((p.grad == 0).all() for p in module.parameters())
