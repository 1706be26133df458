"""What the passes of attention share: a tile of BLOCK_M queries against BLOCK_N keys.

Scores are kept in base 2 (log2(e) times the natural ones): exp2 is one instruction. Tiles of keys begin where the dropout
mask's groups of 32 columns do: the first one at key -shift, where shift = origin's column % 32, 0 as a rule.
"""

import triton
import triton.language as tl

from ._math import keep_words

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NO_MASK, BOOL_MASK, FLOAT_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def compute_type(dtype):
    """What sums over elements of that type are kept in: float32, float64 for float64."""
    return tl.float64 if dtype == tl.float64 else tl.float32


@triton.jit
def int64(n):
    """A scalar, also one that the interpreter holds as a Python int."""
    return tl.full((), n, tl.int64)


@triton.jit
def base_2(scale, C: tl.constexpr):
    """The scale of base-2 scores. In float64 it lies in q already (an argument is a float32) and is 1."""
    if tl.float64 == C:
        return tl.full((), LOG2_E, tl.float64)
    else:
        return scale * LOG2_E


@triton.jit
def dot(a, b, acc):
    """a @ b + acc; float32 is not rounded to tf32."""
    if INTERPRETED and a.dtype == tl.bfloat16:  # held there as integers, which its dot would multiply
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee", out_dtype=acc.dtype)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def inside(n, N):
    """0 <= n < N, in one comparison."""
    return n.to(tl.uint32) < N.to(tl.uint32)


@triton.jit
def tile_offsets(rows: tl.constexpr, cols: tl.constexpr, stride):
    """[rows, cols], of a tile whose rows are `stride` elements apart; of the stride's type (launchers keep inputs' small)."""
    return tl.arange(0, rows)[:, None] * stride + tl.arange(0, cols)[None, :]


@triton.jit
def load_tile(ptrs, row, N, D: tl.constexpr):
    """Rows of a head; 0 outside rows [0, N) and past D columns."""
    col = tl.arange(0, ptrs.shape[1])[None, :]
    return tl.load(ptrs, mask=inside(row, N)[:, None] & (col < D), other=0.0)


@triton.jit
def store_tile(ptrs, x, row, N, D: tl.constexpr):
    col = tl.arange(0, ptrs.shape[1])[None, :]
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=inside(row, N)[:, None] & (col < D))


@triton.jit
def add_mask(s, mask_ptr, stride_r, stride_c, r, c, R, C, MASK: tl.constexpr):
    """Base-2 scores plus the attention mask; -inf hides. r, c: the rows and columns of s, queries or keys, of R and C."""
    hidden = float("-inf")
    exists = inside(r, R)[:, None] & inside(c, C)[None, :]
    ptrs = mask_ptr + r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
    if MASK == BOOL_MASK:
        return tl.where(tl.load(ptrs, mask=exists, other=0) != 0, s, hidden)
    # finfo.min of float16, and of bfloat16 for wider masks (which may have been cast): at or below it a key is hidden.
    lowest: tl.constexpr = -65504.0 if mask_ptr.dtype.element_ty == tl.float16 else -3.3895313892515355e38
    bias = tl.load(ptrs, mask=exists, other=0.0).to(s.dtype)
    return tl.where(bias <= lowest, hidden, s + bias * LOG2_E)


@triton.jit
def hide(s, i, j, Nk, causal_shift, CAUSAL: tl.constexpr):
    """Scores of keys that do not exist, or come after the query, are -inf. causal_shift: 0 upper left, Nk - Nq lower right."""
    seen = inside(j, Nk)[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= (i + causal_shift)[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def keys_seen(i0, shift, Nq, Nk, causal_shift, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(edge, stop) for the queries from i0 on: they see all keys of the tiles before edge, and none from stop on."""
    whole, stop = Nk, Nk
    if CAUSAL:
        whole = tl.minimum(i0 + causal_shift + 1, Nk)
        stop = tl.minimum(tl.minimum(i0 + BLOCK_M, Nq) + causal_shift, Nk)
    edge = tl.maximum(whole, 0) // BLOCK_N * BLOCK_N
    if shift > 0:  # rare: every tile is treated as one at an edge
        edge = -shift
    return edge, stop


@triton.jit
def keep_keys_by_queries(key0, key1, threshold, stream, plane, row, col, M: tl.constexpr, N: tl.constexpr):
    """keep_tile's mask as [N, M]. Only the words of 32 columns change their layout."""
    words = keep_words(key0, key1, threshold, stream, plane, row, col, M, N)
    words = tl.reshape(tl.trans(words), [N // 32, 1, M])
    mine = tl.full([32], 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)
    return tl.reshape(words & mine[None, :, None], [N, M]) != 0
