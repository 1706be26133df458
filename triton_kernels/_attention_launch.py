"""What attention's launchers share: the arguments of a call, the layout of results."""

from typing import NamedTuple

import torch
import triton

from ._launch import mask_arguments

# Arguments of many values: none of them is worth a compilation of its own.
UNSPECIALIZED = (
    "rows", "heads", "group", "Nq", "Nk", "threshold", "stream", "plane0", "row0", "col0", "shift", "heads_total",
)  # fmt: skip


class Call(NamedTuple):
    attn_mask: torch.Tensor | None
    seed: torch.Tensor | None
    group: int
    threshold: int
    shift: int
    mask_strides: tuple
    arguments: tuple  # from heads to heads_total, as every kernel takes them
    constants: dict


def describe(op, q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total):
    """What the launches of all passes have in common."""
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"{op}: q, k, v must share a dtype")
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1:3]
    if k.shape != (batch, kv_heads, keys, size) or v.shape[:3] != k.shape[:3] or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: shapes do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    kind, strides = 0, (0, 0, 0, 0)
    if attn_mask is not None:
        if attn_mask.shape != (batch, heads, queries, keys):
            raise ValueError(f"{op}: attn_mask must be [B, Hq, Nq, Nk]")
        strides, kind = attn_mask.stride(), 1 if attn_mask.dtype == torch.bool else 2
        attn_mask = attn_mask.view(torch.uint8) if kind == 1 else attn_mask
    mask = mask_arguments(op, seed, p, stream, origin, q.device)
    arguments = (
        heads, heads // kv_heads, queries, keys, scale,
        mask.threshold, mask.stream, mask.plane0, mask.row0, mask.col0, mask.shift, heads_total,
    )  # fmt: skip
    constants = dict(
        D=size, DV=v.shape[3], CAUSAL=causal, MASK=kind, DROPOUT=mask.draws, BLOCK_D=padded(size), BLOCK_DV=padded(v.shape[3])
    )
    return Call(attn_mask, mask.seed, heads // kv_heads, mask.threshold, mask.shift, strides, arguments, constants)


def padded(size):
    """A head dimension as a tile holds it: a power of two, at least what a tensor core takes."""
    return max(16, triton.next_power_of_2(size))


def scale_into_q(q, scale):
    """(q, scale, factor): kernels take a row's maximum before they multiply by the scale, so it must be positive.

    A negative or zero one moves into q; so does any of float64, as a kernel argument has 32 bits. dq is to be
    multiplied by `factor`.
    """
    if q.dtype == torch.float64:
        return q * scale, 1.0, scale
    if scale > 0:
        return q, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return q * sign, scale * sign or 1.0, sign


def rows_with_unit_stride(*tensors):
    """[B, H, N, D] with the last stride 1, and rows near enough that a tile's offsets fit 32 bits: a copy where not."""
    return tuple(t if (t.stride(3) == 1 or t.shape[3] == 1) and t.stride(2) < 2**23 else t.contiguous() for t in tensors)


def heads_inside(like, batch, heads, length, size):
    """Empty [B, H, N, D], laid out as [B, N, H, D]: what a projection writes and reads."""
    return like.new_empty((batch, length, heads, size)).transpose(1, 2)
