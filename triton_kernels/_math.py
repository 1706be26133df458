"""Math that kernels share, once: the mask contract and activations as pairs f, df. Twin of csrc/math.

Contract (ckpt_ops/mask.py): call (4 * (col // 32) + (col % 8) // 2, row, plane, stream) of Philox4x32-7 gives eight draws;
an element's is word (col % 32) // 8, half col % 2; kept where draw >= threshold. Both tiles below make one call for eight
elements. Their first column is a multiple of 32 of the whole tensor: a kernel whose tensor starts at another column (origin)
lets its tiles begin before it.
"""

import triton
import triton.language as tl

PHILOX_A = tl.constexpr(0xD2511F53)
PHILOX_B = tl.constexpr(0xCD9E8D57)
WEYL_A = tl.constexpr(0x9E3779B9)
WEYL_B = tl.constexpr(0xBB67AE85)


@triton.jit
def philox4x32_7(c0, c1, c2, c3, key0, key1):
    """Philox4x32-7 (Salmon et al., SC 2011) on uint32: tl.philox changes its algorithm with the counter's type.

    Twin: csrc/math/philox.h.
    """
    multiplier0, multiplier1 = tl.full((), PHILOX_A, tl.uint64), tl.full((), PHILOX_B, tl.uint64)
    weyl0, weyl1 = tl.full((), WEYL_A, tl.uint32), tl.full((), WEYL_B, tl.uint32)
    for _ in tl.static_range(7):
        product0, product1 = c0.to(tl.uint64) * multiplier0, c2.to(tl.uint64) * multiplier1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 += weyl0
        key1 += weyl1
    return c0, c1, c2, c3


@triton.jit
def seed_key(seed_ptr):
    """The two key words of a seed: an int64 read as uint64."""
    seed = tl.load(seed_ptr)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32)


@triton.jit
def _draws(key0, key1, row, plane, stream, col, M: tl.constexpr, N: tl.constexpr):
    """The four words of every call of a tile, [M, N // 32, 4] each: group of 32 columns, call."""
    group = (col // 32).to(tl.uint32) + tl.arange(0, N // 32).to(tl.uint32)
    call = 4 * group[None, :, None] + tl.arange(0, 4).to(tl.uint32)[None, None, :]
    zero = tl.zeros([M, N // 32, 4], tl.uint32)
    c1 = zero + row.to(tl.uint32)[:, None, None]
    c2 = zero + (plane.to(tl.uint32)[:, None, None] if len(plane.shape) == 1 else plane.to(tl.uint32))
    return philox4x32_7(zero + call, c1, c2, zero + stream.to(tl.uint32), key0, key1)


@triton.jit
def _bits(word, threshold, w: tl.constexpr):
    """Whether a word's two draws are kept, as bits 8w and 8w + 1."""
    low = tl.where((word & 0xFFFF) >= threshold, tl.full(word.shape, 1 << (8 * w), tl.uint32), 0)
    high = tl.where((word >> 16) >= threshold, tl.full(word.shape, 2 << (8 * w), tl.uint32), 0)
    return low | high


@triton.jit
def keep_words(key0, key1, threshold, stream, plane, row, col, M: tl.constexpr, N: tl.constexpr):
    """[M, N // 32]: bit c of a word tells whether column c of its group of 32 is kept. Four threads gather one."""
    r0, r1, r2, r3 = _draws(key0, key1, row, plane, stream, col, M, N)
    t = threshold.to(tl.uint32)
    bits = _bits(r0, t, 0) | _bits(r1, t, 1) | _bits(r2, t, 2) | _bits(r3, t, 3)  # those of columns 8w + 2 * call
    return tl.sum(bits << (2 * tl.arange(0, 4).to(tl.uint32))[None, None, :], axis=2)


@triton.jit
def true_scale(threshold, C: tl.constexpr):
    """What the mask multiplies a kept element by, in the type C: an argument is a float32, not enough for float64."""
    return 65536.0 / (65536 - threshold).to(C)


@triton.jit
def keep_rows(key0, key1, threshold, stream, plane, row, col, M: tl.constexpr, N: tl.constexpr):
    """[M, N] bool: which elements of a row or element-wise kernel's tile are kept.

    row, plane: [M] (plane: or a scalar); col: scalar, a multiple of 32, of the tile's first column. All absolute. N >= 32.
    """
    words = keep_words(key0, key1, threshold, stream, plane, row, col, M, N)
    # reshape, as [:, :, None] would let the compiler move the layout of the elements through the sum: every thread would
    # then make all four calls.
    mine = tl.full([32], 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)
    return tl.reshape(tl.reshape(words, [M, N // 32, 1]) & mine[None, None, :], [M, N]) != 0


@triton.jit
def keep_tile(key0, key1, threshold, stream, plane, row, col, M: tl.constexpr, N: tl.constexpr):
    """The same mask, built in the order in which a tensor core's accumulator lays a row over its threads: for attention."""
    call = (col // 8).to(tl.uint32) + tl.arange(0, N // 8).to(tl.uint32)
    zero = tl.zeros([M, N // 8], tl.uint32)
    c1 = zero + row.to(tl.uint32)[:, None]
    r0, r1, r2, r3 = philox4x32_7(zero + call[None, :], c1, zero + plane.to(tl.uint32), zero + stream.to(tl.uint32), key0, key1)
    # One join has all four words, in pairs: after two, the compiler would not move the layout up through Philox.
    pairs = tl.join(r0.to(tl.uint64) | (r1.to(tl.uint64) << 32), r2.to(tl.uint64) | (r3.to(tl.uint64) << 32))
    draws = tl.join(pairs.to(tl.uint32), (pairs >> 32).to(tl.uint32))  # [M, group and call, w >> 1, w & 1]
    draws = tl.permute(tl.reshape(draws, [M, N // 32, 4, 4]), [0, 1, 3, 2])  # [M, group, w, call]
    draws = tl.join(draws & 0xFFFF, draws >> 16)  # the last: which half
    return tl.reshape(draws, [M, N]) >= threshold.to(tl.uint32)


# Activations. Twin: csrc/math/activation.h, which has their sources.


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def normal_cdf(x):
    """Phi(x). In float32 the rational function of csrc/cpu/vec.h, with error 1.2e-8 and nothing that cancels."""
    if x.dtype == tl.float64:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        u = x * x
        p = ((((2.1580294743288474e-8 * u + 6.37419046151421e-6) * u + 0.0001793941234016932) * u + 0.004740829529080862) * u
             + 0.0349411610599356) * u + 0.39894220586721124  # fmt: skip
        q = ((((1.1649627623059937e-6 * u + 7.676796937126462e-5) * u + 0.0019445540594104453) * u + 0.029260690812638927) * u
             + 0.2542499711757732) * u + 1.0  # fmt: skip
        cdf = 0.5 + x * p / q
        return tl.where(x < -5.65, 0.0, tl.where(x > 5.65, 1.0, cdf))


@triton.jit
def normal_pdf(x):
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def positive(x):
    """max(x, 0) that lets NaN through."""
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def twice_u(x):
    """Of GELU's tanh form, x * sigmoid(2u)."""
    return x * (1.5957691216057308 + 0.07135481627260025 * x * x)


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "gelu":
        return x * normal_cdf(x)
    elif ACT == "gelu_tanh":
        return x * sigmoid(twice_u(x))
    elif ACT == "relu":
        return positive(x)
    elif ACT == "silu":
        return x * sigmoid(x)
    else:
        tl.static_assert(ACT == "relu2")
        return positive(x) * positive(x)


@triton.jit
def activate_grad(x, ACT: tl.constexpr):
    if ACT == "gelu":
        return normal_cdf(x) + x * normal_pdf(x)
    elif ACT == "gelu_tanh":
        s = sigmoid(twice_u(x))
        return s + s * (1.0 - s) * (x * (1.5957691216057308 + 0.21406444881780076 * x * x))
    elif ACT == "relu":
        return tl.where(x > 0, 1.0, 0.0).to(x.dtype)
    elif ACT == "silu":
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    else:
        tl.static_assert(ACT == "relu2")
        return 2.0 * positive(x)
