"""The tile of an element-wise kernel: its place, its mask. One program serves BLOCK_M rows and BLOCK_N columns."""

import triton
import triton.language as tl

from ._math import keep_rows, seed_key


@triton.jit
def tile_of(M, C, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's first row, in M's type, and how far its first column lies from the first tile's, int64."""
    tiles = tl.cdiv(C + shift, BLOCK_N).to(tl.int32)
    tile = tl.program_id(0)
    return (tile // tiles).to(M.dtype) * BLOCK_M, (tile % tiles).to(tl.int64) * BLOCK_N


@triton.jit
def planes_and_rows(m0, rows, BLOCK_M: tl.constexpr):
    """Plane and row of the rows m0 .. m0 + BLOCK_M - 1, [BLOCK_M] int64; a plane has `rows` of them.

    Divisions are 32 bits wide unless the tensor has 2^31 rows: one of 64 bits takes a hundred instructions.
    """
    plane = m0 // rows
    row = m0 - plane * rows
    if m0.dtype == tl.int32:
        row = row.to(tl.uint32) + tl.arange(0, BLOCK_M).to(tl.uint32)
        more = row // rows.to(tl.uint32)
        row = row - more * rows.to(tl.uint32)
    else:
        row = row + tl.arange(0, BLOCK_M)
        more = row // rows
        row = row - more * rows
    return plane.to(tl.int64) + more.to(tl.int64), row.to(tl.int64)


@triton.jit
def wide(x):
    """x in the type that kernels compute in: float32, float64 for float64."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def true_scale(scale, threshold, like):
    """The scale in like's dtype: an argument is a float32, which is not enough for float64."""
    if like.dtype == tl.float64:
        return 65536.0 / (65536 - threshold).to(tl.float64)
    return scale


@triton.jit
def drop(h, seed_ptr, threshold, scale, stream, plane, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """m * h for a tile [BLOCK_M, BLOCK_N] whose first column is `col` of the mask; plane, row: [BLOCK_M] of the mask."""
    key0, key1 = seed_key(seed_ptr)
    keep = keep_rows(key0, key1, threshold, stream, plane, row, col, BLOCK_M, BLOCK_N)
    return tl.where(keep, h * true_scale(scale, threshold, h), 0.0)
