"""What every op means, in plain torch: any device, any floating dtype, differentiable as often as asked.

The kernels are held to these functions in float64; they also serve as the `reference` backend. Statistics and
sums of 16-bit inputs are float32. A mask is built by `dropout_mask`, the contract in torch integers.
"""

import torch
import torch.nn.functional as F

_LOW = 0xFFFFFFFF
_ROUNDS = 7


def philox4x32(counter, key):
    """Philox4x32-7 (Salmon et al., SC 2011) on int64 tensors that hold 32-bit words.

    counter: four broadcastable tensors, key: two. Returns four tensors of words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps all 64 bits of the unsigned product.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def split_seed(seed):
    """The two 32-bit key words of an int64 seed tensor, as int64; the seed is never read on the host."""
    return seed & _LOW, (seed >> 32) & _LOW


def threshold(p):
    """How many of 65536 equally likely draws are dropped."""
    return min(max(round(p * 65536), 1), 65535)


def scale(p):
    """What a kept element is multiplied by: 1 / (the keep probability really used); 1 at p = 0, 0 at p = 1."""
    if p == 0 or p == 1:
        return 1.0 - p
    return 65536.0 / (65536 - threshold(p))


def dropout_mask(shape, p, seed, stream=0, origin=(0, 0, 0), *, plane_stride=None, device=None):
    """The mask of the contract (mask.py): bool, True = kept.

    plane_stride: with shape [B, H, R, C], plane = plane0 + b * plane_stride + h (attention's heads_total).
    """
    if p == 0 or p == 1:
        return torch.full(shape, p == 0, dtype=torch.bool, device=device)
    device = seed.device
    planes, rows, cols = 1, 1, 1
    if len(shape) > 0:
        cols = shape[-1]
    if len(shape) > 1:
        rows = shape[-2]
    for n in shape[:-2]:
        planes = planes * n
    plane = torch.arange(planes, device=device)
    if plane_stride is not None:
        plane = plane // shape[-3] * plane_stride + plane % shape[-3]
    plane = (plane + origin[0])[:, None, None]
    row = (torch.arange(rows, device=device) + origin[1])[None, :, None]
    first = origin[2] // 32  # whole groups of 32 columns, four calls each
    groups = (origin[2] + cols + 31) // 32 - first
    call = torch.arange(4 * first, 4 * (first + groups), device=device)[None, None, :]
    words = torch.stack(philox4x32((call, row, plane, torch.full_like(call, stream)), split_seed(seed.reshape(()))))
    words = words.reshape(4, planes, rows, groups, 4).permute(1, 2, 3, 0, 4)  # [plane, row, group, word, call]
    keep = torch.stack((words & 0xFFFF, words >> 16), -1) >= threshold(p)  # (word, call, half) is the order of columns
    skip = origin[2] % 32
    return keep.reshape(planes, rows, 32 * groups)[..., skip : skip + cols].reshape(shape)


def masked(x, random, **mask_options):
    """m * x with m = keep * scale. A dropped inf or NaN is 0, as in the kernels."""
    if random.p == 0:
        return x
    keep = dropout_mask(x.shape, random.p, random.seed, random.stream, random.origin, device=x.device, **mask_options)
    return torch.where(keep, x * scale(random.p), torch.zeros((), dtype=x.dtype, device=x.device))


def dropout(x, random):
    return masked(x, random).contiguous()


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


def act_dropout(x, bias, act, random):
    h = _wide(x) if bias is None else _wide(x) + _wide(bias)
    return _like(x, masked(ACTIVATIONS[act](h), random))


def dropout_add(x, residual, bias, random):
    h = _wide(x) if bias is None else _wide(x) + _wide(bias)
    return _like(x, _wide(residual) + masked(h, random))


def layer_norm(x, weight, bias, normalized_shape, eps):
    h, dims = _wide(x), _last(normalized_shape)
    centred = h - h.mean(dims, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        y = y * _wide(weight)
    if bias is not None:
        y = y + _wide(bias)
    return _like(x, y)


def rms_norm(x, weight, normalized_shape, eps, offset):
    h, dims = _wide(x), _last(normalized_shape)
    y = h * torch.rsqrt(h.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        y = y * (_wide(weight) + offset)
    return _like(x, y)


def dropout_add_layer_norm(x, residual, input_bias, weight, bias, normalized_shape, eps, random):
    r = dropout_add(x, residual, input_bias, random)
    return layer_norm(r, weight, bias, normalized_shape, eps), r


def dropout_add_rms_norm(x, residual, input_bias, weight, normalized_shape, eps, offset, random):
    r = dropout_add(x, residual, input_bias, random)
    return rms_norm(r, weight, normalized_shape, eps, offset), r


def attention(q, k, v, attn_mask, causal, scale_, random, heads_total):
    """q [B, Hq, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] -> o [B, Hq, Nq, Dv]. The scores are materialised."""
    group = q.shape[1] // k.shape[1]
    kw, vw = (_wide(t).repeat_interleave(group, dim=1) for t in (k, v))
    scores = _wide(q) @ kw.transpose(-1, -2) * scale_
    allowed = visible(scores.shape, attn_mask, causal, scores.device)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(scores.dtype)
    # A row that sees no key is 0 with zero gradients, so its softmax runs over finite stand-ins.
    alive = allowed.any(-1, keepdim=True)
    probabilities = torch.softmax(torch.where(allowed | ~alive, scores, -torch.inf).masked_fill(~alive, 0.0), -1)
    probabilities = torch.where(allowed, probabilities, 0.0)
    o = masked(probabilities, random, plane_stride=heads_total) @ vw
    return _like(q, o.transpose(1, 2)).transpose(1, 2)  # in memory [B, Nq, Hq, Dv]


def visible(shape, attn_mask, causal, device):
    """bool [B, H, Nq, Nk]: which keys a query may see. causal: 0 all, 1 aligned upper left, 2 lower right."""
    queries, keys = shape[-2:]
    allowed = torch.ones(shape, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed.tril(keys - queries if causal == 2 else 0)
    if attn_mask is not None:
        allowed = allowed & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > masked_below(attn_mask.dtype))
    return allowed


def masked_below(dtype):
    """A float attention mask hides a key at -inf and at finfo.min, of its own dtype or of bfloat16 (masks get cast)."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min)


def _like(x, y):
    """A result leaves in x's dtype, contiguous whatever x's strides."""
    return y.to(x.dtype).contiguous()


def _wide(t):
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _last(normalized_shape):
    return tuple(range(-len(normalized_shape), 0))
