"""dropout_add_fwd: y = residual + m * (x + bias).  dropout_add_bwd: dx = m * dy, dbias = column sums of dx."""

import torch
import triton
import triton.language as tl

from ._elementwise import (
    NOT_SPECIALIZED,
    bias_row,
    compile_cases,
    drop,
    offsets,
    tile_columns,
    tile_place,
    tile_rows,
    tiling,
    wide,
)
from ._launch import launch, mask_arguments, rows_of, statistics_dtype


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _dropout_add_fwd_kernel(
    x_ptr, residual_ptr, bias_ptr, y_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0, shift,
    M, rows, C, stride_xp, stride_xm, stride_xn, stride_rp, stride_rm, stride_rn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0, n0 = tile_place(M, C, shift, BLOCK_M, BLOCK_N)
    n, inside_n = tile_columns(n0, C, shift, BLOCK_N)
    m, plane, row, inside = tile_rows(m0, M, rows, inside_n, BLOCK_M)
    h = wide(tl.load(x_ptr + offsets(plane, row, n, stride_xp, stride_xm, stride_xn), mask=inside, other=0.0))
    residual = wide(tl.load(residual_ptr + offsets(plane, row, n, stride_rp, stride_rm, stride_rn), mask=inside, other=0.0))
    if bias_ptr is not None:
        h += bias_row(bias_ptr, n, inside_n, h)
    if seed_ptr is not None:
        h = drop(h, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
    tl.store(y_ptr + offsets(0, m, n, 0, C, 1), (residual + h).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _dropout_add_bwd_kernel(
    dy_ptr, dx_ptr, sum_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0, shift,
    M, rows, C, stride_dp, stride_dm, stride_dn, groups, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks every groups-th block of rows; sum_ptr: [groups, C], its columns' sums of dx, or None."""
    m0, n0 = tile_place(M, C, shift, BLOCK_M, BLOCK_N)
    n, inside_n = tile_columns(n0, C, shift, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float64 if dy_ptr.dtype.element_ty == tl.float64 else tl.float32)
    step = groups * BLOCK_M
    for i in range(0, tl.cdiv(M - m0, step)):
        m, plane, row, inside = tile_rows(m0 + i * step, M, rows, inside_n, BLOCK_M)
        dx = wide(tl.load(dy_ptr + offsets(plane, row, n, stride_dp, stride_dm, stride_dn), mask=inside, other=0.0))
        if seed_ptr is not None:
            dx = drop(dx, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
        tl.store(dx_ptr + offsets(0, m, n, 0, C, 1), dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if sum_ptr is not None:
            total += dx
    if sum_ptr is not None:
        tl.store(sum_ptr + m0.to(tl.int64) // BLOCK_M * C + n, tl.sum(total, axis=0), mask=inside_n)


def dropout_add_fwd(x, residual, bias, seed, p, stream, origin):
    mask = mask_arguments("dropout_add_fwd", seed, p, stream, origin, x.device)
    if p == 1:
        return residual.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    xs, residuals, bias = rows_of(x), rows_of(residual), None if bias is None else bias.contiguous()
    tile = tiling(xs, mask)
    launch(
        _dropout_add_fwd_kernel, tile.grid, x, xs.x, residuals.x, bias, y, *mask, *xs.sizes, *xs.strides, *residuals.strides,
        BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N,
    )  # fmt: skip
    return y


def dropout_add_bwd(dy, seed, p, stream, origin, need_dbias):
    mask = mask_arguments("dropout_add_bwd", seed, p, stream, origin, dy.device)
    dx, dys = torch.empty_like(dy, memory_format=torch.contiguous_format), rows_of(dy)
    statistics = dict(dtype=statistics_dtype(dy.dtype), device=dy.device)
    if p == 1:
        return dx.zero_(), torch.zeros(dys.columns if need_dbias else 0, **statistics)
    tile = tiling(dys, mask, sums=need_dbias)
    sums = torch.empty((tile.groups, dys.columns), **statistics) if need_dbias else None
    launch(
        _dropout_add_bwd_kernel, tile.grid, dy, dys.x, dx, sums, *mask, *dys.sizes, *dys.strides, tile.groups,
        BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N,
    )  # fmt: skip
    return dx, sums.sum(0) if need_dbias else torch.empty(0, **statistics)


COMPILE_CASES = (
    *compile_cases(_dropout_add_fwd_kernel, dict(bias_ptr="*fp32"), ("x_ptr", "residual_ptr", "y_ptr"), inputs=("x", "r")),
    *compile_cases(_dropout_add_bwd_kernel, dict(sum_ptr="*fp32", groups="i32"), ("dy_ptr", "dx_ptr"), inputs=("d",)),
)
