"""layer_norm and rms_norm, forward and backward: the kernels of both, and what their launchers share.

forward    a tile of whole rows a program; a row of more columns than a tile holds is read twice, block by block
backward   programs walk the rows tile by tile, and keep their sums for the parameters in registers. Rows too long for
           that: one kernel for the two means of each row, one for the gradients, by blocks of columns
"""

import torch
import triton
import triton.language as tl

from ._launch import launch, statistics_dtype
from ._row_sums import column_sums, no_sums, partials, store_sum
from ._row_tiles import (
    LONGEST_FWD,
    LOOPED,
    Walk,
    compile_case,
    compute_type,
    dense,
    empty_like,
    fits,
    fwd_tile,
    longest_bwd,
    row_view,
    rows_and_columns,
)
from ._rows import (
    grad_input,
    grad_means,
    normalized,
    parameter,
    row_statistic,
    statistics,
    store_normalized,
    store_statistics,
    weight,
    welford_step,
    welford_total,
)


@triton.jit
def _norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, M, N,
    EPS: tl.constexpr, OFFSET: tl.constexpr, RMS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_N)[None, :]
    inside = (row < M)[:, None] & (col < N)
    x = tl.load(x_ptr + row[:, None] * stride_xm + col, mask=inside, other=0.0).to(ACC)
    mean, rstd = statistics(x, inside, N, EPS, RMS)
    store_statistics(mean_ptr, rstd_ptr, row, row < M, mean, rstd)
    store_normalized(y_ptr, x, mean, rstd, w_ptr, b_ptr, row, col, col < N, inside, N, OFFSET, RMS, ACC)


@triton.jit
def _norm_fwd_looped_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, N,
    EPS: tl.constexpr, OFFSET: tl.constexpr, RMS: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK_N)[None, :]
    lane_mean, m2, count = tl.zeros([1, BLOCK_N], ACC), tl.zeros([1, BLOCK_N], ACC), tl.zeros([1, BLOCK_N], ACC)
    for block in tl.range(0, N, BLOCK_N, num_stages=2):
        col = block + lane
        x = tl.load(x_ptr + row[:, None] * stride_xm + col, mask=col < N, other=0.0).to(ACC)
        lane_mean, m2, count = welford_step(x, col < N, lane_mean, m2, count, RMS)
    mean, rstd = welford_total(lane_mean, m2, count, N, EPS, RMS)
    store_statistics(mean_ptr, rstd_ptr, row, row >= 0, mean, rstd)
    for block in tl.range(0, N, BLOCK_N, num_stages=2):
        col = block + lane
        x = tl.load(x_ptr + row[:, None] * stride_xm + col, mask=col < N, other=0.0).to(ACC)
        store_normalized(y_ptr, x, mean, rstd, w_ptr, b_ptr, row, col, col < N, col < N, N, OFFSET, RMS, ACC)


@triton.jit
def _saved_xhat(saved, mean_ptr, rstd, row, M, w_inverse, b, RMS: tl.constexpr, FROM_OUTPUT: tl.constexpr):
    """xhat of a tile, from x and its statistics or from y."""
    if FROM_OUTPUT:
        xhat = (saved - b) * w_inverse
    else:
        mean = rstd if RMS else row_statistic(mean_ptr, row, M)
        xhat = normalized(saved, mean, rstd, RMS)
    return xhat


@triton.jit
def _norm_bwd_means_kernel(
    dy_ptr, saved_ptr, mean_ptr, rstd_ptr, w_ptr, b_ptr, c1_ptr, c2_ptr, stride_dym, stride_sm, M, N,
    OFFSET: tl.constexpr, RMS: tl.constexpr, FROM_OUTPUT: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    rstd = row_statistic(rstd_ptr, row, M)
    sum1, sum2 = tl.zeros([1, BLOCK_N], ACC), tl.zeros([1, BLOCK_N], ACC)
    for block in tl.range(0, N, BLOCK_N, num_stages=2):
        col = block + tl.arange(0, BLOCK_N)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * stride_dym + col, mask=col < N, other=0.0).to(ACC)
        saved = tl.load(saved_ptr + row[:, None] * stride_sm + col, mask=col < N, other=0.0).to(ACC)
        w, b = weight(w_ptr, col, col < N, OFFSET, ACC), parameter(b_ptr, col, col < N, 0.0, ACC)
        sum1 += dy * w
        sum2 += dy * w * _saved_xhat(saved, mean_ptr, rstd, row, M, 1 / w, b, RMS, FROM_OUTPUT)
    if c1_ptr is not None:
        tl.store(c1_ptr + row, tl.sum(sum1, 1) / N)
    tl.store(c2_ptr + row, tl.sum(sum2, 1) / N)


@triton.jit
def _norm_bwd_kernel(
    dy_ptr, saved_ptr, mean_ptr, rstd_ptr, w_ptr, b_ptr, c1_ptr, c2_ptr, dx_ptr, dw_ptr, db_ptr, stride_dym, stride_sm, M, N,
    OFFSET: tl.constexpr, RMS: tl.constexpr, FROM_OUTPUT: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    w, b = weight(w_ptr, col, col < N, OFFSET, ACC), parameter(b_ptr, col, col < N, 0.0, ACC)
    w_inverse = 1 / w if FROM_OUTPUT else w
    dw, db = tl.zeros([ROWS, BLOCK_N], ACC), tl.zeros([ROWS, BLOCK_N], ACC)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for step in tl.range(0, tl.cdiv(tl.cdiv(M, ROWS) - program, programs), num_stages=STAGES):
        m0 = (program + step * programs) * ROWS
        row = m0 + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (col < N)
        dy = tl.load(dy_ptr + row[:, None] * stride_dym + col, mask=inside, other=0.0).to(ACC)
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None or dw_ptr is not None:
            saved = tl.load(saved_ptr + row[:, None] * stride_sm + col, mask=inside, other=0.0).to(ACC)
            rstd = row_statistic(rstd_ptr, row, M)
            xhat = _saved_xhat(saved, mean_ptr, rstd, row, M, w_inverse, b, RMS, FROM_OUTPUT)
            if dx_ptr is not None:
                g = dy * w
                c1, c2 = grad_means(g, xhat, c1_ptr, c2_ptr, row, M, N, RMS)
                tl.store(dx_ptr + row[:, None] * N + col, grad_input(g, xhat, rstd, c1, c2, RMS), mask=inside)
            if dw_ptr is not None:
                dw += dy * xhat
    store_sum(dw_ptr, dw, program, col, N)
    store_sum(db_ptr, db, program, col, N)


def norm_fwd(x, weight, bias, normalized_shape, eps, offset, rms):
    """(y, mean, rstd); mean is None for RMS."""
    M, N = rows_and_columns(x, normalized_shape)
    lead, dtype = x.shape[: x.dim() - len(normalized_shape)], statistics_dtype(x.dtype)
    y = empty_like(x)
    rstd = torch.empty(lead, dtype=dtype, device=x.device)
    mean = None if rms else torch.empty_like(rstd)
    if N == 0:
        return y, None if rms else mean.zero_(), rstd.zero_()
    xs, stride = row_view(x, len(normalized_shape), N)
    tensors = (xs, *dense(weight, bias), y, mean, rstd, stride)
    constants = dict(EPS=eps, OFFSET=offset, RMS=rms, ACC=compute_type(x))
    if fits(x, N, LONGEST_FWD):
        tile = fwd_tile(N)
        launch(_norm_fwd_kernel, (triton.cdiv(M, tile["ROWS"]),), x, *tensors, M, N, **constants, **tile)
    else:
        launch(_norm_fwd_looped_kernel, (M,), x, *tensors, N, **constants, **LOOPED)
    return y, mean, rstd


def norm_bwd(dy, saved, mean, rstd, weight, bias, normalized_shape, offset, rms, from_output, need_dx, need_dw, need_db):
    """(dx, dw, db), with nothing computed that is not asked for."""
    M, N = rows_and_columns(dy, normalized_shape)
    dx = empty_like(dy) if need_dx else dy.new_empty(0)
    if not (need_dx or need_dw or need_db) or dy.numel() == 0:
        return dx, *no_sums(dy, normalized_shape, need_dw, need_db)
    (dys, stride_dym), (saveds, stride_sm) = (row_view(t, len(normalized_shape), N) for t in (dy, saved))
    tensors = (dys, saveds, *dense(mean, rstd, weight, bias if from_output else None))
    strides = (stride_dym, stride_sm, M, N)
    constants = dict(OFFSET=offset, RMS=rms, FROM_OUTPUT=from_output, ACC=compute_type(dy))
    whole_rows = need_dx and fits(dy, N, longest_bwd(need_dw, need_db, from_output and not rms))
    means = norm_bwd_means(*tensors, *strides, **constants) if need_dx and not whole_rows else (None, None)
    walk = Walk(dy, M, N, whole_rows, tensors=2)
    sums = partials(dy, walk.programs, N, need_dw, need_db)
    outputs = (dx if need_dx else None, *sums)
    launch(_norm_bwd_kernel, walk.grid, dy, *tensors, *means, *outputs, *strides, **constants, **walk.tile)
    return dx, *column_sums(dy, normalized_shape, *sums)


def norm_bwd_means(dy, saved, mean, rstd, weight, bias, stride_dym, stride_sm, M, N, **constants):
    """mean(g) and mean(g * xhat) of rows that no tile holds; the first is None for RMS."""
    c1, c2 = None if constants["RMS"] else torch.empty_like(rstd), torch.empty_like(rstd)
    tensors = (dy, saved, mean, rstd, weight, bias, c1, c2)
    launch(_norm_bwd_means_kernel, (M,), dy, *tensors, stride_dym, stride_sm, M, N, **constants, **LOOPED)
    return c1, c2


def _compile_cases():
    """bf16 rows of bf16 parameters; dw and db both, and from y where that takes more registers."""
    like, columns, none = torch.empty(0, dtype=torch.bfloat16), (1024, 4096, 8192), dict(c1_ptr=None, c2_ptr=None)
    forward = dict(x_ptr="*bf16", y_ptr="*bf16", stride_xm="i32:16", EPS=1e-5)
    backward = dict(dy_ptr="*bf16", saved_ptr="*bf16", stride_dym="i32:16", stride_sm="i32:16", M="i32")
    for rms in (False, True):
        mean, bias = (None, None) if rms else ("*fp32", "*bf16")
        norm = dict(w_ptr="*bf16", b_ptr=bias, mean_ptr=mean, rstd_ptr="*fp32", N="i32:16", OFFSET=0.0, RMS=rms, ACC=tl.float32)
        means, sums = dict(c1_ptr=mean, c2_ptr="*fp32"), dict(dx_ptr="*bf16", dw_ptr="*fp32", db_ptr=mean)
        label = "rms" if rms else "layer"
        for N in columns:
            yield compile_case(f"{label} bf16 {N}", _norm_fwd_kernel, fwd_tile(N), **norm, **forward, M="i32")
        yield compile_case(f"{label} bf16 65536", _norm_fwd_looped_kernel, LOOPED, **norm, **forward)
        for N, from_output in (*((N, False) for N in columns), *(() if rms else ((4096, True),))):
            given = norm | backward | sums | none | dict(FROM_OUTPUT=from_output, b_ptr=bias if from_output else None)
            name = f"{label} bf16 {N}" + (" from y" if from_output else "")
            yield compile_case(name, _norm_bwd_kernel, Walk(like, 8192, N, True, tensors=2).tile, **given)
        given = norm | backward | means | dict(FROM_OUTPUT=False, b_ptr=None)
        yield compile_case(f"{label} bf16 65536", _norm_bwd_means_kernel, LOOPED, **given, wide=False)
        tile = Walk(like, 8192, 65536, False, tensors=2).tile
        yield compile_case(f"{label} bf16 65536", _norm_bwd_kernel, tile, **given, **sums)


COMPILE_CASES = tuple(_compile_cases())
