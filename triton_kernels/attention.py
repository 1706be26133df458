"""attention: softmax(scale * q k^T + mask) v, the probabilities dropped by the mask tile of _math.py. FlashAttention-2.

A program owns a tile of queries and walks the keys they see: tiles that all of them see first, without any check, then
those at an edge. Dao, arXiv:2307.08691.
"""

import triton
import triton.language as tl

from ..ops._common import statistics_dtype
from ._attention_launch import UNSPECIALIZED, describe, heads_inside, rows_with_unit_stride, scale_into_q
from ._attention_tile import (
    LN_2,
    NO_MASK,
    add_mask,
    base_2,
    compute_type,
    dot,
    hide,
    int64,
    keys_seen,
    load_tile,
    store_tile,
    tile_offsets,
)  # fmt: skip
from ._attention_tiles import compile_cases, tiled
from ._math import keep_tile, seed_key, true_scale
from .attention_bwd import attention_bwd

__all__ = ("attention_fwd", "attention_bwd")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, mask_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn,
    heads, group, Nq, Nk, scale, threshold, stream, plane0, row0, col0, shift, heads_total,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = compute_type(q_ptr.dtype.element_ty)
    tiles = tl.cdiv(Nq, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of all batches
    b, h = head // heads, head % heads
    i0 = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M  # the longest causal rows first
    i = i0 + tl.arange(0, BLOCK_M)
    causal_shift = Nk - Nq if CAUSAL == 2 else 0

    q_ptr += b * stride_qb + h * stride_qh + int64(i0) * stride_qm
    k_ptr += b * stride_kb + h // group * stride_kh
    v_ptr += b * stride_vb + h // group * stride_vh
    if MASK != NO_MASK:
        mask_ptr += b * stride_mb + h * stride_mh
    k_tile = tile_offsets(BLOCK_N, BLOCK_D, stride_kn)
    v_tile = tile_offsets(BLOCK_N, BLOCK_DV, stride_vn)
    q = load_tile(q_ptr + tile_offsets(BLOCK_M, BLOCK_D, stride_qm), i, Nq, D)
    if DROPOUT:
        key0, key1 = seed_key(seed_ptr)
        plane = plane0 + b * heads_total + h

    scale2 = base_2(scale, C)
    top = tl.full([BLOCK_M], float("-inf"), C)  # of the row's base-2 scores so far
    total = tl.zeros([BLOCK_M], C)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], C)
    edge, stop = keys_seen(i0, shift, Nq, Nk, causal_shift, CAUSAL, BLOCK_M, BLOCK_N)
    for j0 in tl.range(-shift, stop, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + int64(j0) * stride_kn + k_tile, j, Nk, D)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], C))
        unit = scale2
        if MASK != NO_MASK:
            s = add_mask(s * scale2, mask_ptr, stride_mm, stride_mn, i, j, Nq, Nk, MASK)
            unit = 1.0
        if j0 >= edge:
            s = hide(s, i, j, Nk, causal_shift, CAUSAL)
        above = tl.maximum(top, tl.max(s, 1) * unit)  # unit > 0
        zero = tl.where(above == float("-inf"), 0.0, above)  # nothing seen yet
        p = tl.exp2(s * unit - zero[:, None])
        shrink = tl.exp2(top - zero)
        total = total * shrink + tl.sum(p, 1)
        top = above
        if DROPOUT:
            keep = keep_tile(key0, key1, threshold, stream, plane, row0 + i, col0 + int64(j0 + shift), BLOCK_M, BLOCK_N)
            p = tl.where(keep, p, 0.0)
        v = load_tile(v_ptr + int64(j0) * stride_vn + v_tile, j, Nk, DV)
        acc = dot(p.to(v.dtype), v, acc * shrink[:, None])

    seen = total != 0  # a query that sees no key gives 0, and a finite statistic
    factor = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
    if DROPOUT:
        factor *= true_scale(threshold, C)
    lse = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, 0.0)
    tl.store(lse_ptr + head * Nq + i, lse, mask=i < Nq)
    o_ptr += ((b * Nq + i0) * heads + h) * DV
    store_tile(o_ptr + tile_offsets(BLOCK_M, BLOCK_DV, int64(heads * DV)), acc * factor[:, None], i, Nq, DV)


COMPILE_CASES = compile_cases(_attention_fwd_kernel, "fwd")


def attention_fwd(q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total):
    batch, heads, queries, _ = q.shape
    o = heads_inside(q, batch, heads, queries, v.shape[3])
    lse = q.new_empty((batch, heads, queries), dtype=statistics_dtype(q.dtype))
    if p == 1:
        return o.zero_(), lse.zero_()
    if lse.numel() == 0:
        return o, lse
    q, scale, _ = scale_into_q(q, scale)
    q, k, v = rows_with_unit_stride(q, k, v)
    call = describe("attention_fwd", q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    arguments = (q, k, v, o, lse, call.attn_mask, call.seed, *strides, *call.mask_strides, *call.arguments)
    tiled(
        _attention_fwd_kernel, "fwd", lambda m, n: batch * heads * triton.cdiv(queries, m),
        (batch * heads, call.group, queries, k.shape[2]), q, arguments, call.constants,
    )  # fmt: skip
    return o, lse
