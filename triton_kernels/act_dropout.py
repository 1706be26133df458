"""act_dropout_fwd: y = m * act(x + bias).  act_dropout_bwd: dx = m * act'(x + bias) * dy, dbias = column sums of dx."""

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
from ._math import activate, activate_grad


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _act_dropout_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0, shift,
    M, rows, C, stride_xp, stride_xm, stride_xn,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0, n0 = tile_place(M, C, shift, BLOCK_M, BLOCK_N)
    n, inside_n = tile_columns(n0, C, shift, BLOCK_N)
    m, plane, row, inside = tile_rows(m0, M, rows, inside_n, BLOCK_M)
    h = wide(tl.load(x_ptr + offsets(plane, row, n, stride_xp, stride_xm, stride_xn), mask=inside, other=0.0))
    if bias_ptr is not None:
        h += bias_row(bias_ptr, n, inside_n, h)
    y = activate(h, ACT)
    if seed_ptr is not None:
        y = drop(y, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
    tl.store(y_ptr + offsets(0, m, n, 0, C, 1), y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _act_dropout_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, sum_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0, shift,
    M, rows, C, stride_dp, stride_dm, stride_dn, stride_xp, stride_xm, stride_xn, groups,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks every groups-th block of rows; sum_ptr: [groups, C], its columns' sums of dx, or None."""
    m0, n0 = tile_place(M, C, shift, BLOCK_M, BLOCK_N)
    n, inside_n = tile_columns(n0, C, shift, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32)
    if bias_ptr is not None:
        bias = bias_row(bias_ptr, n, inside_n, total)
    step = groups * BLOCK_M
    for i in range(0, tl.cdiv(M - m0, step)):
        m, plane, row, inside = tile_rows(m0 + i * step, M, rows, inside_n, BLOCK_M)
        h = wide(tl.load(x_ptr + offsets(plane, row, n, stride_xp, stride_xm, stride_xn), mask=inside, other=0.0))
        dy = wide(tl.load(dy_ptr + offsets(plane, row, n, stride_dp, stride_dm, stride_dn), mask=inside, other=0.0))
        if bias_ptr is not None:
            h += bias
        dx = activate_grad(h, ACT) * dy
        if seed_ptr is not None:
            dx = drop(dx, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + n0, BLOCK_M, BLOCK_N)
        tl.store(dx_ptr + offsets(0, m, n, 0, C, 1), dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if sum_ptr is not None:
            total += tl.where(inside, dx, 0.0)  # act'(bias) * 0 is no zero where it is infinite
    if sum_ptr is not None:
        tl.store(sum_ptr + m0.to(tl.int64) // BLOCK_M * C + n, tl.sum(total, axis=0), mask=inside_n)


def act_dropout_fwd(x, bias, act, seed, p, stream, origin):
    mask = mask_arguments("act_dropout_fwd", seed, p, stream, origin, x.device)
    if p == 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    xs, bias = rows_of(x), None if bias is None else bias.contiguous()
    tile = tiling(xs, mask)
    launch(
        _act_dropout_fwd_kernel, tile.grid, x, xs.x, bias, y, *mask, *xs.sizes, *xs.strides,
        ACT=act, BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N,
    )  # fmt: skip
    return y


def act_dropout_bwd(dy, x, bias, act, seed, p, stream, origin, need_dbias):
    mask = mask_arguments("act_dropout_bwd", seed, p, stream, origin, x.device)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    xs, dys, bias = rows_of(x), rows_of(dy), None if bias is None else bias.contiguous()
    statistics = dict(dtype=statistics_dtype(x.dtype), device=x.device)
    if p == 1:
        return dx.zero_(), torch.zeros(xs.columns if need_dbias else 0, **statistics)
    tile = tiling(xs, mask, sums=need_dbias)
    sums = torch.empty((tile.groups, xs.columns), **statistics) if need_dbias else None
    launch(
        _act_dropout_bwd_kernel, tile.grid, x, dys.x, xs.x, bias, dx, sums, *mask, *xs.sizes, *dys.strides, *xs.strides,
        tile.groups, ACT=act, BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N,
    )  # fmt: skip
    return dx, sums.sum(0) if need_dbias else torch.empty(0, **statistics)


COMPILE_CASES = tuple(
    case
    for act in ("gelu", "gelu_tanh", "silu")
    for case in (
        *compile_cases(_act_dropout_fwd_kernel, dict(bias_ptr="*fp32"), ("x_ptr", "y_ptr"), ACT=act),
        *compile_cases(
            _act_dropout_bwd_kernel,
            dict(bias_ptr="*fp32", sum_ptr="*fp32", groups="i32"),
            ("dy_ptr", "x_ptr", "dx_ptr"),
            inputs=("x", "d"),
            dtypes=("bf16",),
            ACT=act,
        ),
    )
)
