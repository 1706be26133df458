"""What the norms share: rows as tiles, their statistics and gradients, and parameter gradients in two stages.

A tile is [ROWS, BLOCK_N], zero outside the tensor. Compute type: float32, float64 for float64. `RMS`: no mean.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from ._launch import INTERPRETED, TILE, CompileCase, launch

# --- statistics and gradients of whole rows ---------------------------------------------------------------------------


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


# --- parameter gradients in two stages, without atomics ------------------------------------------------------------------


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
    dtype = compute_dtype(like)
    return [torch.empty(programs, N, dtype=dtype, device=like.device) if want else None for want in wanted]


def no_sums(like, shape, *wanted):
    """What column_sums gives where there are no rows."""
    return [like.new_zeros(shape if want else (0,), dtype=compute_dtype(like)) for want in wanted]


def column_sums(like, shape, *parts):
    """Second stage, in one launch: what the programs' sums add up to, [*shape] each; [0] where nothing was wanted."""
    present = [part for part in parts if part is not None]
    if not present or len(present[0]) == 1:
        return [like.new_empty(0, dtype=compute_dtype(like)) if part is None else part.view(shape) for part in parts]
    sums = [like.new_empty((0,) if part is None else shape, dtype=compute_dtype(like)) for part in parts]
    P, N = present[0].shape
    padding = [None] * (3 - len(parts))
    outputs = [None if part is None else total for part, total in zip(parts, sums)]
    grid = (triton.cdiv(N, SUMS_TILE["BLOCK_N"]),)
    launch(_column_sums_kernel, grid, like, *parts, *padding, *outputs, *padding, P, N, **SUMS_TILE)
    return sums


# --- sizes of tiles and grids -------------------------------------------------------------------------------------------

SUMS_TILE = dict(BLOCK_P=64, BLOCK_N=1024 if INTERPRETED else 32, num_warps=4)
LOOPED = dict(BLOCK_N=4096, num_warps=8)  # of kernels that read one row a program, block by block
LONGEST_FWD = 16384  # columns of a tile that stays in registers; half for float64


def longest_bwd(*held):
    """The same where a thread holds more beside the tile: for each of `held` a value a column."""
    return 8192 if sum(held) <= 2 else 4096


def compute_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def compute_type(x):
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def fits(x, N, longest):
    limit = longest // 2 if x.dtype == torch.float64 else longest
    return limit >= N


@functools.cache
def fwd_tile(N):
    """16 elements a thread: several short rows a program."""
    BLOCK_N = max(32, triton.next_power_of_2(N))
    ROWS = max(1, TILE // BLOCK_N)
    return dict(ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=min(max(4, ROWS * BLOCK_N // 512), 16))


@functools.cache
def bwd_tile(N, elements):
    """So many elements a thread, 8 columns where rows are long enough: it then sums its columns over rows alone."""
    BLOCK_N = max(32, triton.next_power_of_2(N))
    warps = min(max(4, BLOCK_N // 256), 16)
    ROWS = max(1, warps * 32 * elements // BLOCK_N)
    if INTERPRETED:  # it takes as long for a tile of any size, but adds rows up one by one
        ROWS = min(ROWS * 32, 128)
    return dict(ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=warps)


class Walk:
    """The grid and tile of a kernel that walks the rows: of whole rows, or of blocks of columns.

    16 warps a multiprocessor share the rows: as many as have 128 registers a thread. Shape and device alone decide.
    """

    def __init__(self, like, M, N, whole_rows, tensors, elements=16):
        tile = bwd_tile(N if whole_rows else min(N, 1024), elements)
        blocks = triton.cdiv(N, tile["BLOCK_N"])
        at_once = multiprocessors(like.device) * 16 // (tile["num_warps"] * blocks)
        self.programs = min(triton.cdiv(M, tile["ROWS"]), max(2, at_once))
        self.grid = (self.programs, blocks)
        self.tile = dict(**tile, STAGES=stages(tile, tensors * like.element_size()))


def stages(tile, nbytes):
    """Tiles at work and on their way: some 64 KB a multiprocessor wait in shared memory.  nbytes: of all inputs' elements."""
    return 3 if nbytes * tile["ROWS"] * tile["BLOCK_N"] * 16 // tile["num_warps"] <= 32768 else 2


@functools.cache
def multiprocessors(device):
    """None on a CPU: there a few programs walk all rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


# --- tensors as rows --------------------------------------------------------------------------------------------------


def row_view(x, inner, N):
    """(tensor, row stride): x as rows of its last `inner` dimensions, N elements; a copy where one stride cannot do it."""
    if x.is_contiguous():
        return x, N
    sizes, strides, step = x.shape, x.stride(), 1
    for d in range(x.dim() - 1, x.dim() - inner - 1, -1):
        if sizes[d] != 1 and strides[d] != step:
            return x.contiguous(), N
        step *= sizes[d]
    row, step = N, None
    for d in range(x.dim() - inner - 1, -1, -1):
        if sizes[d] == 1:
            continue
        if step is None:
            row = step = strides[d]
        elif strides[d] != step:
            return x.contiguous(), N
        step *= sizes[d]
    return x, row


def rows_and_columns(x, normalized_shape):
    lead = x.dim() - len(normalized_shape)
    return math.prod(x.shape[:lead]), math.prod(normalized_shape)


def dense(*tensors):
    """Parameters and statistics as kernels read them."""
    return [None if t is None else t.contiguous() for t in tensors]


def empty_like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def compile_case(name, kernel, tile, wide=True, **arguments):
    """A CompileCase with a tile as launchers pass it."""
    constants = {k: v for k, v in tile.items() if k != "num_warps"}
    return CompileCase(name, kernel, arguments | constants, num_warps=tile["num_warps"], wide=wide)


_sums = dict(
    a_ptr="*fp32", a_sum_ptr="*fp32", b_ptr="*fp32", b_sum_ptr="*fp32", c_ptr=None, c_sum_ptr=None, P="i32", N="i32:16"
)
COMPILE_CASES = (compile_case("fp32", _column_sums_kernel, SUMS_TILE, wide=False, **_sums),)
