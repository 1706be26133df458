"""y = rms_norm(x) * (weight + offset), over the last dimensions.

    forward    xhat = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps),  y = xhat * (weight + offset)
    backward   g = dy * (weight + offset),  dx = rstd * (g - xhat * mean(g * xhat)),  dweight = sum dy * xhat
    saved      x and rstd (4 bytes a row)      or, with save="output", y and rstd (4 bytes a row)

Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

import functools

import torch

from .. import dispatch, reference, saved
from ..library import fake
from ._common import (
    call,
    check_floating,
    distinct,
    first_derivative_only,
    op,
    param_grad,
    plain_call,
    statistics_dtype,
    vmap_by_sample,
)
from ._norm import as_shape, check_save, check_shape, default_eps, output_tells_input, save_norm


@fake("rms_norm_fwd")
def _(x, weight, normalized_shape, eps, offset):
    rows = x.shape[: x.dim() - len(normalized_shape)]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(rows, dtype=statistics_dtype(x.dtype))


@fake("rms_norm_bwd")
def _(dy, saved, rstd, weight, normalized_shape, offset, from_output, need_dx, need_dw):
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format) if need_dx else dy.new_empty(0)
    return dx, dy.new_empty(normalized_shape if need_dw else (0,), dtype=statistics_dtype(dy.dtype))


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, normalized_shape, eps, offset, from_output, namespace):
        return op(namespace, "rms_norm_fwd")(x, weight, normalized_shape, eps, offset)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, ctx.normalized_shape, _, ctx.offset, ctx.from_output, ctx.namespace = inputs
        y, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        ctx.weight_dtype = None if weight is None else weight.dtype
        save_norm(ctx, x, y, None, rstd, weight, None, ctx.from_output)

    @staticmethod
    def backward(ctx, dy, _drstd):
        if dy is None:
            return (None,) * 7
        saved, _, rstd, weight, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        dx, dw = op(ctx.namespace, "rms_norm_bwd")(
            dy, saved, rstd, weight, ctx.normalized_shape, ctx.offset, ctx.from_output, *needs
        )
        grads = (dx if needs[0] else None, param_grad(dw, ctx.weight_dtype, needs[1]))
        return *first_derivative_only("rms_norm", grads, dy, saved, weight), *(None,) * 5

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(RMSNorm, info, in_dims, args)


def rms_norm(input, normalized_shape, weight=None, eps=None, *, offset=0.0, save="input", backend=None):
    """torch.nn.functional.rms_norm, with float32 statistics, a weight offset and a choice of what is kept.

    Args:
        input: [..., *normalized_shape], floating, any strides.
        normalized_shape: int or sizes, the last dimensions of the input.
        weight: of normalized_shape or None; may be float32 with a 16-bit input, which is not copied.
        eps: added to the mean square; None is the machine epsilon of float32 (float64 for float64), torch's default.
        offset: added to the weight in float32: 1.0 for the families that store weight - 1.
        save, backend: as in `layer_norm`.

    Returns: a contiguous tensor of the input's shape and dtype, under autocast too.
    Kept for backward: input and 4 bytes a row (8 for float64); or y and 4 bytes a row.
    Raises: TypeError, ValueError for bad input; RuntimeError if a named backend cannot serve, or for a second derivative.
    Source: Zhang, Sennrich, arXiv:1910.07467.
    """
    if save == "input":
        y = plain_call("rms_norm", input, backend, normalized_shape, weight, eps, offset)
        if y is not None:
            _register(y, input, weight, as_shape(normalized_shape), eps, offset, "ckpt_ops")
            return y
    check_floating("rms_norm", input=input, weight=weight)
    check_save("rms_norm", save)
    shape = check_shape("rms_norm", input, normalized_shape, weight)
    eps = default_eps(eps, input.dtype)
    name = dispatch.choose("rms_norm", backend, input)
    if name == "reference":
        return reference.rms_norm(input, weight, shape, eps, offset)
    from_output = save == "output" and output_tells_input(shape, weight, offset=offset)
    namespace = dispatch.NAMESPACE[name]
    y = call(RMSNorm, *distinct(input, weight), shape, eps, float(offset), from_output, namespace)[0]
    if not from_output:
        _register(y, input, weight, shape, eps, float(offset), namespace)
    return y


def _register(y, input, weight, shape, eps, offset, namespace):
    if engine := saved.active():
        recipe = functools.partial(again, shape, default_eps(eps, input.dtype), offset, namespace)
        engine.register("rms_norm", recipe, (input, weight), (y,))


def again(shape, eps, offset, namespace, x, weight):
    """y, from what the forward keeps."""
    return op(namespace, "rms_norm_fwd")(x, weight, shape, eps, offset)[0]
