"""Gradients of the norms' parameters, in two stages and without atomics: what each program sums, then the sum of those."""

import torch
import triton
import triton.language as tl

from ._launch import INTERPRETED, launch, statistics_dtype
from ._row_tiles import compile_case

SUMS_TILE = dict(BLOCK_P=64, BLOCK_N=1024 if INTERPRETED else 32, num_warps=4)


@triton.jit
def _sum_of_programs(partial_ptr, out_ptr, P, N, col, BLOCK_P: tl.constexpr):
    total = tl.zeros([BLOCK_P, col.shape[1]], out_ptr.dtype.element_ty)
    for first in range(0, P, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(partial_ptr + program.to(tl.int64) * N + col, mask=(program < P) & (col < N), other=0.0)
    tl.store(out_ptr + col, tl.sum(total, 0)[None, :], mask=col < N)


@triton.jit
def _column_sums_kernel(
    a_ptr, b_ptr, c_ptr, a_sum_ptr, b_sum_ptr, c_sum_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    col = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if a_ptr is not None:
        _sum_of_programs(a_ptr, a_sum_ptr, P, N, col, BLOCK_P)
    if b_ptr is not None:
        _sum_of_programs(b_ptr, b_sum_ptr, P, N, col, BLOCK_P)
    if c_ptr is not None:
        _sum_of_programs(c_ptr, c_sum_ptr, P, N, col, BLOCK_P)


@triton.jit
def store_sum(ptr, total, program, col, N):
    """First stage: what one program summed, [ROWS, BLOCK_N], as its row of partial sums."""
    if ptr is not None:
        tl.store(ptr + program * N + col, tl.sum(total, 0)[None, :], mask=(col >= 0) & (col < N))


def partials(like, programs, N, *wanted):
    """For each gradient that is wanted the sums of each program, [programs, N], to be written; else None."""
    dtype = statistics_dtype(like.dtype)
    return [torch.empty(programs, N, dtype=dtype, device=like.device) if want else None for want in wanted]


def no_sums(like, shape, *wanted):
    """What column_sums gives where there are no rows."""
    return [like.new_zeros(shape if want else (0,), dtype=statistics_dtype(like.dtype)) for want in wanted]


def column_sums(like, shape, *parts):
    """Second stage, in one launch: what the programs' sums add up to, [*shape] each; [0] where nothing was wanted."""
    present = [part for part in parts if part is not None]
    if not present or len(present[0]) == 1:
        return [like.new_empty(0, dtype=statistics_dtype(like.dtype)) if part is None else part.view(shape) for part in parts]
    sums = [like.new_empty((0,) if part is None else shape, dtype=statistics_dtype(like.dtype)) for part in parts]
    P, N = present[0].shape
    padding = [None] * (3 - len(parts))
    outputs = [None if part is None else total for part, total in zip(parts, sums)]
    grid = (triton.cdiv(N, SUMS_TILE["BLOCK_N"]),)
    launch(_column_sums_kernel, grid, like, *parts, *padding, *outputs, *padding, P, N, **SUMS_TILE)
    return sums


_sums = dict(
    a_ptr="*fp32", a_sum_ptr="*fp32", b_ptr="*fp32", b_sum_ptr="*fp32", c_ptr=None, c_sum_ptr=None, P="i32", N="i32:16"
)
COMPILE_CASES = (compile_case("fp32", _column_sums_kernel, SUMS_TILE, wide=False, **_sums),)
