"""y = residual + dropout(x + bias, p).

forward    y  = residual + m * (x + bias)      m = keep * scale, regrown from (seed, index)
backward   dx = m * dy,  dresidual = dy        dbias = sum of dx over rows
saved      seed (8 bytes)                      never: x, the mask
"""

import torch

from .. import dispatch, reference, seeds
from ..library import fake
from ._common import (
    call,
    check_bias,
    check_floating,
    distinct,
    first_derivative_only,
    op,
    param_grad,
    promote,
    statistics_dtype,
    vmap_by_sample,
)


@fake("dropout_add_fwd")
def _(x, residual, bias, seed, p, stream, origin):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@fake("dropout_add_bwd")
def _(dy, seed, p, stream, origin, need_dbias):
    columns = dy.shape[-1] if need_dbias else 0
    return (
        torch.empty_like(dy, memory_format=torch.contiguous_format),
        dy.new_empty(columns, dtype=statistics_dtype(dy.dtype)),
    )


class DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(x, residual, bias, seed, p, stream, origin, namespace):
        return op(namespace, "dropout_add_fwd")(x, residual, bias, seed, p, stream, origin)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, bias, seed, *ctx.rest = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(seed)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        p, stream, origin, namespace = ctx.rest
        need_dx, need_dresidual, need_dbias, *_ = ctx.needs_input_grad
        dx = dbias = None
        if need_dbias or (need_dx and p != 0):
            dx, dbias = op(namespace, "dropout_add_bwd")(dy, seed, p, stream, origin, need_dbias)
        elif need_dx:
            dx = dy
        grads = (dx if need_dx else None, dy if need_dresidual else None, param_grad(dbias, ctx.bias_dtype, need_dbias))
        return *first_derivative_only("dropout_add", grads, dy), *(None,) * 5

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(DropoutAdd, info, in_dims, args)


def dropout_add(
    input, residual, p=0.5, bias=None, training=True, *, seed=None, stream=0, origin=(0, 0, 0), generator=None, backend=None
):
    """residual + dropout(input + bias, p) in one kernel each way.

    Args:
        input, residual: [..., R, C] of one shape, floating, any strides; promoted to a common dtype as torch's `+` does.
        bias: [C] or None; may be float32 with 16-bit inputs.
        p, seed, stream, origin, generator, backend: as in `dropout`.

    Returns: a contiguous tensor of that shape and dtype.
    Kept for backward: the seed, 8 bytes.
    Raises: TypeError, ValueError for bad input; RuntimeError if a named backend cannot serve, or for a second derivative.
    """
    check_floating("dropout_add", input=input, residual=residual, bias=bias)
    if input.shape != residual.shape:
        raise ValueError(
            f"dropout_add: input and residual must have one shape, got {tuple(input.shape)} and {tuple(residual.shape)}"
        )
    check_bias("dropout_add", "bias", bias, input.shape[-1] if input.dim() else 1)
    random = seeds.resolve(
        "dropout_add", input.shape, input.device, p, training, seed=seed, stream=stream, origin=origin, generator=generator
    )
    input, residual = promote(input, residual)
    name = dispatch.choose("dropout_add", backend, input)
    if name == "reference":
        return reference.dropout_add(input, residual, bias, random)
    return call(DropoutAdd, *distinct(input, residual, bias), *random, dispatch.NAMESPACE[name])
