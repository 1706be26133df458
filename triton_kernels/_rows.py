"""What the norms' kernels share: the statistics of a tile's rows, what is normalised, its gradient.

A tile is [ROWS, BLOCK_N], zero outside the tensor. Compute type: float32, float64 for float64. `RMS`: no mean.
"""

import triton
import triton.language as tl


@triton.jit
def parameter(ptr, col, inside, default: tl.constexpr, ACC: tl.constexpr):
    """A parameter's columns in the compute type; its default where there is none, and outside."""
    value = tl.full(col.shape, default, ACC)
    if ptr is not None:
        value = tl.load(ptr + col, mask=inside, other=default).to(ACC)
    return value


@triton.jit
def weight(w_ptr, col, inside, OFFSET: tl.constexpr, ACC: tl.constexpr):
    """weight + offset; 1 where there is no weight."""
    w = parameter(w_ptr, col, inside, 1.0, ACC)
    return w if w_ptr is None else w + OFFSET


@triton.jit
def row_statistic(ptr, row, M):
    """A statistic of a tile's rows, [ROWS, 1]."""
    return tl.load(ptr + row, mask=row < M, other=0.0)[:, None]


@triton.jit
def store_statistics(mean_ptr, rstd_ptr, row, inside, mean, rstd):
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=inside)


@triton.jit
def inverse_root_mean(total, N, EPS: tl.constexpr):
    """1 / sqrt(total / N + EPS), in float32 rounded once.  Twin: csrc/math/scalar.h.

    The backward of few columns takes the difference of nearly equal numbers. What the division, the addition and the root
    lost is added back by a Newton step, where that is finite.
    """
    q = total / N
    v = q + EPS
    r = 1 / tl.sqrt(v)
    if total.dtype == tl.float64:
        return r
    else:
        count = tl.zeros_like(total) + N
        added = v - q
        lost = tl.fma(-q, count, total) / N + (q - (v - added)) + (EPS - added)
        t = v * r
        miss = tl.fma(-t, r, 1.0) - tl.fma(v, r, -t) * r - lost * r * r
        return tl.where(tl.abs(miss) < 1, r + 0.5 * r * miss, r)


@triton.jit
def statistics(x, inside, N, EPS: tl.constexpr, RMS: tl.constexpr):
    """(mean, rstd) of a tile's rows. Two passes, the second around the first one's mean: no cancellation."""
    if RMS:
        mean = tl.zeros([x.shape[0]], x.dtype)
        squares = tl.sum(x * x, 1)
    else:
        guess = tl.sum(x, 1) / N
        d = tl.where(inside, x - guess[:, None], 0.0)
        shift = tl.sum(d, 1) / N
        mean = guess + shift
        squares = tl.maximum(tl.sum(d * d, 1) - shift * shift * N, 0.0)
    return mean, inverse_root_mean(squares, N, EPS)


@triton.jit
def welford_step(x, inside, mean, m2, count, RMS: tl.constexpr):
    """One more value for each lane inside: into its mean and sum of squares about it.  Welford, Technometrics 4(3), 1962."""
    if RMS:
        m2 += x * x
    else:
        count += inside.to(count.dtype)
        d = tl.where(inside, x - mean, 0.0)
        mean += d / tl.maximum(count, 1.0)
        m2 += d * (x - mean)
    return mean, m2, count


@triton.jit
def welford_total(mean, m2, count, N, EPS: tl.constexpr, RMS: tl.constexpr):
    """(mean, rstd), [1] each, of a row whose values [1, BLOCK_N] lanes share.  Chan, Golub, LeVeque, 1979."""
    if RMS:
        total = tl.zeros([1], m2.dtype)
    else:
        guess = tl.sum(mean * count, 1) / N
        total = guess + tl.sum((mean - guess[:, None]) * count, 1) / N
        m2 += (mean - total[:, None]) * (mean - total[:, None]) * count
    return total, inverse_root_mean(tl.sum(m2, 1), N, EPS)


@triton.jit
def normalized(x, mean, rstd, RMS: tl.constexpr):
    return x * rstd if RMS else (x - mean) * rstd


@triton.jit
def store_normalized(
    y_ptr, x, mean, rstd, w_ptr, b_ptr, row, col, column, inside, N, OFFSET: tl.constexpr, RMS: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """y of a tile. column: which of its columns exist; inside: which of its elements."""
    w, b = weight(w_ptr, col, column, OFFSET, ACC), parameter(b_ptr, col, column, 0.0, ACC)
    y = normalized(x, mean[:, None], rstd[:, None], RMS) * w + b
    tl.store(y_ptr + row[:, None] * N + col, y, mask=inside)


@triton.jit
def grad_means(g, xhat, c1_ptr, c2_ptr, row, M, N, RMS: tl.constexpr):
    """mean(g) and mean(g * xhat) of whole rows, [ROWS, 1]; as computed before where the tile has only some columns."""
    if c2_ptr is None:
        c2 = tl.sum(g * xhat, 1)[:, None] / N
        c1 = c2 if RMS else tl.sum(g, 1)[:, None] / N
    else:
        c2 = row_statistic(c2_ptr, row, M)
        c1 = c2 if RMS else row_statistic(c1_ptr, row, M)
    return c1, c2


@triton.jit
def grad_input(g, xhat, rstd, c1, c2, RMS: tl.constexpr):
    return tl.fma(-xhat, c2, g if RMS else g - c1) * rstd
