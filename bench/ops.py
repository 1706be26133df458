"""What each provider runs for each op: one expression a provider, on the same tensors.

`eager` is the op written out in torch, `fused` is torch's own single function where one exists. All take the op's
tensors in order and p; `ours` also takes a backend. The other packages' functions are named in peers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

import ckpt_ops

from . import peers

EPS = 1e-5


@dataclass(frozen=True)
class Op:
    stem: str  # its file in ckpt_ops/ops
    name: str  # what a table calls it
    inputs: Callable  # shape -> a list of input shapes; parameters are wrapped in Param
    ours: Callable
    eager: Callable
    fused: Callable | None = None
    others: dict = field(default_factory=dict)  # package -> a function that imports it and returns the callable
    outputs: int = 1  # tensors of the case's shape that get a gradient


class Param(tuple):
    """The shape of a parameter: alive anyway, so not among the kept bytes."""


def _dropout(x, p, backend):
    return ckpt_ops.dropout(x, p, backend=backend)


DROPOUT = Op("dropout", "dropout", lambda s: [s], ours=_dropout, eager=lambda x, p: F.dropout(x, p))

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


def act_dropout(act, bias=False):
    activation = ACTIVATIONS[act]

    def ours(x, *maybe_bias, p, backend):
        return ckpt_ops.act_dropout(x, act, p, *maybe_bias, backend=backend)

    def eager(x, *maybe_bias, p):
        return F.dropout(activation(x + maybe_bias[0] if bias else x), p)

    name = f"{act}_dropout" + (" with bias" if bias else "")
    return Op("act_dropout", name, lambda s: [s, Param(s[-1:])] if bias else [s], ours, eager)


def _dropout_add(x, residual, p, backend):
    return ckpt_ops.dropout_add(x, residual, p, backend=backend)


DROPOUT_ADD = Op(
    "dropout_add", "dropout_add", lambda s: [s, s], ours=_dropout_add, eager=lambda x, residual, p: residual + F.dropout(x, p)
)


def _layer_norm(x, weight, bias, p, backend):
    return ckpt_ops.layer_norm(x, weight.shape, weight, bias, EPS, backend=backend)


def _layer_norm_eager(x, weight, bias, p):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS) * weight + bias


LAYER_NORM = Op(
    "layer_norm",
    "layer_norm",
    lambda s: [s, Param(s[-1:]), Param(s[-1:])],
    ours=_layer_norm,
    eager=_layer_norm_eager,
    fused=lambda x, weight, bias, p: F.layer_norm(x, weight.shape, weight, bias, EPS),
    others={"liger_kernel": peers.liger_layer_norm, "apex": peers.apex_layer_norm},
)


def _rms_norm(x, weight, p, backend):
    return ckpt_ops.rms_norm(x, weight.shape, weight, EPS, backend=backend)


RMS_NORM = Op(
    "rms_norm",
    "rms_norm",
    lambda s: [s, Param(s[-1:])],
    ours=_rms_norm,
    eager=lambda x, weight, p: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight,
    fused=lambda x, weight, p: F.rms_norm(x, weight.shape, weight, EPS),
    others={"liger_kernel": peers.liger_rms_norm, "apex": peers.apex_rms_norm},
)


def _dropout_add_layer_norm(x, residual, weight, bias, p, backend):
    return ckpt_ops.dropout_add_layer_norm(x, residual, weight.shape, weight, bias, EPS, p=p, backend=backend)


def _dropout_add_layer_norm_eager(x, residual, weight, bias, p):
    r = residual + F.dropout(x, p)
    return F.layer_norm(r, weight.shape, weight, bias, EPS), r


DROPOUT_ADD_LAYER_NORM = Op(
    "dropout_add_norm",
    "dropout_add_layer_norm",
    lambda s: [s, s, Param(s[-1:]), Param(s[-1:])],
    ours=_dropout_add_layer_norm,
    eager=_dropout_add_layer_norm_eager,
    others={"flash_attn": peers.flash_dropout_add_layer_norm},
    outputs=2,
)


def _dropout_add_rms_norm(x, residual, weight, p, backend):
    return ckpt_ops.dropout_add_rms_norm(x, residual, weight.shape, weight, EPS, p=p, backend=backend)


def _dropout_add_rms_norm_eager(x, residual, weight, p):
    r = residual + F.dropout(x, p)
    return F.rms_norm(r, weight.shape, weight, EPS), r


DROPOUT_ADD_RMS_NORM = Op(
    "dropout_add_norm",
    "dropout_add_rms_norm",
    lambda s: [s, s, Param(s[-1:])],
    ours=_dropout_add_rms_norm,
    eager=_dropout_add_rms_norm_eager,
    others={"flash_attn": peers.flash_dropout_add_rms_norm},
    outputs=2,
)


def attention(causal, group=1):
    """q of the case's shape [B, H, N, D]; k and v with H // group heads."""

    def inputs(shape):
        batch, heads, length, width = shape
        return [shape, *[(batch, heads // group, length, width)] * 2]

    def ours(q, k, v, p, backend):
        return ckpt_ops.scaled_dot_product_attention(
            q, k, v, dropout_p=p, is_causal=causal, enable_gqa=group > 1, backend=backend
        )

    def eager(q, k, v, p):
        if group > 1:
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return F.dropout(torch.softmax(scores, -1), p) @ v

    def fused(q, k, v, p):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal, enable_gqa=group > 1)

    name = "attention" + (" causal" if causal else "") + (f" gqa {group}:1" if group > 1 else "")
    others = {"flash_attn": partial(peers.flash_attention, causal)}
    return Op("attention", name, inputs, ours, eager, fused, others)
