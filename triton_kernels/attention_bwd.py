"""attention's backward: dk and dv in one pass over tiles of keys, dq in another over tiles of queries. No atomics.

With P = exp(s - lse), m = keep * scale of the mask and delta = rowsum(do * o):
    dv = (m * P)^T do,  dS = P * (m * (do v^T) - delta),  dk = scale * dS^T q,  dq = scale * dS k.
Every sum is made by one program in an order that shapes fix: the same bits every time. Dao, arXiv:2307.08691.
"""

import torch
import triton
import triton.language as tl

from ._attention_launch import (
    UNSPECIALIZED,
    configurations,
    describe,
    heads_inside,
    padded,
    rows_with_unit_stride,
    scale_into_q,
    tiled,
)
from ._attention_tile import (
    LOG2_E,
    NO_MASK,
    add_mask,
    base_2,
    compute_type,
    dot,
    hide,
    keys_seen,
    load_tile,
    store_tile,
    tile_offsets,
)
from ._launch import launch
from ._math import keep_tile, seed_key


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_delta_kernel(
    do_ptr, o_ptr, delta_ptr, stride_dob, stride_doh, stride_dom, stride_ob, stride_oh, stride_om, heads, Nq,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Nq, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    i0 = tl.program_id(0) % tiles * BLOCK_M
    i = i0 + tl.arange(0, BLOCK_M)
    do_ptr += b * stride_dob + h * stride_doh + i0.to(tl.int64) * stride_dom
    o_ptr += b * stride_ob + h * stride_oh + i0.to(tl.int64) * stride_om
    do = load_tile(do_ptr + tile_offsets(BLOCK_M, BLOCK_DV, stride_dom), i, Nq, DV, True)
    o = load_tile(o_ptr + tile_offsets(BLOCK_M, BLOCK_DV, stride_om), i, Nq, DV, True)
    C: tl.constexpr = compute_type(o_ptr)
    tl.store(delta_ptr + head * Nq + i, tl.sum(do.to(C) * o.to(C), 1), mask=i < Nq)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_bwd_dkdv_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, mask_ptr, seed_ptr,
    stride_dob, stride_doh, stride_dom, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn,
    heads, group, Nq, Nk, scale, threshold, stream, plane0, row0, col0, shift, heads_total,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = compute_type(q_ptr)
    tiles = tl.cdiv(Nk + shift, BLOCK_N)
    kv_head = (tl.program_id(0) // tiles).to(tl.int64)  # of all batches
    kv_heads = heads // group
    b, hk = kv_head // kv_heads, kv_head % kv_heads
    j0 = tl.program_id(0) % tiles * BLOCK_N - shift
    j = j0 + tl.arange(0, BLOCK_N)
    causal_shift = Nk - Nq if CAUSAL == 2 else 0

    k_ptr += b * stride_kb + hk * stride_kh + j0.to(tl.int64) * stride_kn
    v_ptr += b * stride_vb + hk * stride_vh + j0.to(tl.int64) * stride_vn
    k = load_tile(k_ptr + tile_offsets(BLOCK_N, BLOCK_D, stride_kn), j, Nk, D, True)
    v = load_tile(v_ptr + tile_offsets(BLOCK_N, BLOCK_DV, stride_vn), j, Nk, DV, True)
    q_tile = tile_offsets(BLOCK_M, BLOCK_D, stride_qm)
    do_tile = tile_offsets(BLOCK_M, BLOCK_DV, stride_dom)
    keep_scale = 65536.0 / (65536 - threshold).to(C)
    if DROPOUT:
        key0, key1 = seed_key(seed_ptr)

    scale2 = base_2(scale, C)
    dk = tl.zeros([BLOCK_N, BLOCK_D], C)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], C)
    # Queries before `begin` see no key of the tile, those from `whole` on see all of them.
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.maximum(j0 - causal_shift, 0) // BLOCK_M * BLOCK_M
        whole = begin + tl.cdiv(tl.maximum(j0 + BLOCK_N - 1 - causal_shift - begin, 0), BLOCK_M) * BLOCK_M
    for member in range(0, group):
        h = hk * group + member
        q_head = q_ptr + b * stride_qb + h * stride_qh
        do_head = do_ptr + b * stride_dob + h * stride_doh
        row_head = (b * heads + h) * Nq
        if MASK != NO_MASK:
            mask_head = mask_ptr + b * stride_mb + h * stride_mh
        for phase in tl.static_range(2 if CAUSAL else 1):
            CHECK: tl.constexpr = CAUSAL != 0 and phase == 0
            for i0 in tl.range(begin if CHECK else whole, tl.minimum(whole, Nq) if CHECK else Nq, BLOCK_M):
                i = i0 + tl.arange(0, BLOCK_M)
                q = load_tile(q_head + i0.to(tl.int64) * stride_qm + q_tile, i, Nq, D, True)
                do = load_tile(do_head + i0.to(tl.int64) * stride_dom + do_tile, i, Nq, DV, True)
                # A query that does not exist has weight 0; a key that does not is not stored.
                lse2 = tl.load(lse_ptr + row_head + i, mask=i < Nq, other=float("inf")) * LOG2_E
                delta = tl.load(delta_ptr + row_head + i, mask=i < Nq, other=0.0)
                s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], C)) * scale2
                if MASK != NO_MASK:
                    s = add_mask(s, mask_head, stride_mm, stride_mn, i, j, Nq, Nk, MASK)
                if CHECK:
                    s = hide(s, i, j, Nk, causal_shift, CAUSAL)
                p = tl.exp2(s - lse2[:, None])
                dp = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], C))
                dropped = p
                if DROPOUT:
                    plane = plane0 + b * heads_total + h
                    keep = keep_tile(
                        key0, key1, threshold, stream, plane, row0 + i, col0 + (j0 + shift).to(tl.int64), BLOCK_M, BLOCK_N
                    )
                    dropped = tl.where(keep, p, 0.0)
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                dv = dot(tl.trans(dropped.to(do.dtype)), do, dv)
                ds = p * (dp - delta[:, None])
                dk = dot(tl.trans(ds.to(q.dtype)), q, dk)

    if DROPOUT:
        dv *= keep_scale
    row = (b * Nk + j0) * kv_heads + hk
    store_tile(dk_ptr + row * D + tile_offsets(BLOCK_N, BLOCK_D, kv_heads * D), dk * scale, j, Nk, D)
    store_tile(dv_ptr + row * DV + tile_offsets(BLOCK_N, BLOCK_DV, kv_heads * DV), dv, j, Nk, DV)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_bwd_dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, mask_ptr, seed_ptr,
    stride_dob, stride_doh, stride_dom, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn,
    heads, group, Nq, Nk, scale, threshold, stream, plane0, row0, col0, shift, heads_total,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = compute_type(q_ptr)
    tiles = tl.cdiv(Nq, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of all batches
    b, h = head // heads, head % heads
    i0 = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M  # the longest causal rows first
    i = i0 + tl.arange(0, BLOCK_M)
    causal_shift = Nk - Nq if CAUSAL == 2 else 0

    q_ptr += b * stride_qb + h * stride_qh + i0.to(tl.int64) * stride_qm
    do_ptr += b * stride_dob + h * stride_doh + i0.to(tl.int64) * stride_dom
    k_ptr += b * stride_kb + h // group * stride_kh
    v_ptr += b * stride_vb + h // group * stride_vh
    if MASK != NO_MASK:
        mask_ptr += b * stride_mb + h * stride_mh
    k_tile = tile_offsets(BLOCK_N, BLOCK_D, stride_kn)
    v_tile = tile_offsets(BLOCK_N, BLOCK_DV, stride_vn)
    q = load_tile(q_ptr + tile_offsets(BLOCK_M, BLOCK_D, stride_qm), i, Nq, D, True)
    do = load_tile(do_ptr + tile_offsets(BLOCK_M, BLOCK_DV, stride_dom), i, Nq, DV, True)
    lse2 = tl.load(lse_ptr + head * Nq + i, mask=i < Nq, other=float("inf")) * LOG2_E
    delta = tl.load(delta_ptr + head * Nq + i, mask=i < Nq, other=0.0)
    keep_scale = 65536.0 / (65536 - threshold).to(C)
    if DROPOUT:
        key0, key1 = seed_key(seed_ptr)
        plane = plane0 + b * heads_total + h

    scale2 = base_2(scale, C)
    dq = tl.zeros([BLOCK_M, BLOCK_D], C)
    edge, stop = keys_seen(i0, shift, Nq, Nk, causal_shift, CAUSAL, BLOCK_M, BLOCK_N)
    for phase in tl.static_range(2):
        CHECK: tl.constexpr = phase == 1
        for j0 in tl.range(edge if CHECK else -shift, stop if CHECK else edge, BLOCK_N):
            j = j0 + tl.arange(0, BLOCK_N)
            k = load_tile(k_ptr + j0.to(tl.int64) * stride_kn + k_tile, j, Nk, D, CHECK)
            v = load_tile(v_ptr + j0.to(tl.int64) * stride_vn + v_tile, j, Nk, DV, CHECK)
            s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], C)) * scale2
            if MASK != NO_MASK:
                s = add_mask(s, mask_ptr, stride_mm, stride_mn, i, j, Nq, Nk, MASK)
            if CHECK:
                s = hide(s, i, j, Nk, causal_shift, CAUSAL)
            p = tl.exp2(s - lse2[:, None])
            dp = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], C))
            if DROPOUT:
                keep = keep_tile(
                    key0, key1, threshold, stream, plane, row0 + i, col0 + (j0 + shift).to(tl.int64), BLOCK_M, BLOCK_N
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            dq = dot(ds.to(k.dtype), k, dq)

    dq_ptr += ((b * Nq + i0) * heads + h) * D
    store_tile(dq_ptr + tile_offsets(BLOCK_M, BLOCK_D, heads * D), dq * scale, i, Nq, D)


def attention_bwd(do, q, k, v, o, lse, attn_mask, causal, scale, seed, p, stream, origin, heads_total):
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    dq = heads_inside(q, batch, heads, queries, q.shape[3])
    dk = heads_inside(q, batch, kv_heads, keys, q.shape[3])
    dv = heads_inside(q, batch, kv_heads, keys, v.shape[3])
    if p == 1 or lse.numel() == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, scale, factor = scale_into_q(q, scale)
    do, q, k, v, o = rows_with_unit_stride(do, q, k, v, o)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    launch(
        _attention_delta_kernel, (batch * heads * triton.cdiv(queries, 64),), q,
        do, o, delta, *do.stride()[:3], *o.stride()[:3], heads, queries,
        DV=v.shape[3], BLOCK_M=64, BLOCK_DV=padded(v.shape[3]),
    )  # fmt: skip
    call = describe("attention_bwd", q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total)
    strides = (*do.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    tiled(
        _attention_bwd_dkdv_kernel, configurations("dkdv", q, v), lambda m, n: batch * kv_heads * triton.cdiv(keys + call.shift, n), q,
        (do, q, k, v, lse, delta, dk, dv, call.attn_mask, call.seed, *strides, *call.arguments), call.constants,
    )  # fmt: skip
    tiled(
        _attention_bwd_dq_kernel, configurations("dq", q, v), lambda m, n: batch * heads * triton.cdiv(queries, m), q,
        (do, q, k, v, lse, delta, dq, call.attn_mask, call.seed, *strides, *call.arguments), call.constants,
    )  # fmt: skip
    return dq if factor == 1 else dq.mul_(factor), dk, dv
