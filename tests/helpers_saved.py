"""Functions that register with an engine and count, and what an engine must not change."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ckpt_ops
from ckpt_ops.saved import current


class Counted:
    """A function that is registered where an engine is active, and that counts its recomputations."""

    def __init__(self, fn, name="counted"):
        self.fn, self.name, self.runs, self.made = fn, name, 0, []

    def __call__(self, *inputs):
        y = self.fn(*inputs)
        if (engine := current()) is not None:
            engine.register(self.name, self.again, inputs, (y,))
        return y

    def again(self, *inputs):
        self.runs += 1
        y = self.fn(*inputs)
        self.made.append(StorageWeakRef(y.untyped_storage()))
        return y

    def alive(self):
        return [ref for ref in self.made if not ref.expired()]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def grads_of(forward, *leaves):
    return torch.autograd.grad(forward(*leaves), leaves)


def assert_same(forward, *leaves):
    """Gradients with an engine are those without, to the bit. Returns the engine."""
    expected = grads_of(forward, *leaves)
    with ckpt_ops.regenerating() as engine:
        loss = forward(*leaves)
    for got, want in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert torch.equal(got, want)
    return engine
