"""y = layer_norm(x) * weight + bias, over the last dimensions.

    forward    xhat = (x - mean) * rstd,  y = xhat * weight + bias
    backward   g = dy * weight,  dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  dweight = sum dy * xhat,  dbias = sum dy
    saved      x, mean and rstd (8 bytes a row)      or, with save="output", y and rstd (4 bytes a row)

Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450.
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
from ._norm import as_shape, check_save, check_shape, output_tells_input, save_norm


@fake("layer_norm_fwd")
def _(x, weight, bias, normalized_shape, eps):
    rows = x.shape[: x.dim() - len(normalized_shape)]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, *(x.new_empty(rows, dtype=statistics_dtype(x.dtype)) for _ in range(2))


@fake("layer_norm_bwd")
def _(dy, saved, mean, rstd, weight, bias, normalized_shape, from_output, need_dx, need_dw, need_db):
    dtype = statistics_dtype(dy.dtype)
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format) if need_dx else dy.new_empty(0)
    return dx, *(dy.new_empty(normalized_shape if need else (0,), dtype=dtype) for need in (need_dw, need_db))


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, normalized_shape, eps, from_output, namespace):
        return op(namespace, "layer_norm_fwd")(x, weight, bias, normalized_shape, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, ctx.normalized_shape, _, ctx.from_output, ctx.namespace = inputs
        y, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)  # their gradients would be zeros, written in every backward
        ctx.param_dtypes = [t.dtype if t is not None else None for t in (weight, bias)]
        save_norm(ctx, x, y, mean, rstd, weight, bias, ctx.from_output)

    @staticmethod
    def backward(ctx, dy, _dmean, _drstd):
        if dy is None:
            return (None,) * 7
        saved, mean, rstd, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        dx, dw, db = op(ctx.namespace, "layer_norm_bwd")(
            dy, dy if saved is None else saved, mean, rstd, weight, bias, ctx.normalized_shape, ctx.from_output, *needs
        )
        grads = (dx if needs[0] else None, *map(param_grad, (dw, db), ctx.param_dtypes, needs[1:]))
        return *first_derivative_only("layer_norm", grads, dy, saved, weight), None, None, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(LayerNorm, info, in_dims, args)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, *, save="input", backend=None):
    """torch.nn.functional.layer_norm, with float32 statistics and a choice of what is kept.

    Args:
        input: [..., *normalized_shape], floating, any strides.
        normalized_shape: int or sizes, the last dimensions of the input.
        weight, bias: of normalized_shape or None, each on its own; may be float32 with a 16-bit input, which is not copied.
        eps: added to the variance.
        save: "input", or "output": the backward works from y, so that x need not stay alive. Where a weight is so
            near 0 or a row so short that y does not tell x (and under torch.compile and torch.func), x is kept after all.
        backend: "cpu", "cuda", "triton" or "reference"; None chooses.

    Returns: a contiguous tensor of the input's shape and dtype, under autocast too.
    Kept for backward: input and 8 bytes a row (16 for float64); or y and 4 bytes a row. For a bias alone: nothing.
    Raises: TypeError, ValueError for bad input; RuntimeError if a named backend cannot serve, or for a second derivative.
    Source: Ba, Kiros, Hinton, arXiv:1607.06450.
    """
    if save == "input":
        y = plain_call("layer_norm", input, backend, normalized_shape, weight, bias, eps)
        if y is not None:
            _register(y, input, weight, bias, as_shape(normalized_shape), eps, "ckpt_ops")
            return y
    check_floating("layer_norm", input=input, weight=weight, bias=bias)
    check_save("layer_norm", save)
    shape = check_shape("layer_norm", input, normalized_shape, weight, bias)
    name = dispatch.choose("layer_norm", backend, input)
    if name == "reference":
        return reference.layer_norm(input, weight, bias, shape, eps)
    from_output = save == "output" and output_tells_input(shape, weight, bias)
    namespace = dispatch.NAMESPACE[name]
    y = call(LayerNorm, *distinct(input, weight, bias), shape, float(eps), from_output, namespace)[0]
    if not from_output:
        _register(y, input, weight, bias, shape, float(eps), namespace)
    return y


def _register(y, input, weight, bias, shape, eps, namespace):
    if engine := saved.active():
        engine.register("layer_norm", functools.partial(again, shape, eps, namespace), (input, weight, bias), (y,))


def again(shape, eps, namespace, x, weight, bias):
    """y, from what the forward keeps."""
    return op(namespace, "layer_norm_fwd")(x, weight, bias, shape, eps)[0]
