"""The one rule of how close is right, applied to the output and to every named gradient.

Truth is the reference in float64, of the same inputs and the same mask. In dtype d, an op may err at most twice what
plain torch errs in d (relative root mean square), plus one ulp of d. Plain torch gets its mask from the numpy Philox.
In float64 plain torch may be the very sums that truth is made of, which says nothing of its error: there it runs with
its sums in the opposite order as well, and the larger error counts.
"""

import math

import torch

import ckpt_ops
from helpers_ops import make, run, upstream
from helpers_philox import multiplier

SEED = -7_046_029_254_386_353_131  # negative, all bits in use


def error(result, truth):
    """Relative root mean square error; 0 for equal ones (empty ones, all zeros)."""
    truth, result = truth.double(), result.double()
    difference, size = torch.linalg.vector_norm(result - truth).item(), torch.linalg.vector_norm(truth).item()
    if difference == 0:
        return 0.0
    return difference / size if size != 0 else math.inf


def doubles(tensors):
    return {n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for n, t in tensors.items()}


def assert_close(op, tensors, p=0.0, seed=SEED, stream=0, origin=(0, 0, 0), shape=None):
    """Applies the rule to `op` on `tensors`, on the backend in force."""
    x = next(iter(tensors.values()))
    random = dict(p=p, seed=seed, stream=stream, origin=origin)
    ours = op.ours(tensors, **random)
    grads = upstream(op, ours)
    ours = run(op, tensors, random, grads)
    with ckpt_ops.use_backend("reference"):
        truth = run(op, doubles(tensors), random, grads)
    m = 1.0
    if op.random and p != 0:
        m = multiplier(
            op.mask_shape(op.shape if shape is None else shape), p, seed, x.dtype, x.device, stream=stream, origin=origin
        )
    plain = [run(op, tensors, dict(m=m), grads, call=op.plain)]
    if x.dtype == torch.float64:
        plain.append(run(op, tensors, dict(m=m), grads, call=op.plain_reversed))
    assert ours.keys() == truth.keys() == plain[0].keys()
    for name, true in truth.items():
        check_form(op, name, ours[name], tensors, x.dtype)
        mine, theirs = error(ours[name], true), max(error(results[name], true) for results in plain)
        allowed = 2 * theirs + torch.finfo(x.dtype).eps
        assert mine <= allowed, f"{op} {name} {x.dtype}: error {mine:.3g}, allowed {allowed:.3g} (plain torch: {theirs:.3g})"


def check_form(op, name, result, tensors, dtype):
    """An output is laid out as promised and of x's dtype; a gradient has its input's shape and dtype."""
    if name in op.outputs:
        rows = result.transpose(1, 2) if op.stem == "attention" else result  # [B, N, H, D] in memory
        assert result.dtype == dtype and rows.is_contiguous(), f"{op} {name}: {result.dtype}, strides {result.stride()}"
    else:
        source = tensors[name[1:]]
        assert (result.dtype, result.shape) == (source.dtype, source.shape), f"{op} {name}: {result.dtype} {result.shape}"


def assert_close_for(op, shape, dtype, device, p=0.0, **options):
    """assert_close on made-up inputs; options as in helpers_ops.make."""
    assert_close(op, make(op, shape, dtype, device, **options), p, shape=shape)
