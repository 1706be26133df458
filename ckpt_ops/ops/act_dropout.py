"""y = dropout(act(x + bias), p).

forward    y  = m * act(h),  h = x + bias      m = keep * scale, regrown from (seed, index)
backward   dx = m * act'(h) * dy               dbias = sum of dx over rows
saved      x, bias (a parameter), seed (8 bytes)    never: h, act(h), the mask
"""

import functools

import torch

from .. import dispatch, reference, saved, seeds
from ..library import fake
from ._common import (
    call,
    check_bias,
    check_floating,
    distinct,
    first_derivative_only,
    op,
    param_grad,
    statistics_dtype,
    vmap_by_sample,
)

ACTIVATIONS = tuple(reference.ACTIVATIONS)


@fake("act_dropout_fwd")
def _(x, bias, act, seed, p, stream, origin):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@fake("act_dropout_bwd")
def _(dy, x, bias, act, seed, p, stream, origin, need_dbias):
    columns = x.shape[-1] if need_dbias else 0
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(columns, dtype=statistics_dtype(x.dtype)),
    )


class ActDropout(torch.autograd.Function):
    @staticmethod
    def forward(x, bias, act, seed, p, stream, origin, namespace):
        return op(namespace, "act_dropout_fwd")(x, bias, act, seed, p, stream, origin)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, bias, ctx.act, seed, *ctx.rest = inputs
        ctx.save_for_backward(x, bias, seed)

    @staticmethod
    def backward(ctx, dy):
        x, bias, seed = ctx.saved_tensors
        p, stream, origin, namespace = ctx.rest
        need_dbias = ctx.needs_input_grad[1]
        dx, dbias = op(namespace, "act_dropout_bwd")(dy, x, bias, ctx.act, seed, p, stream, origin, need_dbias)
        grads = (dx, param_grad(dbias, bias.dtype if need_dbias else None, need_dbias))
        return *first_derivative_only("act_dropout", grads, dy, x, bias), *(None,) * 6

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(ActDropout, info, in_dims, args)


def act_dropout(
    input, act, p=0.5, bias=None, training=True, *, seed=None, stream=0, origin=(0, 0, 0), generator=None, backend=None
):
    """dropout(act(input + bias), p) in one kernel each way.

    Args:
        input: [..., R, C], floating, any strides.
        act: "gelu" (exact), "gelu_tanh", "relu", "silu" or "relu2" (squared ReLU).
        bias: [C] or None; may be float32 with a 16-bit input.
        p, seed, stream, origin, generator, backend: as in `dropout`.

    Returns: a contiguous tensor of the input's shape and dtype.
    Kept for backward: input (which its producer does not keep), the seed (8 bytes); neither activation nor mask.
    Raises: TypeError, ValueError for bad input; RuntimeError if a named backend cannot serve, or for a second derivative.
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"act_dropout: unknown activation {act!r}; choose one of {', '.join(ACTIVATIONS)}")
    check_floating("act_dropout", input=input, bias=bias)
    check_bias("act_dropout", "bias", bias, input.shape[-1] if input.dim() else 1)
    random = seeds.resolve(
        "act_dropout", input.shape, input.device, p, training, seed=seed, stream=stream, origin=origin, generator=generator
    )
    name = dispatch.choose("act_dropout", backend, input)
    if name == "reference":
        return reference.act_dropout(input, bias, act, random)
    y = call(ActDropout, *distinct(input, bias), act, *random, dispatch.NAMESPACE[name])
    if engine := saved.active():
        again = functools.partial(_again, act, *random[1:], dispatch.NAMESPACE[name])
        engine.register("act_dropout", again, (input, bias, random.seed), (y,))
    return y


def _again(act, p, stream, origin, namespace, x, bias, seed):
    return op(namespace, "act_dropout_fwd")(x, bias, act, seed, p, stream, origin)


def gelu_dropout(input, p=0.5, approximate="none", bias=None, training=True, **random):
    """dropout(gelu(input + bias), p): `act_dropout` under GELU's own argument.

    approximate: "none" for the exact GELU, "tanh" for its tanh form, as in torch.nn.functional.gelu.
    Kept for backward: input, the seed (8 bytes).
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu_dropout: approximate must be 'none' or 'tanh', got {approximate!r}")
    return act_dropout(input, "gelu" if approximate == "none" else "gelu_tanh", p, bias, training, **random)
