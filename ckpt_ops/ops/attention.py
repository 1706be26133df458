"""o = softmax(scale * q k^T + mask) v with dropout on the probabilities, in tiles: memory linear in sequence length.

    forward    P = exp(scale * q k^T + mask - lse),  o = (m * P) v       m = keep * scale, regrown from (seed, index)
    backward   dv = (m * P)^T do,  dS = P * (m * (do v^T) - rowsum(do * o)),  dq = scale * dS k,  dk = scale * dS^T q
    saved      q, k, v, o, lse (4 bytes a row), seed (8 bytes)           never: scores, probabilities, the mask

The mask's plane is b * heads_total + h, its row the query, its column the key (mask.py). A query that sees no key gives
0 and zero gradients. Dao, "FlashAttention-2", arXiv:2307.08691.
"""

import math

import torch

from .. import dispatch, reference, seeds
from ..library import fake
from ._common import call, check_floating, distinct, first_derivative_only, op, statistics_dtype, vmap_by_sample

CAUSAL = {False: 0, "upper_left": 1, "lower_right": 2}


@fake("attention_fwd")
def _(q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total):
    o = _heads_inside(q.new_empty((*q.shape[:3], v.shape[-1])))
    return o, q.new_empty(q.shape[:3], dtype=statistics_dtype(q.dtype))


@fake("attention_bwd")
def _(do, q, k, v, o, lse, attn_mask, causal, scale, seed, p, stream, origin, heads_total):
    return tuple(_heads_inside(t) for t in (q, k, v))


def _heads_inside(t):
    """Empty, of t's shape [B, H, N, D], laid out as [B, N, H, D]: what a projection writes and reads."""
    batch, heads, length, size = t.shape
    return t.new_empty((batch, length, heads, size)).transpose(1, 2)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total, namespace):
        return op(namespace, "attention_fwd")(q, k, v, attn_mask, causal, scale, seed, p, stream, origin, heads_total)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, attn_mask, ctx.causal, ctx.scale, seed, *ctx.rest = inputs
        o, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse, attn_mask, seed)

    @staticmethod
    def backward(ctx, do, _dlse):
        if do is None:
            return (None,) * 12
        q, k, v, o, lse, attn_mask, seed = ctx.saved_tensors
        *place, namespace = ctx.rest
        grads = op(namespace, "attention_bwd")(do, q, k, v, o, lse, attn_mask, ctx.causal, ctx.scale, seed, *place)
        return *first_derivative_only("attention", grads, do, q, k, v), *(None,) * 9

    @staticmethod
    def vmap(info, in_dims, *args):
        return vmap_by_sample(Attention, info, in_dims, args)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
    causal_align=None, heads_total=None, training=True,
    seed=None, stream=0, origin=(0, 0, 0), generator=None, backend=None,
):  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention with dropout that keeps 8 bytes, and more.

    Args:
        query: [..., Hq, Nq, D], key: [..., Hkv, Nk, D], value: [..., Hkv, Nk, Dv]; floating, any strides; D, Dv in 1..256.
            Leading dimensions broadcast. Two dimensions are one head, three are [batch, N, D], as in torch.
        attn_mask: bool (True = may be seen) or floating (added to the scores; -inf and finfo.min hide a key),
            broadcastable to [..., Hq, Nq, Nk]; it gets no gradient here. May be combined with is_causal.
        dropout_p: drop probability of the attention weights; not applied where training is False.
        is_causal: query i sees keys j <= i, aligned upper left as in torch.
        scale: of the scores, 1 / sqrt(D) if None.
        enable_gqa: lets Hq be a multiple of Hkv; query head h uses key head h // (Hq // Hkv).
        causal_align: "upper_left" or "lower_right" (query i sees keys j <= i + Nk - Nq); implies is_causal.
        heads_total: heads of the unsharded tensor where this one holds a part of them: a shard that starts at batch b0,
            head h0 passes origin=(b0 * heads_total + h0, row0, col0).
        seed, stream, origin, generator, backend: as in `dropout`.

    Returns: [..., Hq, Nq, Dv] in the query's dtype (under autocast the autocast dtype, as torch's); laid out in memory as
        [..., Nq, Hq, Dv], so that transpose(-3, -2).flatten(-2) is a view.
    Kept for backward: query, key, value, the result, 4 bytes a query row (8 for float64), the seed (8 bytes).
    Raises: TypeError, ValueError for bad input; RuntimeError if a named backend cannot serve, or for a second derivative.
    Source: Dao, arXiv:2307.08691.
    """
    query, key, value = _autocast(query, key, value)
    check_floating("scaled_dot_product_attention", query=query, key=key, value=value)
    causal = _causal(is_causal, causal_align)
    lead, q, k, v = _four_dimensional(query, key, value)
    _check_heads(q, k, v, enable_gqa)
    attn_mask = _check_mask(attn_mask, (*lead, q.shape[-3] if query.dim() > 3 else None, q.shape[-2], k.shape[-2]), q)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    shape = (*q.shape[:3], k.shape[-2])
    random = seeds.resolve(
        "scaled_dot_product_attention", shape, q.device, dropout_p, training,
        seed=seed, stream=stream, origin=origin, generator=generator,
    )  # fmt: skip
    heads_total = _check_heads_total(heads_total, shape, random.origin)
    name = dispatch.choose("attention", backend, q)
    if name == "reference":
        o = reference.attention(q, k, v, attn_mask, causal, scale, random, heads_total)
    else:
        if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "scaled_dot_product_attention: attn_mask requires a gradient, which the fused kernels do not compute; "
                'detach it, or call with backend="reference"'
            )
        rest = (causal, scale, *random, heads_total, dispatch.NAMESPACE[name])
        o = call(Attention, *distinct(q, k, v), attn_mask, *rest)[0]
    if query.dim() > 3:
        return o if len(lead) == 1 else o.unflatten(0, lead)
    return o.squeeze(1) if query.dim() == 3 else o[0, 0]


def _autocast(*tensors):
    """As torch's own: under autocast, floating inputs are cast to its dtype (float64 stays)."""
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return tensors
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _causal(is_causal, causal_align):
    if causal_align is None:
        return CAUSAL["upper_left"] if is_causal else CAUSAL[False]
    if causal_align not in ("upper_left", "lower_right"):
        raise ValueError(
            f"scaled_dot_product_attention: causal_align must be 'upper_left' or 'lower_right', got {causal_align!r}"
        )
    return CAUSAL[causal_align]


def _four_dimensional(query, key, value):
    """The leading batch sizes, and query, key, value as [B, H, N, D]."""
    name = "scaled_dot_product_attention"
    if not query.dim() == key.dim() == value.dim() or query.dim() < 2:
        raise ValueError(
            f"{name}: query, key and value need the same number of dimensions, at least 2; got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"{name}: query, key and value must share a dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    if query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        return (query.shape[0],), query, key, value
    if query.dim() == 2:
        return (1,), *(t[None, None] for t in (query, key, value))
    if query.dim() == 3:
        lead = _broadcast(query, key, value, 1)
        return lead, *(t.expand(*lead, *t.shape[1:]).unsqueeze(1) for t in (query, key, value))
    lead = _broadcast(query, key, value, query.dim() - 3)
    return lead, *(t.expand(*lead, *t.shape[-3:]).flatten(0, -4) for t in (query, key, value))


def _broadcast(query, key, value, dims):
    try:
        return tuple(torch.broadcast_shapes(query.shape[:dims], key.shape[:dims], value.shape[:dims]))
    except RuntimeError as error:
        raise ValueError(
            "scaled_dot_product_attention: the leading dimensions of query, key and value do not broadcast: "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        ) from error


def _check_heads(q, k, v, enable_gqa):
    name = "scaled_dot_product_attention"
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or k.shape[1] != v.shape[1]:
        raise ValueError(
            f"{name}: query and key share head_dim, key and value share heads and length; got query {tuple(q.shape)}, "
            f"key {tuple(k.shape)}, value {tuple(v.shape)} as [B, H, N, D]"
        )
    if q.shape[-1] > 256 or v.shape[-1] > 256:
        raise ValueError(f"{name}: head_dim is at most 256, got {q.shape[-1]} for query and key, {v.shape[-1]} for value")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise ValueError(f"{name}: query has {heads} heads and key {kv_heads}; pass enable_gqa=True for grouped queries")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{name}: the query heads ({heads}) must be a multiple of the key heads ({kv_heads})")


def _check_mask(attn_mask, shape, q):
    """The mask as a [B, Hq, Nq, Nk] view, or None."""
    if attn_mask is None:
        return None
    name = "scaled_dot_product_attention"
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"{name}: attn_mask must be bool or floating, got {attn_mask.dtype}")
    if attn_mask.device != q.device:
        raise ValueError(f"{name}: attn_mask is on {attn_mask.device} and the query on {q.device}; they must share a device")
    shape = tuple(n for n in shape if n is not None)
    try:
        full = attn_mask.expand(shape if attn_mask.dim() > 2 else shape[-2:])
    except RuntimeError as error:
        raise ValueError(f"{name}: attn_mask {tuple(attn_mask.shape)} does not broadcast to {shape}") from error
    return full.expand(shape).reshape(*q.shape[:3], shape[-1])


def _check_heads_total(heads_total, shape, origin):
    batch, heads = shape[0], shape[1]
    if heads_total is None:
        return heads
    if heads_total < heads or origin[0] + (batch - 1) * heads_total + heads > 2**32:
        raise ValueError(
            f"scaled_dot_product_attention: heads_total must be at least the {heads} heads given and keep every plane below "
            f"2**32, got {heads_total}"
        )
    return heads_total
