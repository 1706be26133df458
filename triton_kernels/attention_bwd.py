"""attention's backward: dk and dv in one pass over tiles of keys, dq in another over tiles of queries. No atomics.

With P = exp(s - lse), m = keep * scale of the mask and delta = rowsum(do * o):
    dv = (m * P)^T do,  dS = P * (m * (do v^T) - delta),  dk = scale * dS^T q,  dq = scale * dS k.
m's own scale is left out of the loops: it multiplies what comes out of them, and divides delta.
Every sum is made by one program in an order that shapes fix: the same bits every time. Dao, arXiv:2307.08691.
"""

import triton
import triton.language as tl

from ._attention_launch import (
    UNSPECIALIZED,
    describe,
    heads_inside,
    padded,
    rows_with_unit_stride,
    scale_into_q,
)
from ._attention_tile import (
    LOG2_E,
    NO_MASK,
    add_mask,
    base_2,
    compute_type,
    dot,
    hide,
    int64,
    keep_keys_by_queries,
    keys_seen,
    load_tile,
    store_tile,
    tile_offsets,
)
from ._attention_tiles import compile_cases, tiled
from ._launch import CompileCase, launch
from ._math import keep_tile, seed_key, true_scale

ROWS = 128  # statistics of queries are padded to a multiple of it, and so of every tile


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_bwd_rows_kernel(
    do_ptr, o_ptr, lse_ptr, lse2_ptr, delta_ptr, stride_dob, stride_doh, stride_dom, stride_ob, stride_oh, stride_om,
    rows, heads, Nq, threshold, DV: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """lse2 and delta / scale of the mask, of `rows` queries a head: past the last there is lse2 = inf, which makes P 0."""
    tiles = rows // BLOCK_M
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    i0 = tl.program_id(0) % tiles * BLOCK_M
    i = i0 + tl.arange(0, BLOCK_M)
    do_ptr += b * stride_dob + h * stride_doh + int64(i0) * stride_dom
    o_ptr += b * stride_ob + h * stride_oh + int64(i0) * stride_om
    do = load_tile(do_ptr + tile_offsets(BLOCK_M, BLOCK_DV, stride_dom), i, Nq, DV)
    o = load_tile(o_ptr + tile_offsets(BLOCK_M, BLOCK_DV, stride_om), i, Nq, DV)
    C: tl.constexpr = compute_type(o_ptr.dtype.element_ty)
    delta = tl.sum(do.to(C) * o.to(C), 1)
    if DROPOUT:
        delta /= true_scale(threshold, C)
    tl.store(delta_ptr + head * rows + i, delta)
    lse = tl.load(lse_ptr + head * Nq + i, mask=i < Nq, other=float("inf"))
    tl.store(lse2_ptr + head * rows + i, lse * LOG2_E)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_bwd_dkdv_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, mask_ptr, seed_ptr,
    stride_dob, stride_doh, stride_dom, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn,
    rows, heads, group, Nq, Nk, scale, threshold, stream, plane0, row0, col0, shift, heads_total,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = compute_type(q_ptr.dtype.element_ty)
    tiles = tl.cdiv(Nk + shift, BLOCK_N)
    kv_head = (tl.program_id(0) // tiles).to(tl.int64)  # of all batches
    kv_heads = heads // group
    b, hk = kv_head // kv_heads, kv_head % kv_heads
    j0 = tl.program_id(0) % tiles * BLOCK_N - shift
    j = j0 + tl.arange(0, BLOCK_N)
    causal_shift = Nk - Nq if CAUSAL == 2 else 0

    k_ptr += b * stride_kb + hk * stride_kh + int64(j0) * stride_kn
    v_ptr += b * stride_vb + hk * stride_vh + int64(j0) * stride_vn
    k = load_tile(k_ptr + tile_offsets(BLOCK_N, BLOCK_D, stride_kn), j, Nk, D)
    v = load_tile(v_ptr + tile_offsets(BLOCK_N, BLOCK_DV, stride_vn), j, Nk, DV)
    q_tile = tile_offsets(BLOCK_M, BLOCK_D, stride_qm)
    do_tile = tile_offsets(BLOCK_M, BLOCK_DV, stride_dom)
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
        row_head = (b * heads + h) * rows
        if MASK != NO_MASK:
            mask_head = mask_ptr + b * stride_mb + h * stride_mh
        for i0 in tl.range(begin, Nq, BLOCK_M):
            i = i0 + tl.arange(0, BLOCK_M)
            q = load_tile(q_head + int64(i0) * stride_qm + q_tile, i, Nq, D)
            do = load_tile(do_head + int64(i0) * stride_dom + do_tile, i, Nq, DV)
            # Queries that do not exist have statistics too, and weight 0; keys that do not are not stored.
            lse2 = tl.load(lse2_ptr + row_head + i)
            delta = tl.load(delta_ptr + row_head + i)
            # Scores are [keys, queries]: then P and dS are left operands as they are, in registers.
            s = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], C)) * scale2
            if MASK != NO_MASK:
                s = add_mask(s, mask_head, stride_mn, stride_mm, j, i, Nk, Nq, MASK)
            if CAUSAL and i0 < whole:
                s = tl.where(j[:, None] <= (i + causal_shift)[None, :], s, float("-inf"))
            p = tl.exp2(s - lse2[None, :])
            dp = dot(v, tl.trans(do), tl.zeros([BLOCK_N, BLOCK_M], C))
            dropped = p
            if DROPOUT:
                plane = plane0 + b * heads_total + h
                keep = keep_keys_by_queries(
                    key0, key1, threshold, stream, plane, row0 + i, col0 + int64(j0 + shift), BLOCK_M, BLOCK_N
                )
                dropped = tl.where(keep, p, 0.0)
                dp = tl.where(keep, dp, 0.0)
            dv = dot(dropped.to(do.dtype), do, dv)
            ds = p * (dp - delta[None, :])
            dk = dot(ds.to(q.dtype), q, dk)

    if DROPOUT:
        keep_scale = true_scale(threshold, C)
        dk *= keep_scale
        dv *= keep_scale
    row = (b * Nk + j0) * kv_heads + hk
    store_tile(dk_ptr + row * D + tile_offsets(BLOCK_N, BLOCK_D, int64(kv_heads * D)), dk * scale, j, Nk, D)
    store_tile(dv_ptr + row * DV + tile_offsets(BLOCK_N, BLOCK_DV, int64(kv_heads * DV)), dv, j, Nk, DV)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_bwd_dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse2_ptr, delta_ptr, dq_ptr, mask_ptr, seed_ptr,
    stride_dob, stride_doh, stride_dom, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn,
    rows, heads, group, Nq, Nk, scale, threshold, stream, plane0, row0, col0, shift, heads_total,
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
    do_ptr += b * stride_dob + h * stride_doh + int64(i0) * stride_dom
    k_ptr += b * stride_kb + h // group * stride_kh
    v_ptr += b * stride_vb + h // group * stride_vh
    if MASK != NO_MASK:
        mask_ptr += b * stride_mb + h * stride_mh
    k_tile = tile_offsets(BLOCK_N, BLOCK_D, stride_kn)
    v_tile = tile_offsets(BLOCK_N, BLOCK_DV, stride_vn)
    q = load_tile(q_ptr + tile_offsets(BLOCK_M, BLOCK_D, stride_qm), i, Nq, D)
    do = load_tile(do_ptr + tile_offsets(BLOCK_M, BLOCK_DV, stride_dom), i, Nq, DV)
    lse2 = tl.load(lse2_ptr + head * rows + i)
    delta = tl.load(delta_ptr + head * rows + i)
    if DROPOUT:
        key0, key1 = seed_key(seed_ptr)
        plane = plane0 + b * heads_total + h

    scale2 = base_2(scale, C)
    dq = tl.zeros([BLOCK_M, BLOCK_D], C)
    edge, stop = keys_seen(i0, shift, Nq, Nk, causal_shift, CAUSAL, BLOCK_M, BLOCK_N)
    for j0 in tl.range(-shift, stop, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + int64(j0) * stride_kn + k_tile, j, Nk, D)
        v = load_tile(v_ptr + int64(j0) * stride_vn + v_tile, j, Nk, DV)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], C)) * scale2
        if MASK != NO_MASK:
            s = add_mask(s, mask_ptr, stride_mm, stride_mn, i, j, Nq, Nk, MASK)
        if j0 >= edge:
            s = hide(s, i, j, Nk, causal_shift, CAUSAL)
        p = tl.exp2(s - lse2[:, None])
        dp = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], C))
        if DROPOUT:
            keep = keep_tile(key0, key1, threshold, stream, plane, row0 + i, col0 + int64(j0 + shift), BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq)

    if DROPOUT:
        dq *= true_scale(threshold, C)
    dq_ptr += ((b * Nq + i0) * heads + h) * D
    store_tile(dq_ptr + tile_offsets(BLOCK_M, BLOCK_D, int64(heads * D)), dq * scale, i, Nq, D)


COMPILE_CASES = (
    CompileCase(
        "bf16 128",
        _attention_bwd_rows_kernel,
        {
            **{
                n: "*bf16" if n in ("do_ptr", "o_ptr") else "*fp32"
                for n in ("do_ptr", "o_ptr", "lse_ptr", "lse2_ptr", "delta_ptr")
            },
            **{f"stride_{t}{d}": "i32:16" for t in ("do", "o") for d in "bhm"},
            **dict.fromkeys(("rows", "heads", "Nq", "threshold"), "i32"),
            **dict(DV=128, DROPOUT=True, BLOCK_M=ROWS, BLOCK_DV=128),
        },
        num_warps=8,
        wide=False,  # it stores a number a row
    ),
    *compile_cases(_attention_bwd_dkdv_kernel, "dkdv"),
    *compile_cases(_attention_bwd_dq_kernel, "dq"),
)


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
    call = describe("attention_bwd", q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total)
    rows = triton.cdiv(queries, ROWS) * ROWS
    lse2, delta = lse.new_empty((2, batch, heads, rows))
    launch(
        _attention_bwd_rows_kernel, (batch * heads * rows // ROWS,), q,
        do, o, lse.contiguous(), lse2, delta, *do.stride()[:3], *o.stride()[:3], rows, heads, queries, call.threshold,
        DV=v.shape[3], DROPOUT=call.constants["DROPOUT"], BLOCK_M=ROWS, BLOCK_DV=padded(v.shape[3]), num_warps=8,
    )  # fmt: skip
    shape = (batch * heads, call.group, queries, keys)
    strides = (*do.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    inputs, rest = (do, q, k, v, lse2, delta), (call.attn_mask, call.seed, *strides, *call.mask_strides, rows, *call.arguments)
    tiled(
        _attention_bwd_dkdv_kernel, "dkdv", lambda m, n: batch * kv_heads * triton.cdiv(keys + call.shift, n), shape, q,
        (*inputs, dk, dv, *rest), call.constants,
    )  # fmt: skip
    tiled(
        _attention_bwd_dq_kernel, "dq", lambda m, n: batch * heads * triton.cdiv(queries, m), shape, q,
        (*inputs, dq, *rest), call.constants,
    )  # fmt: skip
    return dq if factor == 1 else dq.mul_(factor), dk, dv
