"""One kernel for what a layer's children would do one after the other, while nobody can tell the difference.

A child that is of another class than expected, or that has hooks, is called. Each function takes p, weights and streams
from the children, so that setting `layer.dropout.p` or attaching seeds works as if they were called.
"""

import functools

import torch
from torch import nn

from .. import functional as F
from ..saved.accepts import call_for, has_own_hooks, refuse_for
from .dropout import Dropout
from .norm import LayerNorm

_FUNCTIONS = {torch.relu: "relu", nn.functional.relu: "relu", nn.functional.gelu: "gelu", nn.functional.silu: "silu"}


def act_name(activation):
    """The name of an activation module or function among act_dropout's, or None."""
    if isinstance(activation, nn.Module):
        if has_own_hooks(activation):
            return None
        if type(activation) is nn.GELU:
            return _gelu(activation.approximate)
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(activation))
    if isinstance(activation, functools.partial) and activation.func is nn.functional.gelu and not activation.args:
        return _gelu(**activation.keywords)
    for function, name in _FUNCTIONS.items():
        if activation is function:
            return name
    return None


def _gelu(approximate="none"):
    return "gelu" if approximate == "none" else "gelu_tanh"


def _is(cls, child):
    return type(child) is cls and not has_own_hooks(child)


def act_dropout(activation, dropout, x):
    """dropout(activation(x)). Its output is the dropout's."""
    act = act_name(activation)
    if act is not None and _is(Dropout, dropout):
        return call_for(dropout, F.act_dropout, x, act, dropout.p, None, dropout.training, **dropout.random())
    if act is None:
        refuse_for(dropout, "its activation is not one that this package knows, so its input is kept with it")
    return dropout(activation(x))


def dropout_add(dropout, x, residual):
    """residual + dropout(x)."""
    if _is(Dropout, dropout):
        return F.dropout_add(x, residual, dropout.p, None, dropout.training, **dropout.random())
    return residual + dropout(x)


def dropout_add_norm(dropout, norm, x, residual):
    """(norm(r), r) with r = residual + dropout(x)."""
    if not (_is(Dropout, dropout) and _is(LayerNorm, norm) and norm.save == "input"):
        r = dropout_add(dropout, x, residual)
        return norm(r), r
    return call_for(
        norm, F.dropout_add_layer_norm, x, residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps,
        p=dropout.p, training=dropout.training, **dropout.random(),
    )  # fmt: skip
