"""y = dropout(x, p).

forward    y  = m * x            m = keep * scale, regrown from (seed, index)
backward   dx = m * dy           the same kernel
saved      seed (8 bytes)        never: the mask
"""

import functools

import torch

from .. import dispatch, reference, saved, seeds
from ..library import fake
from ._common import call, check_floating, first_derivative_only, op, vmap_by_sample


@fake("dropout_fwd")
def _(x, seed, p, stream, origin):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(x, seed, p, stream, origin, namespace):
        return op(namespace, "dropout_fwd")(x, seed, p, stream, origin)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, seed, *ctx.rest = inputs
        ctx.save_for_backward(seed)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        p, stream, origin, namespace = ctx.rest
        grads = (op(namespace, "dropout_fwd")(dy, seed, p, stream, origin),)
        return *first_derivative_only("dropout", grads, dy), None, None, None, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(Dropout, info, in_dims, args)


def dropout(input, p=0.5, training=True, *, seed=None, stream=0, origin=(0, 0, 0), generator=None, backend=None):
    """Zeroes elements with probability p and scales the others: torch.nn.functional.dropout with an 8-byte memory.

    Args:
        input: [..., R, C], floating, any strides.
        p: drop probability, rounded to 1/65536; the scale is that of the rounded one. p = 0 returns the input.
        seed: int, or int64 tensor of one element; drawn from torch's generator (or `generator`) if None.
        stream: int in [0, 2**32), tells masks of one seed apart.  origin: (plane, row, col) of element 0 (mask.py).
        backend: "cpu", "cuda", "triton" or "reference"; None chooses.

    Returns: a contiguous tensor of the input's shape and dtype.
    Kept for backward: the seed, 8 bytes.
    Raises: TypeError, ValueError for bad input; RuntimeError if a named backend cannot serve, or for a second derivative.
    Source: Srivastava et al., "Dropout", JMLR 2014.
    """
    check_floating("dropout", input=input)
    random = seeds.resolve(
        "dropout", input.shape, input.device, p, training, seed=seed, stream=stream, origin=origin, generator=generator
    )
    if random.p == 0:
        return input
    name = dispatch.choose("dropout", backend, input)
    if name == "reference":
        return reference.dropout(input, random)
    y = call(Dropout, input, *random, dispatch.NAMESPACE[name])
    if (engine := saved.active()) and engine.knows(input):  # else its input would have to be kept for it
        engine.register("dropout", functools.partial(_again, *random[1:], dispatch.NAMESPACE[name]), (input, random.seed), (y,))
    return y


def _again(p, stream, origin, namespace, x, seed):
    return op(namespace, "dropout_fwd")(x, seed, p, stream, origin)
