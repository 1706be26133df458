"""r = residual + m * (x + input_bias), y = norm(r), and its backward, for layer_norm and rms_norm.

The kernels of _norm.py with a mask: their tiles begin at the multiple of 32 columns that its origin asks for. A mask has rows
of the last dimension: a norm over several takes the norm's own kernels, and dropout_add's.
"""

import torch
import triton
import triton.language as tl

from ._elementwise import drop, planes_and_rows
from ._launch import NO_MASK, launch, mask_arguments, statistics_dtype
from ._norm import norm_bwd_means, norm_fwd
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
from .dropout_add import dropout_add_bwd, dropout_add_fwd

PLACE = ("threshold", "stream", "plane0", "row0", "col0", "M", "rows")  # values that earn no kernel of their own


@triton.jit
def _stream(
    x_ptr, residual_ptr, input_bias_ptr, r_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0,
    m, plane, row, col, lane0, stride_xm, stride_residual, N, inside,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """r of a tile as it is stored, in the compute type. Statistics are of the rounded one: the backward has no other."""
    r = tl.load(residual_ptr + m[:, None] * stride_residual + col, mask=inside, other=0.0).to(ACC)
    if x_ptr is not None:
        h = tl.load(x_ptr + m[:, None] * stride_xm + col, mask=inside, other=0.0).to(ACC)
        h += parameter(input_bias_ptr, col, (col >= 0) & (col < N), 0.0, ACC)
        if seed_ptr is not None:
            h = drop(h, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + lane0, ROWS, BLOCK_N)
        r += h
    r = r.to(r_ptr.dtype.element_ty)
    tl.store(r_ptr + m[:, None] * N + col, r, mask=inside)
    return r.to(ACC)


@triton.jit(do_not_specialize=PLACE)
def _dropout_add_norm_fwd_kernel(
    x_ptr, residual_ptr, input_bias_ptr, w_ptr, b_ptr, y_ptr, r_ptr, mean_ptr, rstd_ptr,
    seed_ptr, threshold, scale, stream, plane0, row0, col0, shift, stride_xm, stride_residual, M, N, rows,
    EPS: tl.constexpr, OFFSET: tl.constexpr, RMS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0).to(tl.int64) * ROWS
    m = m0 + tl.arange(0, ROWS)
    plane, row = planes_and_rows(m0, rows, ROWS)
    col = (tl.arange(0, BLOCK_N) - shift)[None, :]
    column = (col >= 0) & (col < N)
    inside = (m < M)[:, None] & column
    r = _stream(
        x_ptr, residual_ptr, input_bias_ptr, r_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0,
        m, plane, row, col, 0, stride_xm, stride_residual, N, inside, ACC, ROWS, BLOCK_N,
    )  # fmt: skip
    mean, rstd = statistics(r, inside, N, EPS, RMS)
    store_statistics(mean_ptr, rstd_ptr, m, m < M, mean, rstd)
    store_normalized(y_ptr, r, mean, rstd, w_ptr, b_ptr, m, col, column, inside, N, OFFSET, RMS, ACC)


@triton.jit(do_not_specialize=PLACE)
def _dropout_add_norm_fwd_looped_kernel(
    x_ptr, residual_ptr, input_bias_ptr, w_ptr, b_ptr, y_ptr, r_ptr, mean_ptr, rstd_ptr,
    seed_ptr, threshold, scale, stream, plane0, row0, col0, shift, stride_xm, stride_residual, M, N, rows,
    EPS: tl.constexpr, OFFSET: tl.constexpr, RMS: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0).to(tl.int64)
    m = m0 + tl.arange(0, 1)
    plane, row = planes_and_rows(m0, rows, 1)
    lane = tl.arange(0, BLOCK_N)[None, :]
    lane_mean, m2, count = tl.zeros([1, BLOCK_N], ACC), tl.zeros([1, BLOCK_N], ACC), tl.zeros([1, BLOCK_N], ACC)
    for lane0 in tl.range(0, N + shift, BLOCK_N, num_stages=2):
        col = lane0 + lane - shift
        inside = (col >= 0) & (col < N)
        r = _stream(
            x_ptr, residual_ptr, input_bias_ptr, r_ptr, seed_ptr, threshold, scale, stream, plane0, row0, col0,
            m, plane, row, col, lane0, stride_xm, stride_residual, N, inside, ACC, 1, BLOCK_N,
        )  # fmt: skip
        lane_mean, m2, count = welford_step(r, inside, lane_mean, m2, count, RMS)
    mean, rstd = welford_total(lane_mean, m2, count, N, EPS, RMS)
    store_statistics(mean_ptr, rstd_ptr, m, m < M, mean, rstd)
    tl.debug_barrier()  # r is read back by other threads than wrote it
    for lane0 in tl.range(0, N, BLOCK_N, num_stages=2):
        col = lane0 + lane
        r = tl.load(r_ptr + m[:, None] * N + col, mask=col < N, other=0.0).to(ACC)
        store_normalized(y_ptr, r, mean, rstd, w_ptr, b_ptr, m, col, col < N, col < N, N, OFFSET, RMS, ACC)


@triton.jit(do_not_specialize=PLACE)
def _dropout_add_norm_bwd_kernel(
    dy_ptr, r_ptr, mean_ptr, rstd_ptr, w_ptr, dr_ptr, c1_ptr, c2_ptr, dx_ptr, dresidual_ptr, dw_ptr, db_ptr, dinput_bias_ptr,
    seed_ptr, threshold, scale, stream, plane0, row0, col0, shift, stride_dym, stride_rm, stride_drm, M, N, rows,
    OFFSET: tl.constexpr, RMS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    lane0 = tl.program_id(1) * BLOCK_N
    col = (lane0 + tl.arange(0, BLOCK_N) - shift)[None, :]
    column = col < N
    if seed_ptr is not None:  # without a mask there is no shift either
        column &= col >= 0
    w = weight(w_ptr, col, column, OFFSET, ACC)
    dw, db, dinput_bias = tl.zeros([ROWS, BLOCK_N], ACC), tl.zeros([ROWS, BLOCK_N], ACC), tl.zeros([ROWS, BLOCK_N], ACC)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for step in tl.range(0, tl.cdiv(tl.cdiv(M, ROWS) - program, programs), num_stages=STAGES):
        m0 = (program + step * programs) * ROWS
        m = m0 + tl.arange(0, ROWS)
        inside = (m < M)[:, None] & column
        dy = tl.load(dy_ptr + m[:, None] * stride_dym + col, mask=inside, other=0.0).to(ACC)
        r = tl.load(r_ptr + m[:, None] * stride_rm + col, mask=inside, other=0.0).to(ACC)
        rstd = row_statistic(rstd_ptr, m, M)
        xhat = normalized(r, rstd if RMS else row_statistic(mean_ptr, m, M), rstd, RMS)
        if dw_ptr is not None:
            dw += dy * xhat
        if db_ptr is not None:
            db += dy
        c1, c2 = grad_means(dy * w, xhat, c1_ptr, c2_ptr, m, M, N, RMS)
        g = grad_input(dy * w, xhat, rstd, c1, c2, RMS)
        if dr_ptr is not None:
            g += tl.load(dr_ptr + m[:, None] * stride_drm + col, mask=inside, other=0.0).to(ACC)
        tl.store(dresidual_ptr + m[:, None] * N + col, g, mask=inside)
        if seed_ptr is not None:
            plane, row = planes_and_rows(m0, rows, ROWS)
            g = drop(g, seed_ptr, threshold, scale, stream, plane0 + plane, row0 + row, col0 + lane0, ROWS, BLOCK_N)
            tl.store(dx_ptr + m[:, None] * N + col, g, mask=inside)
        if dinput_bias_ptr is not None:
            dinput_bias += tl.where(inside, g, 0.0)
    store_sum(dw_ptr, dw, program, col, N)
    store_sum(db_ptr, db, program, col, N)
    store_sum(dinput_bias_ptr, dinput_bias, program, col, N)


def _fwd(op, x, residual, input_bias, weight, bias, normalized_shape, eps, offset, rms, *place):
    """(y, r, mean, rstd); place: seed, p, stream, origin."""
    mask, p = mask_arguments(op, *place, x.device), place[1]
    M, N = rows_and_columns(x, normalized_shape)
    if x.shape[-1] != N or N == 0:
        r = dropout_add_fwd(x, residual, input_bias, *place)
        y, mean, rstd = norm_fwd(r, weight, bias, normalized_shape, eps, offset, rms)
        return y, r, mean, rstd
    y, r = empty_like(x), empty_like(x)
    rstd = torch.empty(x.shape[: x.dim() - len(normalized_shape)], dtype=statistics_dtype(x.dtype), device=x.device)
    mean = None if rms else torch.empty_like(rstd)
    (xs, stride_xm), (residuals, stride_residual) = row_view(x, 1, N), row_view(residual, 1, N)
    tensors = (None if p == 1 else xs, residuals, *dense(input_bias, weight, bias), y, r, mean, rstd)
    sizes = (stride_xm, stride_residual, M, N, _rows_of_a_plane(x))
    constants = dict(EPS=eps, OFFSET=offset, RMS=rms, ACC=compute_type(x))
    if fits(x, N + mask.shift, LONGEST_FWD):
        tile = fwd_tile(N + mask.shift)
        launch(_dropout_add_norm_fwd_kernel, (triton.cdiv(M, tile["ROWS"]),), x, *tensors, *mask, *sizes, **constants, **tile)
    else:
        launch(_dropout_add_norm_fwd_looped_kernel, (M,), x, *tensors, *mask, *sizes, **constants, **LOOPED)
    return y, r, mean, rstd


def _bwd(op, dy, dr, r, mean, rstd, weight, normalized_shape, offset, rms, *place, need_dw, need_db, need_dinput_bias):
    """(dx, dresidual, dw, db, dinput_bias); dx is not made at p = 0, where it is dresidual."""
    mask, p = mask_arguments(op, *place, dy.device), place[1]
    N, C = rows_and_columns(dy, normalized_shape)[1], dy.shape[-1]
    if dy.numel() == 0:
        sums = (*no_sums(dy, normalized_shape, need_dw, need_db), *no_sums(dy, (C,), need_dinput_bias))
        return dy.new_empty(0) if p == 0 else empty_like(dy), empty_like(dy), *sums
    if N != C:
        _, dresidual, dw, db, _ = _walk(
            dy, dr, r, mean, rstd, weight, normalized_shape, offset, rms, NO_MASK, need_dw, need_db, False
        )
        dx, dinput_bias = dropout_add_bwd(dresidual, *place, need_dinput_bias)
        return dy.new_empty(0) if p == 0 else dx, dresidual, dw, db, dinput_bias
    wanted = need_dw, need_db, need_dinput_bias and p < 1
    dx, dresidual, *sums = _walk(dy, dr, r, mean, rstd, weight, normalized_shape, offset, rms, mask, *wanted)
    if p == 1:
        return torch.zeros_like(dresidual), dresidual, *sums[:2], *no_sums(dy, (C,), need_dinput_bias)
    return dx, dresidual, *sums


def _walk(dy, dr, r, mean, rstd, weight, normalized_shape, offset, rms, mask, *wanted):
    """(dx, dresidual, dw, db, dinput_bias), with the mask of rows of N columns."""
    M, N = rows_and_columns(dy, normalized_shape)
    inner = len(normalized_shape)
    (dys, stride_dym), (rs, stride_rm) = row_view(dy, inner, N), row_view(r, inner, N)
    drs, stride_drm = (None, N) if dr is None else row_view(dr, inner, N)
    tensors = (dys, rs, *dense(mean, rstd, weight))
    constants = dict(OFFSET=offset, RMS=rms, ACC=compute_type(dy))
    whole_rows = fits(dy, N + mask.shift, longest_bwd(*wanted, mask.draws))
    means = (
        (None, None)
        if whole_rows
        else norm_bwd_means(*tensors, None, stride_dym, stride_rm, M, N, FROM_OUTPUT=False, **constants)
    )
    dx, dresidual = empty_like(dy) if mask.draws else dy.new_empty(0), empty_like(dy)
    walk = Walk(dy, M, N + mask.shift, whole_rows, tensors=2 if dr is None else 3, elements=8)
    sums = partials(dy, walk.programs, N, *wanted)
    outputs = (dx if mask.draws else None, dresidual, *sums)
    sizes = (stride_dym, stride_rm, stride_drm, M, N, _rows_of_a_plane(dy))
    launch(
        _dropout_add_norm_bwd_kernel, walk.grid, dy, *tensors, drs, *means, *outputs, *mask, *sizes, **constants, **walk.tile
    )  # fmt: skip
    dw, db, dinput_bias = column_sums(dy, normalized_shape, *sums)
    return dx, dresidual, dw, db, dinput_bias.view(-1)  # [C]: normalized_shape may be (1, C)


def _rows_of_a_plane(x):
    return x.shape[-2] if x.dim() > 1 else 1


def dropout_add_layer_norm_fwd(x, residual, input_bias, weight, bias, normalized_shape, eps, seed, p, stream, origin):
    place = (seed, p, stream, origin)
    return _fwd("dropout_add_layer_norm_fwd", x, residual, input_bias, weight, bias, normalized_shape, eps, 0.0, False, *place)


def dropout_add_layer_norm_bwd(
    dy, dr, r, mean, rstd, weight, normalized_shape, seed, p, stream, origin, need_dw, need_db, need_dinput_bias
):
    needs = dict(need_dw=need_dw, need_db=need_db, need_dinput_bias=need_dinput_bias)
    place = (seed, p, stream, origin)
    return _bwd("dropout_add_layer_norm_bwd", dy, dr, r, mean, rstd, weight, normalized_shape, 0.0, False, *place, **needs)


def dropout_add_rms_norm_fwd(x, residual, input_bias, weight, normalized_shape, eps, offset, seed, p, stream, origin):
    place = (seed, p, stream, origin)
    y, r, _, rstd = _fwd(
        "dropout_add_rms_norm_fwd", x, residual, input_bias, weight, None, normalized_shape, eps, offset, True, *place
    )
    return y, r, rstd


def dropout_add_rms_norm_bwd(
    dy, dr, r, rstd, weight, normalized_shape, offset, seed, p, stream, origin, need_dw, need_dinput_bias
):
    needs = dict(need_dw=need_dw, need_db=False, need_dinput_bias=need_dinput_bias)
    place = (seed, p, stream, origin)
    dx, dresidual, dw, _, dinput_bias = _bwd(
        "dropout_add_rms_norm_bwd", dy, dr, r, None, rstd, weight, normalized_shape, offset, True, *place, **needs
    )
    return dx, dresidual, dw, dinput_bias


def _compile_cases():
    """bf16 rows and parameters, with a gradient for r; dinput_bias with RMS, whose db there is not."""
    like = torch.empty(0, dtype=torch.bfloat16)
    mask = dict(seed_ptr="*i64", scale="fp32", **{n: "i32:16" if n == "shift" else "i32" for n in PLACE[:5] + ("shift",)})
    forward = dict.fromkeys(("x_ptr", "residual_ptr", "input_bias_ptr", "y_ptr", "r_ptr"), "*bf16") | dict(EPS=1e-5)
    forward |= dict(stride_xm="i32:16", stride_residual="i32:16")
    backward = dict.fromkeys(("dy_ptr", "dr_ptr", "r_ptr", "dresidual_ptr"), "*bf16")
    backward |= dict(stride_dym="i32:16", stride_rm="i32:16", stride_drm="i32:16", dw_ptr="*fp32")
    for rms, drops in ((False, True), (True, False), (False, False), (True, True)):
        some = None if rms else "*fp32"
        norm = dict(w_ptr="*bf16", mean_ptr=some, rstd_ptr="*fp32", M="i32", N="i32:16", rows="i32")
        norm |= dict(OFFSET=0.0, RMS=rms, ACC=tl.float32) | mask | ({} if drops else dict(seed_ptr=None))
        sums = dict(db_ptr=some, dinput_bias_ptr="*fp32" if rms else None, dx_ptr="*bf16" if drops else None)
        label = ("rms" if rms else "layer") + (" mask" if drops else "")
        for N in (1024, 4096, 8192) if rms != drops else (4096,):
            given = norm | forward | dict(b_ptr=None if rms else "*bf16")
            yield compile_case(f"{label} bf16 {N}", _dropout_add_norm_fwd_kernel, fwd_tile(N), **given)
            whole = longest_bwd(True, not rms, rms, drops) >= N
            means = dict(c1_ptr=None if whole else some, c2_ptr=None if whole else "*fp32")
            tile = Walk(like, 8192, N, whole, tensors=3, elements=8).tile
            yield compile_case(f"{label} bf16 {N}", _dropout_add_norm_bwd_kernel, tile, **norm, **backward, **sums, **means)
        if rms != drops:
            given = norm | forward | dict(b_ptr=None if rms else "*bf16")
            yield compile_case(f"{label} bf16 65536", _dropout_add_norm_fwd_looped_kernel, LOOPED, **given)


COMPILE_CASES = tuple(_compile_cases())
