"""The tile of an element-wise kernel, [BLOCK_M, BLOCK_N]: its place, its mask, its sizes.

m: rows of the tensor; plane, row: the same as the mask counts them; n: columns. All local: a mask adds its origin.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from ._launch import TILE, CompileCase
from ._math import keep_rows, seed_key, true_scale

# Programs of a kernel that sums columns, each with a row of partial sums: fills a GPU, and costs little to add up.
SUMMING = 1024
# Integers whose value is worth no kernel of its own.
NOT_SPECIALIZED = ("threshold", "stream", "plane0", "row0", "col0", "M", "rows", "groups")


@triton.jit
def tile_place(M, C, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's first row, in M's type, and how far its first column lies from the first tile's, int64."""
    tiles = tl.cdiv(C + shift, BLOCK_N).to(tl.int32)
    tile = tl.program_id(0)
    return (tile // tiles).to(M.dtype) * BLOCK_M, (tile % tiles).to(tl.int64) * BLOCK_N


@triton.jit
def tile_columns(n0, C, shift, BLOCK_N: tl.constexpr):
    """n, and which of them exist."""
    n = n0 - shift + tl.arange(0, BLOCK_N)
    return n, (n >= 0) & (n < C)


@triton.jit
def tile_rows(m0, M, rows, inside_n, BLOCK_M: tl.constexpr):
    """m, plane and row of the rows from m0 on, [BLOCK_M] int64, and the tile's elements that exist."""
    m = m0.to(tl.int64) + tl.arange(0, BLOCK_M)
    plane, row = planes_and_rows(m0, rows, BLOCK_M)
    return m, plane, row, (m < M)[:, None] & inside_n[None, :]


@triton.jit
def offsets(plane, row, n, stride_p, stride_m, stride_n):
    return (plane * stride_p + row * stride_m)[:, None] + (n * stride_n)[None, :]


@triton.jit
def bias_row(bias_ptr, n, inside_n, like):
    """[1, BLOCK_N] in like's type."""
    return tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(like.dtype)[None, :]


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
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def drop(h, seed_ptr, threshold, scale, stream, plane, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """m * h for a tile [BLOCK_M, BLOCK_N] whose first column is `col` of the mask; plane, row: [BLOCK_M] of the mask."""
    key0, key1 = seed_key(seed_ptr)
    keep = keep_rows(key0, key1, threshold, stream, plane, row, col, BLOCK_M, BLOCK_N)
    if h.dtype == tl.float64:
        scale = true_scale(threshold, tl.float64)
    return tl.where(keep, h * scale, 0.0)


class Tiling(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    groups: int  # programs that share a tile's columns
    grid: tuple


def tiling(xs, mask, sums=False):
    """The programs for a Rows: one a tile, or, where columns are summed, about SUMMING of them, by shape alone."""
    return _tiling(xs.count, xs.columns, mask.shift, sums)


@functools.lru_cache(1024)
def _tiling(count, columns, shift, sums):
    BLOCK_M, BLOCK_N = tile_shape(count, columns + shift)
    if sums:
        BLOCK_M = min(BLOCK_M, 64)  # a GPU's own; the interpreter's would be summed one row after the other
    blocks, tiles = triton.cdiv(count, BLOCK_M), triton.cdiv(columns + shift, BLOCK_N)
    groups = min(blocks, max(SUMMING // max(tiles, 1), 1)) if sums else blocks
    return Tiling(BLOCK_M, BLOCK_N, groups, (groups * tiles,) if columns else (0,))


def tile_shape(count, width):
    """Rows and columns of a tile, powers of two: as wide as wastes little of the last one, short rows together."""
    columns = min(max(triton.next_power_of_2(width), 32), 1024)
    while columns > 128 and -width % columns > width // 8:
        columns //= 2
    return min(max(TILE // columns, 1), triton.next_power_of_2(max(count, 1))), columns


def compile_cases(kernel, rest, pointers, inputs=("x",), dtypes=("bf16", "fp32"), wide=True, **constants):
    """Cases for contiguous [M, 4096] of each dtype, with a mask. pointers: those of the dtype; rest: other arguments."""
    mask = dict(
        seed_ptr="*i64", threshold="i32", scale="fp32", stream="i32", plane0="i32", row0="i32", col0="i32", shift="i32:16"
    )
    strides = {f"stride_{t}{d}": step for t in inputs for d, step in zip("pmn", ("i32:16", "i32:16", 1))}
    BLOCK_M, BLOCK_N = tile_shape(8192, 4096)
    sizes = dict(M="i32", rows="i32", C="i32:16", BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return tuple(
        CompileCase(
            " ".join((dtype, *constants.values())),
            kernel,
            {**dict.fromkeys(pointers, f"*{dtype}"), **mask, **sizes, **strides, **rest, **constants},
            wide=wide,
        )
        for dtype in dtypes
    )
