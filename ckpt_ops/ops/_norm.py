"""Arguments that all norms share."""

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor


def as_shape(normalized_shape):
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def check_shape(name, input, normalized_shape, weight, bias=None):
    """normalized_shape as a tuple; ValueError unless it ends the input's shape and the parameters have it."""
    shape = as_shape(normalized_shape)
    if len(shape) == 0 or tuple(input.shape[-len(shape) :]) != shape or len(shape) > input.dim():
        raise ValueError(
            f"{name}: normalized_shape {shape} must have at least one dimension and end the input's shape, "
            f"which is {tuple(input.shape)}"
        )
    for label, t in (("weight", weight), ("bias", bias)):
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{name}: {label} must have shape {shape} (normalized_shape), got {tuple(t.shape)}")
    return shape


def check_save(name, save):
    if save not in ("input", "output"):
        raise ValueError(f"{name}: save must be 'input' or 'output', got {save!r}")


def default_eps(eps, dtype):
    """torch's default: the machine epsilon of the dtype that statistics are computed in."""
    if eps is not None:
        return float(eps)
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def output_tells_input(shape, weight, bias=None, offset=0.0):
    """Whether xhat = (y - bias) / (weight + offset) recovers xhat from y without amplifying y's rounding.

    Reads the parameters on the host (on a GPU: a synchronisation). Where they have no values to read, under
    torch.compile and torch.func, the answer is no, and the norm keeps its input.
    """
    if weight is None:
        return math.prod(shape) >= _FEWEST_COLUMNS
    if torch.compiler.is_compiling() or weight.is_meta or isinstance(weight, FakeTensor):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return False
    if math.prod(shape) < _FEWEST_COLUMNS:
        return False
    w = (weight.detach() + offset).abs()
    if bias is None:
        return bool((w >= _SMALLEST_WEIGHT).all())
    return bool(((w >= _SMALLEST_WEIGHT) & (bias.detach().abs() <= _LARGEST_BIAS * w)).all())


_FEWEST_COLUMNS = 16  # in a shorter row dx is a small difference of large terms, and y's rounding shows in it
_SMALLEST_WEIGHT = 2.0**-8  # y keeps clear of float16's subnormals
_LARGEST_BIAS = 4.0  # times the weight: y's rounding grows by at most that in xhat


def save_norm(ctx, x, y, mean, rstd, weight, bias, from_output):
    """What a norm keeps, by which of (x, weight, bias) need gradients: nothing for a bias alone."""
    need_dx, need_dw, need_db = ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None
    if not (need_dx or need_dw):
        ctx.save_for_backward(None, None, None, None, None)
    elif from_output:
        ctx.save_for_backward(y, None, rstd, weight, bias if need_db else None)
    else:
        ctx.save_for_backward(x, mean, rstd, weight if need_dx else None, None)
