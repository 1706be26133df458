"""The mask contract, public.

A mask belongs to a tensor of shape [..., R, C]. An element's place is (plane, row, col): col in the last dimension,
row in the one before, plane the row-major index of the leading ones (missing ones are 0), each plus `origin`.

    key        (seed & 0xffffffff, seed >> 32)
    counter    (4 * (col // 32) + (col % 8) // 2, row, plane, stream)     Philox4x32, 7 rounds
    draw       16 bits: word (col % 32) // 8, half col % 2 (0 = low)
    keep       draw >= threshold,  threshold = min(max(round_half_even(p * 65536), 1), 65535)
    scale      65536 / (65536 - threshold)

Nothing else enters: no tile, thread, stride or device. A shard that passes the place of its first element as
`origin` gets its part of the whole tensor's mask.
"""

import torch

from . import dispatch, reference, seeds
from .library import fake, kernels


def dropout_mask(shape, p, seed, *, stream=0, origin=(0, 0, 0), device=None, backend=None):
    """The mask that every op of this package applies for (seed, stream, origin) on a tensor of `shape`.

    Args:
        shape: the tensor's shape.  p: drop probability in [0, 1].
        seed: int, or an int64 tensor of one element.  stream: int in [0, 2^32).
        origin: (plane0, row0, col0), the place of element 0 in the whole tensor.
        device: where the mask is made; the seed's device by default.

    Returns:
        bool tensor of `shape`, True = kept. Multiply by `dropout_scale(p)` for what the ops apply.
    """
    shape = torch.Size(shape)
    if device is None:
        device = seed.device if isinstance(seed, torch.Tensor) else torch.get_default_device()
    seeds.check_place("dropout_mask", shape, p, stream, origin)
    seed = seeds.as_tensor("dropout_mask", seed, torch.device(device))
    name = dispatch.choose("dropout_mask", backend, torch.empty(0, device=device))
    if name == "reference":
        return reference.dropout_mask(shape, p, seed, stream, origin, device=device)
    return kernels(dispatch.NAMESPACE[name]).dropout_mask(seed, shape, p, stream, origin)


def dropout_scale(p):
    """What a kept element is multiplied by: 65536 / (65536 - threshold), so that E[mask * scale] = 1; 0 at p = 1."""
    return reference.scale(p)


@fake("dropout_mask")
def _(seed, shape, p, stream, origin):
    return seed.new_empty(shape, dtype=torch.bool)
