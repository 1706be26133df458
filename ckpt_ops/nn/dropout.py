"""Dropout alone, behind an activation, and before a residual add."""

from torch import nn

from .. import functional as F
from ..ops.act_dropout import ACTIVATIONS
from ..saved.accepts import registers
from ._random import RandomModule


class Dropout(RandomModule, nn.Dropout):
    """torch.nn.Dropout that keeps 8 bytes. `inplace` writes the result into the input, but needs room for both meanwhile."""

    @registers
    def forward(self, input):
        y = F.dropout(input, self.p, self.training, **self.random())
        return input.copy_(y) if self.inplace and y is not input else y


class GELUDropout(RandomModule, nn.Module):
    """dropout(gelu(input + bias), p).

    Args:
        p: drop probability.  approximate: "none" or "tanh", as in torch.nn.GELU.
    Kept for backward: input, 8 bytes.
    """

    def __init__(self, p=0.5, approximate="none"):
        super().__init__()
        _check_p(p)
        self.p, self.approximate = p, approximate

    @registers
    def forward(self, input, bias=None):
        """input [..., C], bias [C] or None (e.g. of a Linear that was called without its own)."""
        return F.gelu_dropout(input, self.p, self.approximate, bias, self.training, **self.random())

    def extra_repr(self):
        return f"p={self.p}, approximate={self.approximate!r}"


class ActDropout(RandomModule, nn.Dropout):
    """dropout(act(input + bias), p).

    Args:
        act: "gelu" (exact), "gelu_tanh", "relu", "silu" or "relu2".  p: drop probability.
    Kept for backward: input, 8 bytes.
    """

    def __init__(self, act, p=0.5):
        super().__init__(p)
        if act not in ACTIVATIONS:
            raise ValueError(f"unknown activation {act!r}; choose one of {', '.join(ACTIVATIONS)}")
        self.act = act

    @registers
    def forward(self, input, bias=None):
        """input [..., C], bias [C] or None (e.g. of a Linear that was called without its own)."""
        return F.act_dropout(input, self.act, self.p, bias, self.training, **self.random())

    def extra_repr(self):
        return f"{self.act!r}, p={self.p}"


class DropoutAdd(RandomModule, nn.Module):
    """residual + dropout(input + bias, p).  Kept for backward: 8 bytes."""

    def __init__(self, p=0.5):
        super().__init__()
        _check_p(p)
        self.p = p

    @registers
    def forward(self, input, residual, bias=None):
        """input, residual [..., C] of one shape, bias [C] or None."""
        return F.dropout_add(input, residual, self.p, bias, self.training, **self.random())

    def extra_repr(self):
        return f"p={self.p}"


def _check_p(p):
    if not 0 <= p <= 1:
        raise ValueError(f"the drop probability must be between 0 and 1, got {p}")
