"""The mask contract a second time, in numpy and from its text alone: what every backend's masks are compared with."""

import numpy as np
import torch

MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter, key, rounds=7):
    """Philox4x32 (Salmon et al., SC 2011). counter: four uint64 arrays of 32-bit words; key: two ints."""
    x0, x1, x2, x3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for r in range(rounds):
        k0, k1 = (np.uint64((k + r * w) % 2**32) for k, w in zip(key, WEYL))
        first, second = x0 * MULTIPLIER[0], x2 * MULTIPLIER[1]
        x0, x1, x2, x3 = (second >> shift) ^ x1 ^ k0, second & low, (first >> shift) ^ x3 ^ k1, first & low
    return x0, x1, x2, x3


def threshold(p):
    return min(max(round(p * 65536), 1), 65535)


def scale(p):
    return {0: 1.0, 1: 0.0}.get(p, 65536 / (65536 - threshold(p)))


def mask(shape, p, seed, stream=0, origin=(0, 0, 0)):
    """Numpy bools of `shape`, True = kept."""
    if p in (0, 1):
        return np.full(shape, p == 0)
    rows, cols = (1, 1, *shape)[-2:]
    planes = int(np.prod(shape[:-2], dtype=np.int64))
    plane, row, col = np.meshgrid(
        *(np.arange(n, dtype=np.uint64) + np.uint64(o) for n, o in zip((planes, rows, cols), origin)), indexing="ij"
    )
    key = (seed % 2**64 % 2**32, seed % 2**64 >> 32)
    in_block = col % np.uint64(32)
    call = np.uint64(4) * (col // np.uint64(32)) + col % np.uint64(8) // np.uint64(2)
    words = np.stack(philox((call, row, plane, np.full_like(call, stream)), key))
    word = np.take_along_axis(words, (in_block // np.uint64(8)).astype(np.int64)[None], axis=0)[0]
    draw = (word >> (np.uint64(16) * (col % np.uint64(2)))) & np.uint64(0xFFFF)
    return (draw >= np.uint64(threshold(p))).reshape(shape)


def torch_mask(shape, p, seed, stream=0, origin=(0, 0, 0), device="cpu"):
    return torch.from_numpy(mask(tuple(shape), p, seed, stream, origin)).to(device)


def multiplier(shape, p, seed, dtype, device="cpu", **place):
    """mask * scale in `dtype`, what plain torch multiplies by."""
    return torch_mask(shape, p, seed, device=device, **place).to(dtype) * scale(p)
