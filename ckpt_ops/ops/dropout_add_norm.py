"""r = residual + dropout(x + input_bias, p);  y = norm(r).  Both are returned: r is the residual stream.

forward    r = residual + m * (x + input_bias)     m = keep * scale, regrown from (seed, index);  y = norm(r)
backward   dresidual = dr + norm's dx(dy, r)       dx = m * dresidual,  dinput_bias = sum of dx over rows
saved      r, 8 bytes a row (LayerNorm) or 4 (RMSNorm), seed (8 bytes)      never: x, residual, the mask
"""

import functools

import torch

from .. import dispatch, reference, saved, seeds
from ..library import fake
from . import layer_norm, rms_norm
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
from ._norm import check_shape, default_eps


def _fake_outputs(x, normalized_shape, statistics):
    rows = x.shape[: x.dim() - len(normalized_shape)]
    wide = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
    return *wide, *(x.new_empty(rows, dtype=statistics_dtype(x.dtype)) for _ in range(statistics))


def _fake_grads(dy, p, shapes):
    """dx (not made at p = 0, where it is dresidual), dresidual, then a parameter gradient a shape."""
    dresidual = torch.empty_like(dy, memory_format=torch.contiguous_format)
    dx = dy.new_empty(0) if p == 0 else torch.empty_like(dresidual)
    return dx, dresidual, *(dy.new_empty(shape, dtype=statistics_dtype(dy.dtype)) for shape in shapes)


@fake("dropout_add_layer_norm_fwd")
def _(x, residual, input_bias, weight, bias, normalized_shape, eps, seed, p, stream, origin):
    return _fake_outputs(x, normalized_shape, statistics=2)


@fake("dropout_add_layer_norm_bwd")
def _(dy, dr, r, mean, rstd, weight, normalized_shape, seed, p, stream, origin, need_dw, need_db, need_dinput_bias):
    shapes = [normalized_shape if need else (0,) for need in (need_dw, need_db)]
    return _fake_grads(dy, p, [*shapes, (dy.shape[-1] if need_dinput_bias else 0,)])


@fake("dropout_add_rms_norm_fwd")
def _(x, residual, input_bias, weight, normalized_shape, eps, offset, seed, p, stream, origin):
    return _fake_outputs(x, normalized_shape, statistics=1)


@fake("dropout_add_rms_norm_bwd")
def _(dy, dr, r, rstd, weight, normalized_shape, offset, seed, p, stream, origin, need_dw, need_dinput_bias):
    return _fake_grads(dy, p, [normalized_shape if need_dw else (0,), (dy.shape[-1] if need_dinput_bias else 0,)])


class DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(x, residual, input_bias, weight, bias, normalized_shape, eps, seed, p, stream, origin, namespace):
        return op(namespace, "dropout_add_layer_norm_fwd")(
            x, residual, input_bias, weight, bias, normalized_shape, eps, seed, p, stream, origin
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, input_bias, weight, bias, ctx.normalized_shape, _, seed, *ctx.rest = inputs
        _, r, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.param_dtypes = [t.dtype if t is not None else None for t in (input_bias, weight, bias)]
        ctx.save_for_backward(r, mean, rstd, weight, seed)

    @staticmethod
    def backward(ctx, dy, dr, _dmean, _drstd):
        r, mean, rstd, weight, seed = ctx.saved_tensors
        p, stream, origin, namespace = ctx.rest
        needs = ctx.needs_input_grad
        dy = torch.zeros_like(r) if dy is None else dy
        dx, dresidual, dw, db, dinput_bias = op(namespace, "dropout_add_layer_norm_bwd")(
            dy, dr, r, mean, rstd, weight, ctx.normalized_shape, seed, p, stream, origin, needs[3], needs[4], needs[2]
        )
        params = map(param_grad, (dinput_bias, dw, db), ctx.param_dtypes, needs[2:5])
        grads = (dresidual if p == 0 else dx, dresidual, *params)
        return *first_derivative_only("dropout_add_layer_norm", grads, dy, dr, r, weight), *(None,) * 7

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(DropoutAddLayerNorm, info, in_dims, args)


class DropoutAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x, residual, input_bias, weight, normalized_shape, eps, offset, seed, p, stream, origin, namespace):
        return op(namespace, "dropout_add_rms_norm_fwd")(
            x, residual, input_bias, weight, normalized_shape, eps, offset, seed, p, stream, origin
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, input_bias, weight, ctx.normalized_shape, _, ctx.offset, seed, *ctx.rest = inputs
        _, r, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        ctx.param_dtypes = [t.dtype if t is not None else None for t in (input_bias, weight)]
        ctx.save_for_backward(r, rstd, weight, seed)

    @staticmethod
    def backward(ctx, dy, dr, _drstd):
        r, rstd, weight, seed = ctx.saved_tensors
        p, stream, origin, namespace = ctx.rest
        needs = ctx.needs_input_grad
        dy = torch.zeros_like(r) if dy is None else dy
        dx, dresidual, dw, dinput_bias = op(namespace, "dropout_add_rms_norm_bwd")(
            dy, dr, r, rstd, weight, ctx.normalized_shape, ctx.offset, seed, p, stream, origin, needs[3], needs[2]
        )
        params = map(param_grad, (dinput_bias, dw), ctx.param_dtypes, needs[2:4])
        grads = (dresidual if p == 0 else dx, dresidual, *params)
        return *first_derivative_only("dropout_add_rms_norm", grads, dy, dr, r, weight), *(None,) * 8

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(DropoutAddRMSNorm, info, in_dims, args)


def _prepare(op_name, input, residual, normalized_shape, weight, bias, input_bias, p, training, random, backend):
    """Checks what both norms share; returns (input, residual, normalized_shape, Random, backend name)."""
    check_floating(op_name, input=input, residual=residual, weight=weight, bias=bias, input_bias=input_bias)
    if input.shape != residual.shape:
        raise ValueError(
            f"{op_name}: input and residual must have one shape, got {tuple(input.shape)} and {tuple(residual.shape)}"
        )
    shape = check_shape(op_name, input, normalized_shape, weight, bias)
    check_bias(op_name, "input_bias", input_bias, input.shape[-1])
    random = seeds.resolve(op_name, input.shape, input.device, p, training, **random)
    input, residual = promote(input, residual)
    return input, residual, shape, random, dispatch.choose(op_name, backend, input)


def dropout_add_layer_norm(
    input, residual, normalized_shape, weight=None, bias=None, eps=1e-5, *,
    p=0.0, input_bias=None, training=True, seed=None, stream=0, origin=(0, 0, 0), generator=None, backend=None,
):  # fmt: skip
    """(y, r): r = residual + dropout(input + input_bias, p), y = layer_norm(r), in one kernel each way.

    Args:
        input, residual: [..., *normalized_shape] of one shape, any strides; promoted to a common dtype as torch's `+` does.
        normalized_shape, weight, bias, eps: as in `layer_norm`.
        p: drop probability, 0 by default.  input_bias: [C] or None, added to the input before dropout.
        seed, stream, origin, generator, backend: as in `dropout`.

    Returns: y and r, contiguous, of the input's shape and common dtype. r is the new residual stream.
    Kept for backward: r, 8 bytes a row (16 for float64), the seed (8 bytes).
    Raises: TypeError, ValueError for bad input; RuntimeError if a named backend cannot serve, or for a second derivative.
    """
    random = dict(seed=seed, stream=stream, origin=origin, generator=generator)
    input, residual, shape, random, name = _prepare(
        "dropout_add_layer_norm", input, residual, normalized_shape, weight, bias, input_bias, p, training, random, backend
    )
    if name == "reference":
        return reference.dropout_add_layer_norm(input, residual, input_bias, weight, bias, shape, eps, random)
    tensors = distinct(input, residual, input_bias, weight, bias)
    namespace = dispatch.NAMESPACE[name]
    y, r = call(DropoutAddLayerNorm, *tensors, shape, float(eps), *random, namespace)[:2]
    if engine := saved.active():  # r is kept, and y is its norm
        again = functools.partial(layer_norm.again, shape, float(eps), namespace)
        engine.register("dropout_add_layer_norm", again, (r, weight, bias), (y,))
    return y, r


def dropout_add_rms_norm(
    input, residual, normalized_shape, weight=None, eps=None, *,
    offset=0.0, p=0.0, input_bias=None, training=True, seed=None, stream=0, origin=(0, 0, 0), generator=None, backend=None,
):  # fmt: skip
    """(y, r): r = residual + dropout(input + input_bias, p), y = rms_norm(r), in one kernel each way.

    Args: as in `dropout_add_layer_norm`; eps and offset as in `rms_norm`.
    Returns: y and r, contiguous, of the input's shape and common dtype.
    Kept for backward: r, 4 bytes a row (8 for float64), the seed (8 bytes).
    """
    random = dict(seed=seed, stream=stream, origin=origin, generator=generator)
    input, residual, shape, random, name = _prepare(
        "dropout_add_rms_norm", input, residual, normalized_shape, weight, None, input_bias, p, training, random, backend
    )
    eps = default_eps(eps, input.dtype)
    if name == "reference":
        return reference.dropout_add_rms_norm(input, residual, input_bias, weight, shape, eps, offset, random)
    tensors = distinct(input, residual, input_bias, weight)
    namespace = dispatch.NAMESPACE[name]
    y, r = call(DropoutAddRMSNorm, *tensors, shape, eps, float(offset), *random, namespace)[:2]
    if engine := saved.active():
        again = functools.partial(rms_norm.again, shape, eps, float(offset), namespace)
        engine.register("dropout_add_rms_norm", again, (r, weight), (y,))
    return y, r
