"""dropout_fwd (its own backward) and dropout_mask."""

import torch
import triton
import triton.language as tl

from ._elementwise import drop, planes_and_rows, tile_of, wide
from ._launch import launch, mask_arguments, rows_of, tile_shape
from ._math import keep_rows, seed_key

PLACE = ("threshold", "stream", "plane0", "row0", "col0", "M", "rows")  # values that earn no kernel of their own


@triton.jit(do_not_specialize=PLACE)
def _dropout_fwd_kernel(
    x_ptr, y_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0, shift,
    M, rows, C, stride_xp, stride_xm, stride_xn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0, n0 = tile_of(M, C, shift, BLOCK_M, BLOCK_N)
    m, n = m0.to(tl.int64) + tl.arange(0, BLOCK_M), n0 - shift + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & ((n >= 0) & (n < C))[None, :]
    plane, row = planes_and_rows(m0, rows, BLOCK_M)
    x = wide(tl.load(x_ptr + (plane * stride_xp + row * stride_xm)[:, None] + (n * stride_xn)[None, :], mask=inside, other=0.0))
    y = drop(x, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
    tl.store(y_ptr + (m * C)[:, None] + n[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=PLACE)
def _dropout_mask_kernel(
    keep_ptr, seed_ptr, threshold, stream, plane0, row0, col0, shift, M, rows, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m0, n0 = tile_of(M, C, shift, BLOCK_M, BLOCK_N)
    m, n = m0.to(tl.int64) + tl.arange(0, BLOCK_M), n0 - shift + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & ((n >= 0) & (n < C))[None, :]
    plane, row = planes_and_rows(m0, rows, BLOCK_M)
    key0, key1 = seed_key(seed_ptr)
    keep = keep_rows(key0, key1, threshold, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
    tl.store(keep_ptr + (m * C)[:, None] + n[None, :], keep.to(tl.int8), mask=inside)


def dropout_fwd(x, seed, p, stream, origin):
    mask = mask_arguments("dropout_fwd", seed, p, stream, origin, x.device)
    if p == 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if not mask.draws:
        return x.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    xs = rows_of(x)
    BLOCK_M, BLOCK_N = tile_shape(xs.count, xs.columns + mask.shift)
    grid = (triton.cdiv(xs.count, BLOCK_M) * triton.cdiv(xs.columns + mask.shift, BLOCK_N) if x.numel() else 0,)
    launch(
        _dropout_fwd_kernel, grid, x, xs.x, y, *mask, xs.count, xs.rows, xs.columns, *xs.strides,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    return y


def dropout_mask(seed, shape, p, stream, origin):
    mask = mask_arguments("dropout_mask", seed, p, stream, origin, seed.device)
    keep = torch.empty(shape, dtype=torch.bool, device=seed.device)
    if not mask.draws:
        return keep.fill_(p == 0)
    ks = rows_of(keep)
    BLOCK_M, BLOCK_N = tile_shape(ks.count, ks.columns + mask.shift)
    grid = (triton.cdiv(ks.count, BLOCK_M) * triton.cdiv(ks.columns + mask.shift, BLOCK_N) if keep.numel() else 0,)
    place = (mask.threshold, mask.stream, mask.plane0, mask.row0, mask.col0, mask.shift)
    launch(
        _dropout_mask_kernel, grid, keep, keep.view(torch.uint8), mask.seed, *place, ks.count, ks.rows, ks.columns,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    return keep
