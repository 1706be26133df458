"""dropout_fwd (its own backward) and dropout_mask."""

import torch
import triton
import triton.language as tl

from ._elementwise import NOT_SPECIALIZED, compile_cases, drop, offsets, tile_columns, tile_place, tile_rows, tiling, wide
from ._launch import launch, mask_arguments, rows_of
from ._math import keep_rows, seed_key


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _dropout_fwd_kernel(
    x_ptr, y_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0, shift,
    M, rows, C, stride_xp, stride_xm, stride_xn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0, n0 = tile_place(M, C, shift, BLOCK_M, BLOCK_N)
    n, inside_n = tile_columns(n0, C, shift, BLOCK_N)
    m, plane, row, inside = tile_rows(m0, M, rows, inside_n, BLOCK_M)
    x = wide(tl.load(x_ptr + offsets(plane, row, n, stride_xp, stride_xm, stride_xn), mask=inside, other=0.0))
    y = drop(x, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
    tl.store(y_ptr + offsets(0, m, n, 0, C, 1), y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _dropout_mask_kernel(
    keep_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0, shift,
    M, rows, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0, n0 = tile_place(M, C, shift, BLOCK_M, BLOCK_N)
    n, inside_n = tile_columns(n0, C, shift, BLOCK_N)
    m, plane, row, inside = tile_rows(m0, M, rows, inside_n, BLOCK_M)
    key0, key1 = seed_key(seed_ptr)
    keep = keep_rows(key0, key1, threshold, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
    tl.store(keep_ptr + offsets(0, m, n, 0, C, 1), keep.to(tl.uint8), mask=inside)


def dropout_fwd(x, seed, p, stream, origin):
    mask = mask_arguments("dropout_fwd", seed, p, stream, origin, x.device)
    if p == 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if not mask.draws:
        return x.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    xs = rows_of(x)
    tile = tiling(xs, mask)
    launch(
        _dropout_fwd_kernel, tile.grid, x, xs.x, y, *mask, *xs.sizes, *xs.strides, BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N
    )
    return y


def dropout_mask(seed, shape, p, stream, origin):
    mask = mask_arguments("dropout_mask", seed, p, stream, origin, seed.device)
    keep = torch.empty(shape, dtype=torch.bool, device=seed.device)
    if not mask.draws:
        return keep.fill_(p == 0)
    rows = rows_of(keep.view(torch.uint8))
    tile = tiling(rows, mask)
    launch(_dropout_mask_kernel, tile.grid, keep, rows.x, *mask, *rows.sizes, BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N)
    return keep


COMPILE_CASES = (
    *compile_cases(_dropout_fwd_kernel, {}, ("x_ptr", "y_ptr")),
    *compile_cases(_dropout_mask_kernel, {}, ("keep_ptr",), inputs=(), dtypes=("u8",), wide=False),  # it loads nothing
)
