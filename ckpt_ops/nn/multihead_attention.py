"""torch.nn.MultiheadAttention on this package's attention."""

import functools
import operator

import torch
from torch import nn
from torch.nn.functional import linear

from .. import functional as F
from .. import saved
from ..saved.accepts import registers
from ._random import RandomModule

_MAX_HEAD_DIM = 256  # of scaled_dot_product_attention


class MultiheadAttention(RandomModule, nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with dropout that keeps 8 bytes and a packed projection that can be regenerated.

    Arguments, state_dict and the meaning of masks (True hides) are torch's. torch's own forward serves what needs the
    attention weights (need_weights=True, which is torch's default), add_bias_kv, add_zero_attn, nested tensors, masks that
    require a gradient and heads above 256. A query whose keys are all hidden gives the output projection of 0, not NaN.

    Kept for backward, self-attention, in elements a token: embed_dim (input) + 3 * embed_dim (q, k, v, one storage)
    + embed_dim (attention's result); and 4 bytes a query row and head, 8 bytes.
    """

    regenerable = {"qkv": ("",)}

    @registers
    def forward(
        self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True,
        is_causal=False,
    ):  # fmt: skip
        """query [B, Nq, E] (batch_first), [Nq, B, E] or [Nq, E]; key, value alike -> (output like query, None or weights)."""
        if need_weights or self._is_torchs(query, key, value, attn_mask, key_padding_mask):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )  # fmt: skip
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal is a hint about attn_mask, which is None")
        if is_causal and key_padding_mask is None:
            attn_mask = None  # the kernel's own causal mask is the cheaper one
        else:
            is_causal = False
        batched, batch_first = query.dim() == 3, self.batch_first or query.dim() == 2
        if not batched:
            query, key, value = _same(lambda t: t.unsqueeze(0), query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = (_heads(t, self.num_heads, batch_first) for t in self._project(query, key, value))
        mask = _visible(attn_mask, key_padding_mask, self.num_heads, q.dtype)
        o = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal, training=self.training, **self.random()
        )  # fmt: skip
        output = linear(o.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)  # [B, Nq, E]
        if not batched:
            return output.squeeze(0), None
        return output if batch_first else output.transpose(0, 1).contiguous(), None

    def _is_torchs(self, query, key, value, *masks):
        grad = torch.is_grad_enabled() and any(m is not None and m.requires_grad for m in masks)
        nested = any(t.is_nested for t in (query, key, value))
        return grad or nested or self.bias_k is not None or self.add_zero_attn or self.head_dim > _MAX_HEAD_DIM

    def _project(self, query, key, value):
        """q, k, v of the inputs' layout. They lie in one storage where the inputs are one tensor."""
        w, b, size = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        biases = (None,) * 3 if b is None else b.chunk(3)
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return _linear(query, w, b).chunk(3, -1)
        elif key is value:
            kv = _linear(key, w[size:], None if b is None else b[size:])
            return _linear(query, w[:size], biases[0]), *kv.chunk(2, -1)
        else:
            weights = w.chunk(3)
        return tuple(_linear(t, *wb) for t, *wb in zip((query, key, value), weights, biases))


def _linear(x, weight, bias):
    """A projection whose result is regenerated where this module's are."""
    y = linear(x, weight, bias)
    if engine := saved.active():
        engine.register("in_proj", linear, (x, weight, bias), (y,))
    return y


def _heads(t, heads, batch_first):
    """[B, N, E] or [N, B, E] as a view [B, heads, N, E / heads]."""
    return t.unflatten(-1, (heads, -1)).permute(*((0, 2, 1, 3) if batch_first else (1, 2, 0, 3)))


def _same(fn, *tensors):
    """fn of each; tensors that are one stay one."""
    made = {id(t): fn(t) for t in tensors}
    return tuple(made[id(t)] for t in tensors)


def _visible(attn_mask, key_padding_mask, heads, dtype):
    """torch's two masks (True hides; floating ones are added) as one for scaled_dot_product_attention (True shows)."""
    masks = []
    if attn_mask is not None:  # [Nq, Nk] or [B * heads, Nq, Nk]
        masks.append(attn_mask.unflatten(0, (-1, heads)) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:  # [B, Nk]
        masks.append(key_padding_mask[:, None, None, :])
    if not masks:
        return None
    if all(m.dtype == torch.bool for m in masks):
        return ~functools.reduce(operator.or_, masks)
    return functools.reduce(operator.add, (_additive(m, dtype) for m in masks))


def _additive(mask, dtype):
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
